// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"bytes"
	"cmp"
	"fmt"
	"net"
	"slices"
	"strings"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

// refusedLinks describes the node's links on a device's NIC that lose their frames to the identity checks: VLANs and
// bridges with a MAC address other than the NIC's, and other ports of bridges, such as virtual machines' ports.
// Tunnels have the NIC's address in their frames.
func (s stack) refusedLinks(d *device) (refused []string) {
	if d.network.Enforcement == config.EnforcementNone || d.network.Identity != config.IdentityEnforce {
		return nil
	}
	for _, n := range s.above(d.nic) {
		switch {
		case n.Type != "vlan" && n.Type != "bridge":
		case !bytes.Equal(n.MAC, d.nic.MAC) && !allowsMAC(d.network, n.MAC):
			refused = append(refused, fmt.Sprintf("%s (%s)", n.Name, n.MAC))
		case (len(d.network.Allow.MACs) == 0 || len(d.network.Allow.VLANs) == 0) && s.hasOtherPorts(n, d.nic):
			refused = append(refused, "the other ports of "+n.Name)
		}
	}
	return refused
}

// allowsMAC reports whether frames with a MAC address pass. Frames of links on VLANs have a tag, so they need
// allow.vlans, too.
func allowsMAC(network *config.Network, mac net.HardwareAddr) bool {
	return len(network.Allow.VLANs) > 0 && slices.ContainsFunc(network.Allow.MACs, func(text string) bool {
		allowed, err := net.ParseMAC(text)
		return err == nil && bytes.Equal(allowed, mac)
	})
}

// above returns the NICs that are stacked on a NIC, by name.
func (s stack) above(below netdev.NIC) (above []netdev.NIC) {
	for _, n := range s.nics {
		if slices.Contains(n.Below, below.Index) {
			above = append(above, n)
		}
	}
	slices.SortFunc(above, func(a, b netdev.NIC) int { return cmp.Compare(a.Name, b.Name) })
	return above
}

// hasOtherPorts reports whether a bridge connects a NIC with links that are not on the NIC.
func (s stack) hasOtherPorts(bridge, nic netdev.NIC) bool {
	for _, n := range s.nics {
		if n.Master == bridge.Name && n.Index != nic.Index && !slices.Contains(n.Below, nic.Index) {
			return true
		}
	}
	return false
}

// linksWarnings returns the warnings about links on the node with dropped frames.
func linksWarnings(s stack, devices map[string]*device) (warnings []driver.Warning) {
	for _, d := range devices {
		if !d.isShared() {
			continue
		}
		refused := s.refusedLinks(d)
		if len(refused) == 0 {
			continue
		}
		warnings = append(warnings, driver.Warning{
			Device: d.nic.Name, Reason: v1alpha1.EventReasonLinksRefused,
			Message: fmt.Sprintf("the kernel drops frames of %s on %s, because their MAC address is not that of %s: "+
				"share another NIC, allow them (allow.macs and allow.vlans of network %q), or set its identity to Audit",
				strings.Join(refused, ", "), d.nic.Name, d.nic.Name, d.network.Name),
			EndReason:  v1alpha1.EventReasonLinksAllowed,
			EndMessage: "the frames of all links of the node on " + d.nic.Name + " pass",
		})
	}
	slices.SortFunc(warnings, func(a, b driver.Warning) int { return cmp.Compare(a.Device, b.Device) })
	return warnings
}
