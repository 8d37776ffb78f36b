// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

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
