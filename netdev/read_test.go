// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// The kernel gives the ID of a namespace that has ended to another one. A link with the same index is attached there.
func TestNode_Read_linkOfAnotherPodWithSameNamespaceID(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	current := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Bridge})
	ended := current
	ended.MAC, ended.Mode, ended.Cookie = mac(9), netdev.Private, current.Cookie+1
	if got := read(t, node, ended); got.Exists || got.Blocked != "" {
		t.Errorf("Read of an attachment whose namespace has ended returned %+v, want the zero state", got)
	}
	if got, err := node.Presence(ended); got != netdev.NamespaceMissing || err != nil {
		t.Errorf("Presence returned %v and error %v, want %v", got, err, netdev.NamespaceMissing)
	}
	if snapshot, err := node.Snapshot(); err != nil {
		t.Error(err)
	} else if exists, err := snapshot.NamespaceExists(ended); exists || err != nil {
		t.Errorf("the snapshot has its namespace: %t, error %v", exists, err)
	}
	if got := read(t, node, current); !got.Exists {
		t.Errorf("Read of the link returned %+v", got)
	}
	current.Cookie++ // another plugin of the node attached it after the namespace of the other link had ended
	if got, err := node.Presence(current); got != netdev.LinkPresent || err != nil {
		t.Errorf("Presence of a link with its MAC address returned %v and error %v, want %v", got, err, netdev.LinkPresent)
	}
}

func TestNode_Read_showsChangesByPod(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{
		Parent: nic.Index, MAC: mac(1), Mode: netdev.Private,
		Addresses: prefixes("10.20.0.5/24"),
	})
	pod.Do(func() error {
		link, err := netlink.LinkByName(a.Name)
		if err != nil {
			return err
		}
		address, err := netlink.ParseAddr("10.99.0.1/16")
		if err != nil {
			return err
		}
		return errors.Join(
			netlink.LinkSetDown(link),
			netlink.LinkSetHardwareAddr(link, mac(3)),
			netlink.LinkSetMTU(link, 1400),
			netlink.AddrAdd(link, address),
		)
	})
	got := read(t, node, a)
	if got.Up || got.MTU != 1400 || got.MAC.String() != mac(3).String() {
		t.Errorf("Read returned %+v, want a link that is down, with MTU 1400 and address %s", got, mac(3))
	}
	if !slices.Contains(got.Addresses, netip.MustParsePrefix("10.99.0.1/16")) {
		t.Errorf("Read returned addresses %v, want them to contain 10.99.0.1/16", got.Addresses)
	}
}

// Two addresses with different peers can have the same local address.
func TestNode_Read_returnsEachAddressOnce(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	pod.Do(func() error {
		link, err := netlink.LinkByName(a.Name)
		for _, peer := range []string{"10.99.0.2/32", "10.99.0.3/32"} {
			address := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 99, 0, 1), Mask: net.CIDRMask(32, 32)}}
			_, address.Peer, _ = net.ParseCIDR(peer)
			err = errors.Join(err, netlink.AddrAdd(link, address))
		}
		return err
	})
	state, err := node.ReadAndBlock(a)
	if want := []netip.Prefix{netip.MustParsePrefix("10.99.0.1/32")}; err != nil || !slices.Equal(state.Addresses, want) {
		t.Errorf("Read returned the addresses %v and error %v, want %v", state.Addresses, err, want)
	}
}
