// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// Lease is an IPv4 address that a link may have for a time.
type Lease struct {
	// Address is invalid if the link may have none.
	Address netip.Prefix
	// Valid is the lifetime of the address. The kernel then removes the address and, with the last address of the link,
	// its routes. Forever means that it does not end.
	Valid time.Duration
	// Routes are added with the address, except routes to networks that the pod already has a route to.
	Routes []Route
}

// Forever is the lifetime of an address without end.
const Forever time.Duration = 1<<63 - 1

// CheckAddress refuses an address for the link of a that its claim has not requested: one that another link of
// the NIC, the node, or a gateway has. Attach, in contrast, lets a claim request the address of a gateway, for a
// pod that is a router.
func (n *Node) CheckAddress(a Attachment, address netip.Prefix) error {
	nic, err := n.managedNIC(a.Parent)
	if err != nil || !nic.Enforce {
		return err
	}
	gateway, err := n.classifier.IsGateway(nic.Index, address.Addr())
	if err != nil {
		return fmt.Errorf("look up the owner of address %s: %w", address.Addr(), err)
	}
	if gateway {
		return fmt.Errorf("address %s is a gateway of claims or AddressPools on %s: exclude it on the DHCP server, or "+
			"request it in the claim of the pod that is the gateway", address.Addr(), nic.Name)
	}
	return n.checkAddresses(nic, LinkSpec{MAC: a.MAC, Addresses: []netip.Prefix{address}})
}

// SetAddresses lets the link use a.Addresses and no others; see classify.Policy.
func (n *Node) SetAddresses(a Attachment) error {
	nic, enforced := n.enforcedNIC(a.Parent)
	if !enforced {
		return nil
	}
	return n.classifier.SetAddresses(nic.member(a))
}

// SetLease gives a link the address of a lease, in place of another leased IPv4 address, through a
// socket that was opened in the pod. It is idempotent, and extends the lifetime of an address.
func (n *Node) SetLease(socket *rtnl.Conn, a Attachment, l Lease) error {
	present, err := leased(func(r *nl.NetlinkRequest) ([]syscall.NetlinkMessage, error) { return socket.Dump(r) }, a.Index)
	if err != nil {
		return fmt.Errorf("list the addresses of %s: %w", a.Name, err)
	}
	for _, old := range present {
		if old.Address == l.Address {
			continue
		}
		remove := func() error { return socket.Do(removeAddressRequest(a.Index, old.Address)) }
		err := n.failpoints.Do("remove leased address", remove)
		if err != nil && !errors.Is(err, syscall.EADDRNOTAVAIL) { // the kernel has removed it
			return fmt.Errorf("remove address %s from %s: %w", old.Address, a.Name, err)
		}
	}
	if !l.Address.IsValid() {
		return nil
	}
	add := func() error { return socket.Do(leaseRequest(a.Index, l)) }
	if err := n.failpoints.Do("set leased address", add); err != nil {
		return fmt.Errorf("set address %s of %s: %w", l.Address, a.Name, err)
	}
	for _, route := range l.Routes {
		add := func() error { return socket.Do(routeRequest(a.Index, route)) }
		if err := n.failpoints.Do("add leased route", add); err != nil && !errors.Is(err, syscall.EEXIST) {
			return describeRouteError(err, route)
		}
	}
	return nil
}

// Leased returns the IPv4 addresses that the link has for a time.
func (n *Node) Leased(a Attachment) ([]Lease, error) {
	return leased(func(r *nl.NetlinkRequest) ([]syscall.NetlinkMessage, error) {
		r.AddData(nl.NewRtAttr(unix.IFA_TARGET_NETNSID, nl.Uint32Attr(uint32(a.NSID))))
		return n.conn.Dump(r)
	}, a.Index)
}

// leased dumps the IPv4 addresses of a link, and returns those with a limited lifetime.
func leased(dump func(*nl.NetlinkRequest) ([]syscall.NetlinkMessage, error), index int) (found []Lease, err error) {
	r := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
	msg := nl.NewIfAddrmsg(unix.AF_INET)
	msg.Index = uint32(index)
	r.AddData(msg)
	messages, err := dump(r)
	if rtnl.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		address, ok := parseAddress(m.Data, index)
		if !ok {
			continue
		}
		if valid := lifetimeOf(m.Data); valid != infiniteLifetime {
			found = append(found, Lease{Address: address, Valid: time.Duration(valid) * time.Second})
		}
	}
	return found, nil
}

// infiniteLifetime is INFINITY_LIFE_TIME of linux/rtnetlink.h, in seconds.
const infiniteLifetime uint32 = 1<<32 - 1

// lifetimeOf returns the lifetime of an address in an RTM_NEWADDR message, in seconds.
func lifetimeOf(payload []byte) uint32 {
	info := rtnl.Attribute(payload[unix.SizeofIfAddrmsg:], unix.IFA_CACHEINFO) // struct ifa_cacheinfo
	if len(info) < 8 {
		return infiniteLifetime
	}
	return nl.NativeEndian().Uint32(info[4:])
}

// leaseRequest adds an address with a lifetime, or sets the lifetime of an address that the link has.
func leaseRequest(index int, l Lease) *nl.NetlinkRequest {
	r := addressRequest(index, l.Address)
	r.Flags = r.Flags&^unix.NLM_F_EXCL | unix.NLM_F_REPLACE
	// A lease without end needs an end here, too: it marks the address as leased. The kernel
	// accepts up to 2^32-2 seconds.
	seconds := infiniteLifetime - 1
	if l.Valid != Forever {
		seconds = min(uint32(max(l.Valid/time.Second, 1)), seconds)
	}
	info := make([]byte, 16) // struct ifa_cacheinfo: preferred and valid lifetime, and two times that are not set
	nl.NativeEndian().PutUint32(info, seconds)
	nl.NativeEndian().PutUint32(info[4:], seconds)
	r.AddData(nl.NewRtAttr(unix.IFA_CACHEINFO, info))
	return r
}

func removeAddressRequest(index int, p netip.Prefix) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_DELADDR, 0)
	msg := nl.NewIfAddrmsg(int(family(p.Addr())))
	msg.Index, msg.Prefixlen = uint32(index), uint8(p.Bits())
	r.AddData(msg)
	r.AddData(nl.NewRtAttr(unix.IFA_LOCAL, p.Addr().AsSlice()))
	return r
}
