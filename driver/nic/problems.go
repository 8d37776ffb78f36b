// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/netdev/bpffs"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// problem is a NIC that the plugin cannot share, or cannot stop sharing.
type problem struct {
	nic    string // name of the interface
	device string // name of the device; "" if the NIC is not configured
	err    error
}

// errNoCarrier is wrapped by the problem of a NIC that can be shared once it gets a carrier. It does not affect
// readiness: another plugin could not share it either.
var errNoCarrier = errors.New("the NIC has no carrier and reports no speed")

// uplinkError is the problem of a NIC that only a network's pattern names, and that one of the node's default routes
// depends on. It does not affect readiness, because the network may be meant for nodes with more NICs, unless early
// is set: the plugin does not know yet whether it will share the NIC.
type uplinkError struct {
	network, toShare string
	early            bool // no default route depends on the NIC yet; see errIfMayBecomeUplink
}

func (e *uplinkError) Error() string {
	if e.early {
		return fmt.Sprintf("the node has no default route yet, and a pattern never selects the NIC of a default route: "+
			"the plugin waits up to %s; to share the NIC now, list %s in interfaces of network %q",
			uplinkTime, e.toShare, e.network)
	}
	return fmt.Sprintf("a default route of the node depends on the NIC, and a pattern never selects such a NIC: "+
		"to share it, list %s in interfaces of network %q", e.toShare, e.network)
}

// isFailure reports whether the NIC is configured, and why it cannot be shared affects readiness.
func (p problem) isFailure() bool {
	var uplink *uplinkError
	isKnownUplink := errors.As(p.err, &uplink) && !uplink.early
	return p.device != "" && !errors.Is(p.err, errNoCarrier) && !isKnownUplink
}

func (p problem) isUplink() bool { return errors.As(p.err, new(*uplinkError)) }

// withoutExpected omits the problems of uplinks if their network has other NICs on the node: the pattern serves its
// purpose. It keeps the problems of known NICs, because they are or were shared.
func withoutExpected(problems []problem, planned []*device, isKnown func(device string) bool) []problem {
	return slices.DeleteFunc(problems, func(p problem) bool {
		var uplink *uplinkError
		return errors.As(p.err, &uplink) && !isKnown(p.device) &&
			slices.ContainsFunc(planned, func(d *device) bool { return d.network.Name == uplink.network })
	})
}

// withRemedy adds a chart-based remedy to an error from package netdev, which does not know the chart.
func withRemedy(err error) error {
	var path *fs.PathError
	switch {
	case errors.Is(err, bpffs.ErrNotMounted):
		return fmt.Errorf("%w: mount one on /sys/fs/bpf of the node, or set plugin.mountBPFFS in the chart's values", err)
	case errors.Is(err, classify.ErrDenied): // before ErrNoPerfmon, which does not matter without bpf(2)
		return fmt.Errorf("%w: the plugin needs CAP_BPF, outside of a user namespace (rootless nodes, unprivileged LXC); "+
			"where SELinux enforces, set plugin.seLinuxOptions.type=spc_t in the chart's values", err)
	case errors.Is(err, classify.ErrNoPerfmon):
		return fmt.Errorf("%w: set plugin.perfmon=true in the chart's values", err)
	case errors.As(err, &path) && errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: does a security module of the node deny it? See plugin.appArmorProfile and "+
			"plugin.seLinuxOptions in the chart's values", err)
	default:
		return err
	}
}

// Problems implements driver.ProblemReporter.
func (k *Kind) Problems() (problems []driver.Problem) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, p := range k.problems {
		if p.device != "" {
			problems = append(problems, driver.Problem{Device: p.nic, Message: p.err.Error()})
		}
	}
	slices.SortFunc(problems, func(a, b driver.Problem) int { return strings.Compare(a.Device, b.Device) })
	return problems
}

// Ready implements driver.ReadinessChecker: the plugin can share a NIC, or none is configured on this node. Nodes
// differ, so a missing interface does not matter.
func (k *Kind) Ready() error {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if k.devices == nil {
		return errors.New("the plugin has not discovered the NICs yet")
	}
	return survey{k.sharedDevicesLocked(), k.problems}.ready()
}

