// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
)

func TestUplinkMemory_update(t *testing.T) {
	// Indexes: 1 lo, 2 and 3 hardware, from 10 links on them.
	hardware := topology{1: {name: "lo"}, 2: {name: "eno1"}, 3: {name: "eno2"}}
	with := func(links topology) topology {
		all := maps.Clone(hardware)
		maps.Copy(all, links)
		return all
	}
	bridged := with(topology{2: {name: "eno1", master: 10}, 10: {name: "br0"}})
	bonded := with(topology{2: {name: "eno1", master: 10}, 3: {name: "eno2", master: 10}, 10: {name: "bond0"}})
	type step struct {
		links  topology
		routed []int
		after  time.Duration // since the last step
	}
	for _, tc := range []struct {
		name  string
		steps []step
		want  []string
	}{
		{"no default route", []step{{links: hardware}}, nil},
		{"the NIC itself", []step{{links: hardware, routed: []int{2}}}, []string{"eno1"}},
		{"several default routes", []step{{links: hardware, routed: []int{2, 3, 2}}}, []string{"eno1", "eno2"}},
		{"a VLAN", []step{{links: with(topology{10: {name: "eno1.100", lower: 2}}), routed: []int{10}}},
			[]string{"eno1", "eno1.100"}},
		{"a bridge", []step{{links: bridged, routed: []int{10}}}, []string{"br0", "eno1"}},
		{"a bond", []step{{links: bonded, routed: []int{10}}}, []string{"bond0", "eno1", "eno2"}},
		{"a bridge on a VLAN on a bond", []step{{routed: []int{12}, links: with(topology{
			2: {name: "eno1", master: 10}, 10: {name: "bond0"},
			11: {name: "bond0.100", lower: 10, master: 12}, 12: {name: "br0"},
		})}}, []string{"bond0", "bond0.100", "br0", "eno1"}},
		{"a VLAN on the NIC of the default route is not below it",
			[]step{{links: with(topology{10: {name: "eno1.200", lower: 2}}), routed: []int{2}}}, []string{"eno1"}},
		{"the route is absent for a day",
			[]step{{links: hardware, routed: []int{2}}, {links: hardware, after: 24 * time.Hour}}, []string{"eno1"}},
		{"another NIC has a default route meanwhile",
			[]step{{links: hardware, routed: []int{2, 3}}, {links: hardware, routed: []int{3}}}, []string{"eno1", "eno2"}},
		{"the bond is removed and its ports are free",
			[]step{{links: bonded, routed: []int{10}}, {links: hardware, after: time.Minute}},
			[]string{"bond0", "eno1", "eno2"}},
		{"the NIC returns with another index",
			[]step{{links: hardware, routed: []int{2}}, {links: topology{}, after: time.Minute},
				{links: topology{7: {name: "eno1"}}, after: time.Minute}}, []string{"eno1"}},
		{"the link has not existed for long",
			[]step{{links: bridged, routed: []int{10}}, {links: hardware, after: time.Minute},
				{links: hardware, after: uplinkMemoryTime + time.Minute}}, []string{"eno1"}},
		{"a route through a link that no longer exists", []step{{links: hardware, routed: []int{99, 0}}}, nil},
		{"links that refer to each other", []step{{routed: []int{10}, links: topology{
			10: {name: "a", lower: 11}, 11: {name: "b", lower: 10},
		}}}, []string{"a", "b"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			memory, now := uplinkMemory{}, time.Unix(0, 0)
			for _, s := range tc.steps {
				now = now.Add(s.after)
				memory.update(s.links, s.routed, now)
			}
			if diff := cmp.Diff(tc.want, slices.Sorted(maps.Keys(memory))); diff != "" {
				t.Errorf("uplinks (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTopology_allAbove(t *testing.T) {
	// A bond of 2 and 3, a VLAN on it, another VLAN on that one, and a NIC without any.
	stack := topology{
		2: {name: "eno1", master: 10}, 3: {name: "eno2", master: 10}, 4: {name: "eno3"}, 10: {name: "bond0"},
		11: {name: "bond0.5", lower: 10}, 12: {name: "bond0.5.6", lower: 11},
	}
	for index, want := range map[int][]int{2: {10, 11, 12}, 10: {11, 12}, 11: {12}, 12: nil, 4: nil, 99: nil} {
		if got := slices.Sorted(maps.Keys(stack.allAbove(index))); !slices.Equal(got, want) {
			t.Errorf("links above link %d: got %v, want %v", index, got, want)
		}
	}
}

func TestNewTopology(t *testing.T) {
	attrs := func(index, parent, nsid int) netlink.LinkAttrs {
		return netlink.LinkAttrs{Index: index, ParentIndex: parent, NetNsID: nsid}
	}
	got := newTopology([]netlink.Link{
		&netlink.Vlan{LinkAttrs: attrs(3, 2, -1)},
		&netlink.Vlan{LinkAttrs: attrs(4, 2, 0)},  // on a NIC of another namespace
		&netlink.Veth{LinkAttrs: attrs(5, 2, -1)}, // with its peer in this namespace
	})
	want := topology{3: {kind: "vlan", lower: 2}, 4: {kind: "vlan"}, 5: {kind: "veth"}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(stackedLink{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestTopology_master(t *testing.T) {
	links := topology{
		2: {name: "eno1", master: 10}, 3: {name: "eno2", master: 11}, 4: {name: "eno3"},
		10: {name: "blue", kind: "vrf"}, 11: {name: "bond0", kind: "bond"},
	}
	for index, want := range map[int]string{2: "", 3: "bond0", 4: "", 99: ""} {
		if got := links.master(index); got != want {
			t.Errorf("master of link %d: got %q, want %q", index, got, want)
		}
	}
}

func TestTopology_belowVLANs(t *testing.T) {
	links := topology{
		2: {name: "eno1"}, 3: {name: "eno2"}, 10: {name: "eno1.100", kind: "vlan", lower: 2},
		11: {name: "eno1.100.200", kind: "vlan", lower: 10}, 12: {name: "eno1.101", kind: "vlan", lower: 2},
		13: {name: "eno1.100.200.300", kind: "vlan", lower: 11}, 14: {name: "link", kind: "macvlan", lower: 3},
	}
	for index, want := range map[int][]int{2: {2, 10, 11}, 3: nil, 10: {10, 11}, 12: nil} {
		if diff := cmp.Diff(want, links.belowVLANs(index)); diff != "" {
			t.Errorf("belowVLANs(%d) (-want +got):\n%s", index, diff)
		}
	}
}
