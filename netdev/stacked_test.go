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

// The ends of a veth pair report a speed of 10 Gbit/s.

func TestInventory_List_bondFollowsMembers(t *testing.T) {
	for _, tc := range []struct {
		mode           netlink.BondMode
		speed          uint64 // with both members
		oneLeft        uint64 // with one member that is connected
		lacpOnSwitches bool
	}{
		{mode: netlink.BOND_MODE_ACTIVE_BACKUP, speed: 10e9, oneLeft: 10e9},
		{mode: netlink.BOND_MODE_BALANCE_XOR, speed: 20e9, oneLeft: 10e9},
		{mode: netlink.BOND_MODE_802_3AD, speed: 20e9, oneLeft: 10e9, lacpOnSwitches: true},
	} {
		t.Run(tc.mode.String(), func(t *testing.T) {
			nstest.Cable(t, "nic0", "switch0")
			nstest.Cable(t, "nic1", "switch1")
			inventory, changes := netdev.NewInventory(nstest.MountSysfs(t)), watch(t, newNode(t))
			if tc.lacpOnSwitches {
				nstest.Bond(t, "switch", tc.mode, "switch0", "switch1")
			}
			nstest.Bond(t, "bond0", tc.mode, "nic0", "nic1")
			expectNIC(t, changes, inventory, "bond0", tc.speed, true)
			nstest.SetDown(t, "switch0")
			expectNIC(t, changes, inventory, "bond0", tc.oneLeft, true)
			nstest.SetDown(t, "switch1")
			expectNIC(t, changes, inventory, "bond0", 0, false)

			bond, member := nstest.FindNIC(t, "bond0"), nstest.FindNIC(t, "nic0")
			if below := []int{member.Index, nstest.FindNIC(t, "nic1").Index}; cmp.Diff(below, bond.Below) != "" {
				t.Errorf("links below bond0: %v, want %v", bond.Below, below)
			}
			if member.Master != "bond0" || bond.PermanentMAC != nil {
				t.Errorf("master of nic0 %q, permanent address of bond0 %v; want bond0 and none",
					member.Master, bond.PermanentMAC)
			}
		})
	}
}

// expectNIC waits until a NIC has a speed, in bits per second, and a carrier. It
// reads the NIC only when Watch reports a change.
func expectNIC(
	t *testing.T,
	changes changes,
	inventory *netdev.Inventory,
	name string,
	speed uint64,
	carrier bool,
) {
	t.Helper()
	condition := fmt.Sprintf("%s has %d bit/s and carrier %t", name, speed, carrier)
	changes.expect(t, condition, func(c netdev.Change) bool {
		if !c.LinksChanged {
			return false
		}
		nic := nstest.FindNICIn(t, inventory, name)
		return nic.Speed == speed && nic.Carrier == carrier
	})
}

func TestInventory_List_VLANFollowsNIC(t *testing.T) {
	nstest.Cable(t, "nic0", "switch0")
	inventory, changes := netdev.NewInventory(nstest.MountSysfs(t)), watch(t, newNode(t))
	nstest.VLAN(t, "nic0", "nic0.100", 100)
	expectNIC(t, changes, inventory, "nic0.100", 10e9, true)
	nstest.SetDown(t, "switch0")
	expectNIC(t, changes, inventory, "nic0.100", 10e9, false)

	nic, vlan := nstest.FindNIC(t, "nic0"), nstest.FindNIC(t, "nic0.100")
	if diff := cmp.Diff([]int{nic.Index}, vlan.Below); diff != "" {
		t.Errorf("links below the VLAN (-want +got):\n%s", diff)
	}
	if vlan.PermanentMAC != nil || vlan.MAC.String() != nic.MAC.String() || vlan.MTU != nic.MTU {
		t.Errorf("VLAN %+v, want the address and MTU of its NIC %+v, and no permanent address", vlan, nic)
	}
}

func TestNode_Attach_toVLANAndBond(t *testing.T) {
	nstest.NIC(t, "nic0", 1500)
	nstest.VLAN(t, "nic0", "nic0.100", 100)
	nstest.Bond(t, "bond0", netlink.BOND_MODE_ACTIVE_BACKUP)
	for i, name := range []string{"nic0.100", "bond0"} {
		nic := nstest.FindNIC(t, name)
		a := attach(t, newNode(t, nic), nstest.New(t),
			netdev.LinkSpec{Parent: nic.Index, MAC: mac(byte(i)), Mode: netdev.Private})
		if a.MTU != 1500 {
			t.Errorf("link on %s has MTU %d, want 1500", name, a.MTU)
		}
	}
}

// A NIC in a VRF can have links of its own, unlike a port of a bridge.
func TestNode_Attach_toNICInVRF(t *testing.T) {
	nstest.NIC(t, "nic0", 1500)
	nstest.VRF(t, "blue", "nic0")
	nic := nstest.FindNIC(t, "nic0")
	if nic.Master != "" {
		t.Errorf("the NIC is a port of %q, want no port", nic.Master)
	}
	attach(t, newNode(t, nic), nstest.New(t), netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
}
