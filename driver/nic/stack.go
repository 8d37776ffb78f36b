// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"cmp"
	"fmt"
	"slices"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

// stack is the node's NICs, and how VLANs and bonds stack them.
type stack struct {
	nics map[int]netdev.NIC // by interface index
	// configured is the total configured bandwidth of all networks' NICs with frames that pass through a NIC, in bits
	// per second.
	configured map[int]uint64
}

func newStack(nics []netdev.NIC, c *config.DriverConfig) stack {
	s := stack{nics: map[int]netdev.NIC{}, configured: map[int]uint64{}}
	for _, n := range nics {
		s.nics[n.Index] = n
	}
	for _, n := range nics {
		network := c.NetworkOf(n.Name, n.Uplink)
		if network == nil || network.Bandwidth == nil || n.Master != "" {
			continue
		}
		for _, hop := range s.path(n) {
			s.configured[hop.Index] += uint64(network.Bandwidth.Value())
		}
	}
	return s
}

// lowestFirst returns the NICs, each after the NICs below it.
func (s stack) lowestFirst() []netdev.NIC {
	nics := make([]netdev.NIC, 0, len(s.nics))
	for _, n := range s.nics {
		nics = append(nics, n)
	}
	slices.SortFunc(nics, func(a, b netdev.NIC) int {
		return cmp.Or(cmp.Compare(len(a.Below), len(b.Below)), cmp.Compare(a.Index, b.Index))
	})
	return nics
}

// base returns the NICs that carry a NIC's frames: itself, or the lowest NICs below it.
func (s stack) base(n netdev.NIC) (base []netdev.NIC) {
	for _, index := range n.Below {
		if below, known := s.nics[index]; known && len(below.Below) == 0 {
			base = append(base, below)
		}
	}
	if len(base) == 0 {
		return []netdev.NIC{n}
	}
	return base
}

// path returns the NICs that all of a NIC's frames pass through: itself, and those below it, except single members of
// a bond.
func (s stack) path(n netdev.NIC) []netdev.NIC {
	path, base := []netdev.NIC{n}, s.base(n)
	for _, index := range n.Below {
		below, known := s.nics[index]
		same := func(a, b netdev.NIC) bool { return a.Index == b.Index }
		if known && slices.EqualFunc(base, s.base(below), same) {
			path = append(path, below)
		}
	}
	return path
}

// line returns the line rate of a network's NIC, in bits per second: the configured rate, or the speed if no rate is
// configured. It is less than configured if the hardware is slower than the total configured rate of all NICs with
// frames that pass through it.
func (s stack) line(n netdev.NIC, network *config.Network) uint64 {
	if network.Bandwidth == nil {
		return n.Speed
	}
	bandwidth := uint64(network.Bandwidth.Value())
	line := bandwidth
	for _, hop := range s.path(n) {
		sum := s.configured[hop.Index]
		if hop.Speed > 0 && hop.Speed < sum && s.isHardware(hop) {
			line = min(line, uint64(float64(bandwidth)*float64(hop.Speed)/float64(sum)))
		}
	}
	return line
}

// isHardware reports whether hardware negotiated the speed of a NIC.
// Virtual links report an arbitrary speed.
func (s stack) isHardware(n netdev.NIC) bool {
	return !slices.ContainsFunc(s.base(n), func(n netdev.NIC) bool { return n.Bus != "pci" })
}

// conflict returns why a NIC cannot be shared in addition to others, which precede it in lowestFirst; nil if it can
// be shared.
func (s stack) conflict(d *device, others []*device) error {
	for _, o := range others {
		if slices.Contains(d.nic.Below, o.nic.Index) && o.network.Enforcement != config.EnforcementNone {
			return fmt.Errorf("the NIC is on %s, which network %q shares: the queues of %s cannot separate the shares of both: "+
				"remove one of them from interfaces", o.nic.Name, o.network.Name, o.nic.Name)
		}
	}
	for _, hop := range s.path(d.nic) {
		for _, o := range others {
			shared := slices.ContainsFunc(s.path(o.nic), func(n netdev.NIC) bool { return n.Index == hop.Index })
			if shared && (d.network.Bandwidth == nil || o.network.Bandwidth == nil) {
				return fmt.Errorf("the NIC and %s use %s: set bandwidth for both, so that they divide its speed",
					o.nic.Name, hop.Name)
			}
		}
	}
	return nil
}

// pciAttributes returns the standard PCI device attributes that all NICs of a base have in common, so a bond's
// attributes describe all of its members.
func pciAttributes(base []netdev.NIC, of func(busID string) attribute.Map) attribute.Map {
	common := of(base[0].PCIBusID)
	for _, n := range base[1:] {
		attribute.Intersect(common, of(n.PCIBusID))
	}
	return common
}
