// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

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
