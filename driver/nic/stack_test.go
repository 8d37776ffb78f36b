// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

// A node with two hardware NICs and links on them. The tests leave out the
// links that they do not need.
var (
	eno1      = netdev.NIC{Name: "eno1", Index: 2, Bus: "pci", PCIBusID: "0000:3b:00.0", Speed: 10e9}
	eno2      = netdev.NIC{Name: "eno2", Index: 3, Bus: "pci", PCIBusID: "0000:3b:00.1", Speed: 10e9}
	vlan100   = netdev.NIC{Name: "eno1.100", Index: 10, Speed: 10e9, Below: []int{2}}
	vlan200   = netdev.NIC{Name: "eno1.200", Index: 11, Speed: 10e9, Below: []int{2}}
	bond0     = netdev.NIC{Name: "bond0", Index: 12, Speed: 20e9, Below: []int{2, 3}}
	bondVLAN  = netdev.NIC{Name: "bond0.100", Index: 13, Speed: 20e9, Below: []int{2, 3, 12}}
	bondVLAN2 = netdev.NIC{Name: "bond0.200", Index: 14, Speed: 20e9, Below: []int{2, 3, 12}}
	veth0     = netdev.NIC{Name: "veth0", Index: 20, Speed: 10e9}
	vethVLAN  = netdev.NIC{Name: "veth0.100", Index: 21, Speed: 10e9, Below: []int{20}}
	vethVLAN2 = netdev.NIC{Name: "veth0.200", Index: 22, Speed: 10e9, Below: []int{20}}
)

func memberOf(n netdev.NIC, master string) netdev.NIC {
	n.Master = master
	return n
}

