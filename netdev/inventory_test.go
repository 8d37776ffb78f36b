// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

func TestInventory_List(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	nstest.NIC(t, "mgmt", 1500)
	node := newNode(t, nic)
	attach(t, node, nstest.New(t), netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	nstest.DefaultRoute(t, "mgmt")
	nics, err := netdev.NewInventory("/sys").List()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range nics {
		got = append(got, fmt.Sprintf("%s uplink=%t", n.Name, n.Uplink))
	}
	if diff := cmp.Diff([]string{"mgmt uplink=true", "nic0 uplink=false"}, got); diff != "" {
		t.Errorf("NICs without lo and macvlans (-want +got):\n%s", diff)
	}
}

// uplinks returns the names of the uplinks that the Inventory lists.
func uplinks(t *testing.T, i *netdev.Inventory) (names []string) {
	t.Helper()
	nics, err := i.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nics {
		if n.Uplink {
			names = append(names, n.Name)
		}
	}
	return names
}

func TestInventory_List_followsDefaultRouteThroughStackedLinks(t *testing.T) {
	for _, tc := range []struct {
		name   string
		stack  func(t *testing.T)
		routed string
		want   []string
	}{
		{"a bridge", func(t *testing.T) { nstest.Bridge(t, "br0", "nic0") }, "br0", []string{"br0", "nic0"}},
		{"a VLAN", func(t *testing.T) { nstest.VLAN(t, "nic0", "nic0.100", 100) }, "nic0.100",
			[]string{"nic0", "nic0.100"}},
		{"a bond", func(t *testing.T) { nstest.Bond(t, "bond0", netlink.BOND_MODE_ACTIVE_BACKUP, "nic0", "nic1") },
			"bond0", []string{"bond0", "nic0", "nic1"}},
		{"a bridge on a VLAN on a bond", func(t *testing.T) {
			nstest.Bond(t, "bond0", netlink.BOND_MODE_802_3AD, "nic0")
			nstest.VLAN(t, "bond0", "bond0.100", 100)
			nstest.Bridge(t, "br0", "bond0.100")
		}, "br0", []string{"bond0", "bond0.100", "br0", "nic0"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, name := range []string{"nic0", "nic1", "nic2"} {
				nstest.NIC(t, name, 1500)
			}
			tc.stack(t)
			inventory := netdev.NewInventory("/sys")
			if got := uplinks(t, inventory); got != nil {
				t.Errorf("without a default route, the uplinks are %v, want none", got)
			}
			remove := nstest.DefaultRoute(t, tc.routed)
			if diff := cmp.Diff(tc.want, uplinks(t, inventory)); diff != "" {
				t.Errorf("uplinks with a default route through %s (-want +got):\n%s", tc.routed, diff)
			}
			remove()
			if diff := cmp.Diff(tc.want, uplinks(t, inventory)); diff != "" {
				t.Errorf("uplinks after the default route was removed (-want +got):\n%s", diff)
			}
			next := netdev.NewInventory("/sys")
			next.AddUplinks(inventory.Uplinks())
			if diff := cmp.Diff(tc.want, uplinks(t, next)); diff != "" {
				t.Errorf("uplinks of the next Inventory (-want +got):\n%s", diff)
			}
		})
	}
}
