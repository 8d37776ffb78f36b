// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// patience is less than any timeout of the neighbor table.
const patience = 3 * time.Second

// A host on the network keeps the MAC address of an address that moves to another pod,
// unless the new link announces its addresses.
func TestNode_Attach_announcesAddresses(t *testing.T) {
	for _, tc := range []struct{ name, wire, address string }{
		{"IPv4", "10.20.0.254/24", "10.20.0.1/24"},
		{"IPv6", "fd00:20::fe/64", "fd00:20::1/64"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			nic, wire := nstest.NIC(t, "nic0", 1500, tc.wire)
			waitOperational(t, nstest.Current(t), "nic0") // until then, the NIC drops frames
			waitOperational(t, wire, "wire")
			node := newNode(t, nic)
			address := netip.MustParsePrefix(tc.address)
			setNeighbor(t, wire, "wire", address.Addr(), mac(9))
			pod := nstest.New(t)
			if address.Addr().Is6() {
				pod.Do(func() error { // as the hook does
					return nstest.SetSysctl("net/ipv6/conf/default/ndisc_notify", "1")
				})
			}
			attach(t, node, pod, netdev.LinkSpec{
				Parent: nic.Index, MAC: mac(1), Mode: netdev.Private, Addresses: []netip.Prefix{address},
			})
			eventually.Eventually(t, patience, "the network has the address at the new link", func() error {
				if got := neighbor(wire, "wire", address.Addr()); got.String() != mac(1).String() {
					return fmt.Errorf("it is at %q, not at %s", got, mac(1))
				}
				return nil
			})
		})
	}
}

// waitOperational waits until the kernel has processed that a link has a carrier.
func waitOperational(t *testing.T, ns *nstest.Namespace, name string) {
	t.Helper()
	eventually.Eventually(t, patience, name+" is operational", func() error {
		var state netlink.LinkOperState
		ns.Do(func() error {
			link, err := netlink.LinkByName(name)
			if err == nil {
				state = link.Attrs().OperState
			}
			return err
		})
		if state != netlink.OperUp {
			return fmt.Errorf("its state is %s", state)
		}
		return nil
	})
}

// setNeighbor adds an entry to the neighbor table of a namespace, as if a host had
// answered.
func setNeighbor(t *testing.T, ns *nstest.Namespace, link string, address netip.Addr, mac net.HardwareAddr) {
	t.Helper()
	ns.Do(func() error {
		index, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		return netlink.NeighSet(&netlink.Neigh{
			LinkIndex: index.Index, IP: address.AsSlice(), HardwareAddr: mac, State: netlink.NUD_STALE,
		})
	})
}

// neighbor returns the MAC address that the neighbor table of a namespace has for an
// address.
func neighbor(ns *nstest.Namespace, link string, address netip.Addr) (mac net.HardwareAddr) {
	ns.Do(func() error {
		index, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		neighbors, err := netlink.NeighList(index.Index, netlink.FAMILY_ALL)
		for _, n := range neighbors {
			if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap() == address {
				mac = n.HardwareAddr
			}
		}
		return err
	})
	return mac
}