func TestPlan_stackedNICs(t *testing.T) {
	degraded := bond0
	degraded.Speed = 10e9
	disconnected := eno1
	disconnected.Speed = 0
	for _, tc := range []struct {
		name     string
		nics     []netdev.NIC
		networks string
		want     []string // NAME=LINE of the shared NICs
		problem  string
	}{
		{
			name:     "a bond has the speed of its active members",
			networks: `[{name: a, interfaces: [bond0]}]`,
			nics:     []netdev.NIC{memberOf(eno1, "bond0"), memberOf(eno2, "bond0"), bond0},
			want:     []string{"bond0=20G"},
		},
		{
			name:     "a bond with a failed member",
			networks: `[{name: a, interfaces: [bond0], bandwidth: 20G}]`,
			nics:     []netdev.NIC{memberOf(eno1, "bond0"), memberOf(eno2, "bond0"), degraded},
			want:     []string{"bond0=10G"},
		},
		{
			name:     "a bond of virtual links has the configured bandwidth",
			networks: `[{name: a, interfaces: [bond0], bandwidth: 1G}]`,
			nics:     []netdev.NIC{memberOf(veth0, "bond0"), {Name: "bond0", Index: 12, Speed: 10e9, Below: []int{20}}},
			want:     []string{"bond0=1G"},
		},
		{
			name:     "members of a bond",
			networks: `[{name: a, interfaces: [bond0, eno1]}]`,
			nics:     []netdev.NIC{memberOf(eno1, "bond0"), bond0}, want: []string{"bond0=20G"},
			problem: "eno1: the NIC belongs to bond0",
		},
		{
			name:     "a VLAN has the speed of its NIC",
			networks: `[{name: a, interfaces: [eno1.100], bandwidth: 40G}]`,
			nics:     []netdev.NIC{eno1, vlan100}, want: []string{"eno1-100=10G"},
		},
		{
			name:     "a VLAN on a bond",
			networks: `[{name: a, interfaces: [bond0.100]}]`,
			nics:     []netdev.NIC{memberOf(eno1, "bond0"), memberOf(eno2, "bond0"), bond0, bondVLAN},
			want:     []string{"bond0-100=20G"},
		},
		{
			name:     "a VLAN and its NIC",
			networks: `[{name: a, interfaces: [eno1.100]}, {name: b, interfaces: [eno1]}]`,
			nics:     []netdev.NIC{vlan100, eno1}, want: []string{"pci-0000-3b-00-0=10G"},
			problem: `eno1.100: the NIC is on eno1, which network "b" shares`,
		},
		{
			name: "a VLAN and its NIC without enforcement", nics: []netdev.NIC{vlan100, eno1},
			networks: `[{name: a, interfaces: [eno1.100], bandwidth: 4G},
				{name: b, interfaces: [eno1], bandwidth: 6G, enforcement: None}]`,
			want: []string{"eno1-100=4G", "pci-0000-3b-00-0=6G"},
		},
		{
			name:     "two VLANs of a NIC without bandwidth",
			networks: `[{name: a, interfaces: ["eno1.*"]}]`,
			nics:     []netdev.NIC{eno1, vlan200, vlan100}, want: []string{"eno1-100=10G"},
			problem: "eno1.200: the NIC and eno1.100 use eno1: set bandwidth for both",
		},
		{
			name:     "two VLANs that divide the speed of their NIC",
			networks: `[{name: a, interfaces: ["eno1.*"], bandwidth: 5G}]`,
			nics:     []netdev.NIC{eno1, vlan100, vlan200}, want: []string{"eno1-100=5G", "eno1-200=5G"},
		},
		{
			name:     "two VLANs with configured bandwidth on a virtual link",
			networks: `[{name: a, interfaces: ["veth0.*"], bandwidth: 8G}]`,
			nics:     []netdev.NIC{veth0, vethVLAN, vethVLAN2}, want: []string{"veth0-100=8G", "veth0-200=8G"},
		},
		{
			name:     "two VLANs with more bandwidth than their NIC get parts of its speed",
			networks: `[{name: a, interfaces: [eno1.100], bandwidth: 15G}, {name: b, interfaces: [eno1.200], bandwidth: 5G}]`,
			nics:     []netdev.NIC{eno1, vlan100, vlan200}, want: []string{"eno1-100=7500M", "eno1-200=2500M"},
		},
		{
			name:     "two VLANs of a bond",
			networks: `[{name: a, interfaces: ["bond0.*"], bandwidth: 10G}]`,
			nics:     []netdev.NIC{memberOf(eno1, "bond0"), memberOf(eno2, "bond0"), bond0, bondVLAN, bondVLAN2},
			want:     []string{"bond0-100=10G", "bond0-200=10G"},
		},
		{
			name:     "two VLANs of a bond with a failed member",
			networks: `[{name: a, interfaces: ["bond0.*"], bandwidth: 10G}]`,
			nics:     []netdev.NIC{memberOf(eno1, "bond0"), memberOf(eno2, "bond0"), degraded, bondVLAN, bondVLAN2},
			want:     []string{"bond0-100=5G", "bond0-200=5G"},
		},
		{
			name:     "two VLANs of a NIC without a carrier and without a speed",
			networks: `[{name: a, interfaces: ["eno1.*"], bandwidth: 5G}]`,
			nics:     []netdev.NIC{disconnected, vlan100, vlan200}, want: []string{"eno1-100=5G", "eno1-200=5G"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			devices, problems := plan(tc.nics, load(t, tc.networks))
			var got []string
			for _, d := range devices {
				got = append(got, fmt.Sprintf("%s=%s", d.name, formatRate(d.line)))
			}
			slices.Sort(got)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("shared NICs (-want +got):\n%s", diff)
			}
			var problem string
			for _, p := range problems {
				problem += p.nic + ": " + p.err.Error()
			}
			if !strings.HasPrefix(problem, tc.problem) || tc.problem == "" && problem != "" {
				t.Errorf("problem %q, want %q", problem, tc.problem)
			}
		})
	}
}

