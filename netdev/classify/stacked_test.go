// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// A VLAN and a bond have no hardware queues, and frames reach them through the
// hooks of the NIC below.
func TestTraffic_onStackedNICIsLimitedToGrant(t *testing.T) {
	for _, tc := range []struct {
		name  string
		nic   string
		stack func(t *testing.T, wire *nstest.Namespace)
	}{
		{"a VLAN", "nic0.100", func(t *testing.T, wire *nstest.Namespace) {
			nstest.VLAN(t, "nic0", "nic0.100", 100)
			wire.Do(func() error { return moveAddressToVLAN("wire", 100) })
		}},
		{"a bond", "bond0", func(t *testing.T, _ *nstest.Namespace) {
			nstest.Bond(t, "bond0", netlink.BOND_MODE_ACTIVE_BACKUP, "nic0")
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, wire := nstest.NIC(t, "nic0", 1500, wireIP+"/16")
			tc.stack(t, wire)
			e := newTestEnvOn(t, nstest.MountBPFFS(t), nstest.FindNIC(t, tc.nic), wire, netdev.NICConfig{})
			p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
			e.expectRate("pod sends", e.measure(e.fromPod(p))[0], 100*mega)
			e.expectRate("pod receives", e.measure(e.toPod(p))[0], 100*mega)
		})
	}
}

// moveAddressToVLAN creates a VLAN on a link of the current namespace, and moves
// the address wireIP to it.
func moveAddressToVLAN(parent string, id int) error {
	link, err := netlink.LinkByName(parent)
	if err != nil {
		return err
	}
	address, err := netlink.ParseAddr(wireIP + "/16")
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = "vlan", link.Attrs().Index
	return errors.Join(
		netlink.AddrDel(link, address),
		netlink.LinkAdd(&netlink.Vlan{LinkAttrs: attrs, VlanId: id}),
		nstest.ConfigureLink("vlan", wireIP+"/16"),
	)
}
