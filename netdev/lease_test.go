// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

func TestNode_SetLease(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{
		Parent: nic.Index, MAC: mac(1), Mode: netdev.Private, Leases: true, Name: "net1", Addresses: prefixes("fd00::5/64"),
	})
	routes := []netdev.Route{
		{Destination: netip.MustParsePrefix("10.30.0.0/16"), Gateway: netip.MustParseAddr("10.20.0.1")},
	}
	for _, lease := range []netdev.Lease{
		{Address: netip.MustParsePrefix("10.20.8.1/16"), Valid: 100 * time.Second, Routes: routes},
		{Address: netip.MustParsePrefix("10.20.8.1/16"), Valid: 200 * time.Second, Routes: routes}, // renewed
		{Address: netip.MustParsePrefix("10.20.8.2/16"), Valid: 100 * time.Second, Routes: routes}, // changed
		{Address: netip.MustParsePrefix("10.20.8.2/24"), Valid: netdev.Forever, Routes: routes[:0]},
		{}, // expired
		{},
		{Address: netip.MustParsePrefix("10.20.8.3/16"), Valid: 100 * time.Second, Routes: routes},
	} {
		if err := node.SetLease(pod.Socket, a, lease); err != nil {
			t.Fatalf("%+v: %v", lease, err)
		}
		got, err := node.Leased(a)
		if err != nil {
			t.Fatal(err)
		}
		want := prefixes("fd00::5/64")
		if lease.Address.IsValid() {
			want = append(want, lease.Address)
			least := min(lease.Valid, time.Hour) - 5*time.Second
			if len(got) != 1 || got[0].Valid > lease.Valid || got[0].Valid < least {
				t.Errorf("%+v: got lifetimes %+v", lease, got)
			}
		}
		state := read(t, node, a)
		slices.SortFunc(state.Addresses, func(a, b netip.Prefix) int { return b.Addr().Compare(a.Addr()) })
		if !slices.Equal(state.Addresses, want) {
			t.Errorf("%+v: the link has addresses %v, want %v", lease, state.Addresses, want)
		}
		pod.Do(func() error {
			link, err := netlink.LinkByName("net1")
			if err == nil && hasRoute(t, link, "10.30.0.0/16") != (len(lease.Routes) > 0) {
				t.Errorf("%+v: the link has the route: %t", lease, len(lease.Routes) == 0)
			}
			return err
		})
	}
}

// The kernel removes a leased address without a process, with the routes, and keeps the link.
func TestNode_SetLease_expires(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private, Leases: true})
	lease := netdev.Lease{Address: netip.MustParsePrefix("10.20.8.1/16"), Valid: time.Second}
	if err := node.SetLease(pod.Socket, a, lease); err != nil {
		t.Fatal(err)
	}
	eventually.Eventually(t, 20*time.Second, "the link has no address", func() error {
		if state := read(t, node, a); !state.Up || len(state.Addresses) > 0 {
			return fmt.Errorf("up: %t, addresses %v", state.Up, state.Addresses)
		}
		return nil
	})
}

// The status of a link lists the addresses that the kernel of the pod made from router
// advertisements.
func TestNode_Read_listsAddressesOfRouterAdvertisements(t *testing.T) {
	nic, wire := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{
		Parent: nic.Index, MAC: mac(1), Mode: netdev.Private, Addresses: prefixes("10.20.0.5/24"),
	})
	want := netip.MustParsePrefix("fd00:99::ff:fe00:1/64") // EUI-64
	eventually.Eventually(t, 20*time.Second, "the link has the address "+want.String(), func() error {
		if err := advertise(wire, netip.MustParsePrefix("fd00:99::/64")); err != nil {
			return err
		}
		if state := read(t, node, a); !slices.Contains(state.Addresses, want) {
			return fmt.Errorf("it has the addresses %v", state.Addresses)
		}
		return nil
	})
}

// advertise sends a router advertisement for a network from the wire. It fails until the kernel has
// checked the link-local address of the wire.
func advertise(wire *nstest.Namespace, p netip.Prefix) (failed error) {
	wire.Do(func() error {
		failed = sendAdvertisement(p)
		return nil
	})
	return failed
}

func sendAdvertisement(p netip.Prefix) error {
	link, err := net.InterfaceByName("wire")
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// Type, code, checksum, hop limit, flags, lifetime of the router, and two times (RFC 4861, section 4.2).
	message := []byte{134, 0, 0, 0, 64, 0, 0, 30, 0, 0, 0, 0, 0, 0, 0, 0}
	// The option of the network: on the link, and for autoconfiguration, for 3600 s.
	message = append(message, 3, 4, byte(p.Bits()), 0xc0, 0, 0, 14, 16, 0, 0, 14, 16, 0, 0, 0, 0)
	network := p.Addr().As16()
	message = append(message, network[:]...)
	to := &unix.SockaddrInet6{ZoneId: uint32(link.Index), Addr: [16]byte{0xff, 2, 15: 1}}
	return errors.Join(
		unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255),
		unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF, link.Index),
		unix.Sendto(fd, message, 0, to),
	)
}