func TestPCIAttributes(t *testing.T) {
	of := func(busID string) attribute.Map {
		return attribute.Map{"pciBusID": attribute.Text(busID), "pcieRoot": attribute.Text(busID[:7])}
	}
	other := netdev.NIC{PCIBusID: "0001:5e:00.0"}
	for _, tc := range []struct {
		name string
		base []netdev.NIC
		want attribute.Map
	}{
		{"one NIC", []netdev.NIC{eno1}, of("0000:3b:00.0")},
		{"two NICs of one root", []netdev.NIC{eno1, eno2}, attribute.Map{"pcieRoot": attribute.Text("0000:3b")}},
		{"NICs of different roots", []netdev.NIC{eno1, eno2, other}, attribute.Map{}},
	} {
		if diff := cmp.Diff(tc.want, pciAttributes(tc.base, of)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
	}
}

// Bridges and VLANs with another MAC address than the NIC below them lose their frames to the checks of identity.
func TestLinksWarnings(t *testing.T) {
	withMAC := func(n netdev.NIC, last byte) netdev.NIC {
		n.MAC = net.HardwareAddr{2, 0, 0, 0, 0, last}
		return n
	}
	vlanWith := func(last byte) netdev.NIC {
		n := withMAC(vlan100, last)
		n.Type = "vlan"
		return n
	}
	parent, vlan := withMAC(eno1, 1), vlanWith(1)
	bridge := withMAC(netdev.NIC{Name: "br0", Type: "bridge", Index: 30, Below: []int{2, 10}}, 1)
	vrf := withMAC(netdev.NIC{Name: "blue", Type: "vrf", Index: 50, Below: []int{2}}, 2)
	onOther := withMAC(netdev.NIC{Name: "eno2.7", Type: "vlan", Index: 40, Below: []int{3}}, 2)
	guest := memberOf(withMAC(netdev.NIC{Name: "tap0", Index: 31}, 9), "br0")
	bridgeOfGuest := bridge
	bridgeOfGuest.Below = append(slices.Clone(bridge.Below), guest.Index)
	for _, tc := range []struct {
		name    string
		network string
		nics    []netdev.NIC
		want    string // part of the message; "" if there is no warning
	}{
		{"a VLAN", "", []netdev.NIC{parent, vlan}, ""},
		{"a VLAN with another address", "", []netdev.NIC{parent, vlanWith(2)}, "eno1.100 (02:00:00:00:00:02)"},
		{"an address and a VLAN that the network allows", ", allow: {macs: [\"02:00:00:00:00:02\"], vlans: [100]}",
			[]netdev.NIC{parent, vlanWith(2)}, ""},
		{"an address that the network allows without the VLAN", ", allow: {macs: [\"02:00:00:00:00:02\"]}",
			[]netdev.NIC{parent, vlanWith(2)}, "eno1.100"},
		{"a VRF", "", []netdev.NIC{parent, vrf}, ""},
		{"a bridge on the VLAN", "", []netdev.NIC{parent, memberOf(vlan, "br0"), bridge}, ""},
		{"a bridge with a virtual machine", "", []netdev.NIC{parent, memberOf(vlan, "br0"), bridgeOfGuest, guest},
			"the other ports of br0"},
		{"frames are only audited", ", identity: Audit", []netdev.NIC{parent, vlanWith(2)}, ""},
		{"no enforcement", ", enforcement: None", []netdev.NIC{parent, vlanWith(2)}, ""},
		{"another NIC", "", []netdev.NIC{parent, eno2, onOther}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := load(t, "[{name: a, interfaces: [eno1]"+tc.network+"}]")
			planned, problems := plan(tc.nics, c)
			if len(planned) != 1 || len(problems) > 0 {
				t.Fatalf("plan returned %d devices and the problems %v, want one device", len(planned), problems)
			}
			warnings := linksWarnings(newStack(tc.nics, c), map[string]*device{"eno1": planned[0]})
			if tc.want == "" && len(warnings) > 0 {
				t.Errorf("got %+v, want no warning", warnings)
			}
			if tc.want != "" && (len(warnings) != 1 || !strings.Contains(warnings[0].Message, tc.want)) {
				t.Errorf("got %+v, want one warning with %q", warnings, tc.want)
			}
		})
	}
}