// sharedDevicesLocked returns the devices that are on the node and in the configuration, by name. The
// caller holds k.mu.
func (k *Kind) sharedDevicesLocked() (devices []*device) {
	for _, d := range k.devices {
		if d.isShared() {
			devices = append(devices, d)
		}
	}
	slices.SortFunc(devices, func(a, b *device) int { return strings.Compare(a.name, b.name) })
	return devices
}

// survey is the result of looking at the node's configured NICs.
type survey struct {
	usable   []*device
	problems []problem
}

// ready returns nil if a NIC can be shared, or none is configured on this node. Otherwise it
// returns the problems.
func (s survey) ready() (failed error) {
	if len(s.usable) > 0 {
		return nil
	}
	for _, p := range s.problems {
		if p.isFailure() {
			failed = errors.Join(failed, fmt.Errorf("NIC %s cannot be shared: %w", p.nic, p.err))
		}
	}
	return failed
}

// CheckTakeover implements driver.TakeoverChecker.
func (k *Kind) CheckTakeover(ctx context.Context, published []resourceapi.Device) error {
	planned, problems, err := k.planOnly(ctx)
	if err != nil {
		return err
	}
	s := survey{problems: problems}
	k.node.RetryTrials()
	for _, d := range planned {
		if err := k.node.Check(d.nicConfig()); err != nil {
			s.problems = append(s.problems, problem{d.nic.Name, d.name, withRemedy(err)})
			continue
		}
		s.usable = append(s.usable, d)
	}
	return k.takeoverError(s, published)
}

// planOnly returns what Refresh would share, and the problems of the other NICs, without changing anything.
func (k *Kind) planOnly(ctx context.Context) (devices []*device, problems []problem, err error) {
	nics, err := k.list(ctx)
	if err != nil {
		return nil, nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	planned, problems := plan(nics, k.config)
	for _, d := range planned {
		if err := k.errIfMayBecomeUplink(d, nics); err != nil {
			problems = append(problems, problem{d.nic.Name, d.name, err})
			continue
		}
		devices = append(devices, d)
	}
	return devices, problems, nil
}

// RecheckTakeover implements driver.TakeoverChecker.
func (k *Kind) RecheckTakeover(published []resourceapi.Device) error {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.takeoverError(survey{k.sharedDevicesLocked(), k.problems}, published)
}

// takeoverError returns why this plugin cannot serve the published NICs, or nil. A NIC that its configuration does
// not name counts as removed on purpose, unless the configuration has the NIC's network and none of the node's NICs
// matches it.
func (k *Kind) takeoverError(s survey, published []resourceapi.Device) error {
	if err := s.ready(); err != nil {
		return err
	}
	for _, d := range published {
		if textOf(d, v1alpha1.AttributeKind) != Name || isUnserved(d) {
			continue
		}
		if err := k.servingError(s, d); err != nil {
			return err
		}
	}
	return nil
}

// servingError returns why a published NIC can no longer be served.
func (k *Kind) servingError(s survey, published resourceapi.Device) error {
	if slices.ContainsFunc(s.usable, func(d *device) bool { return d.name == published.Name }) {
		return nil
	}
	for _, p := range s.problems {
		switch {
		case p.device != published.Name:
		case p.isFailure(), p.isUplink():
			return fmt.Errorf("NIC %s, which the running plugin shares, cannot be shared: %w", p.nic, p.err)
		default:
			return nil
		}
	}
	name := textOf(published, v1alpha1.AttributeNetwork)
	configured := false
	for _, n := range k.config.Networks {
		configured = configured || n.Name == name
	}
	inUse := slices.ContainsFunc(s.usable, func(d *device) bool { return d.network.Name == name })
	if !configured || inUse {
		return nil
	}
	return fmt.Errorf("network %q matches no NIC of this node, but the running plugin shares %s in it: "+
		"does interfaces in the new configuration match the NIC? If a default route uses the NIC, interfaces must list "+
		"its exact name",
		name, textOf(published, v1alpha1.AttributeInterfaceName))
}

// isUnserved reports whether a published device's taints mean that the running plugin does not share it. A NIC
// without a carrier is shared.
func isUnserved(d resourceapi.Device) bool {
	return slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool {
		return t.Key == v1alpha1.TaintAbsent || t.Key == v1alpha1.TaintUnusable
	})
}

// textOf returns a text attribute of a device, or "".
func textOf(d resourceapi.Device, name resourceapi.QualifiedName) string {
	if v := d.Attributes[name].StringValue; v != nil {
		return *v
	}
	return ""
}
