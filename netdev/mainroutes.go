// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// A node may have tens of thousands of routes, and a routing daemon or a network plugin of Kubernetes may change
// hundreds per second. This package needs only two things of them: the links of default routes, and the gateways of
// routes through the NICs with enforcement. It considers only the main table.

// mainRoute is a route of the main table.
type mainRoute struct {
	isDefault bool
	hops      []hop
}

// hop is a way to the destination of a route.
type hop struct {
	link    int        // interface index
	gateway netip.Addr // the zero Addr if the destination is on the link
}

// parseMainRoute parses the payload of an event or a dump. ok is false if the route is not in the main table, or is an
// entry of a cache. With onlyDefault, it is also false for routes other than default routes.
func parseMainRoute(payload []byte, onlyDefault bool) (r mainRoute, ok bool) {
	if len(payload) < unix.SizeofRtMsg {
		return r, false
	}
	header := nl.DeserializeRtMsg(payload)
	r.isDefault = header.Dst_len == 0
	isIP := header.Family == unix.AF_INET || header.Family == unix.AF_INET6
	if !isIP || header.Table != unix.RT_TABLE_MAIN || header.Flags&unix.RTM_F_CLONED != 0 || onlyDefault && !r.isDefault {
		return r, false
	}
	attrs := payload[unix.SizeofRtMsg:]
	if several := rtnl.Attribute(attrs, unix.RTA_MULTIPATH); several != nil {
		r.hops = parseHops(several)
	} else {
		r.hops = []hop{parseHop(0, attrs)}
	}
	return r, true
}

// parseHop returns the hop that attributes describe, which may name the link.
func parseHop(link int, attrs []byte) hop {
	h := hop{link: link}
	for attrType, value := range rtnl.Attributes(attrs) {
		switch attrType {
		case unix.RTA_OIF:
			if len(value) == 4 {
				h.link = int(nl.NativeEndian().Uint32(value))
			}
		case unix.RTA_GATEWAY:
			h.gateway, _ = netip.AddrFromSlice(value)
		case unix.RTA_VIA: // a family, and an address of it
			if len(value) > 2 {
				h.gateway, _ = netip.AddrFromSlice(value[2:])
			}
		}
	}
	return h
}

// parseHops returns the hops of a route that has several.
func parseHops(value []byte) (hops []hop) {
	for len(value) >= unix.SizeofRtNexthop {
		next := nl.DeserializeRtNexthop(value)
		size := int(next.RtNexthop.Len)
		if size < unix.SizeofRtNexthop || size > len(value) {
			break
		}
		hops = append(hops, parseHop(int(next.Ifindex), value[unix.SizeofRtNexthop:size]))
		value = value[min(len(value), (size+unix.RTNH_ALIGNTO-1)&^(unix.RTNH_ALIGNTO-1)):]
	}
	return hops
}

// visitMainRoutes calls visit for the hops of routes in the caller's network namespace: of default routes if link is 0,
// otherwise of all routes through the link. It may call visit several times for a hop.
func visitMainRoutes(link int, visit func(hop)) error {
	conn, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer conn.Close()
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		if err := dumpMainRoutes(conn, family, link, visit); err != nil {
			return fmt.Errorf("list routes: %w", err)
		}
	}
	return nil
}

// dumpMainRoutes does what visitMainRoutes does for one family of addresses.
func dumpMainRoutes(conn *rtnl.Conn, family uint8, link int, visit func(hop)) (err error) {
	for range rtnl.MaxDumpAttempts {
		err = conn.Visit(mainRoutesRequest(family, link), func(m syscall.NetlinkMessage) {
			r, _ := parseMainRoute(m.Data, link == 0)
			for _, h := range r.hops {
				if link == 0 || h.link == link {
					visit(h)
				}
			}
		})
		if !errors.Is(err, rtnl.ErrDumpInterrupted) {
			break
		}
	}
	// The main table does not exist before its first route, and the link does not exist after its removal.
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// mainRoutesRequest returns the request for the routes of the main table, which the kernel limits to those through a
// link if that is not 0. It does not limit them to default routes.
func mainRoutesRequest(family uint8, link int) *nl.NetlinkRequest {
	dump := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
	dump.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: family, Table: unix.RT_TABLE_MAIN}})
	if link != 0 {
		dump.AddData(nl.NewRtAttr(unix.RTA_OIF, nl.Uint32Attr(uint32(link))))
	}
	return dump
}

// defaultRouteLinks returns the interface indexes that default routes use.
func defaultRouteLinks() (indexes []int, err error) {
	err = visitMainRoutes(0, func(h hop) {
		if !slices.Contains(indexes, h.link) {
			indexes = append(indexes, h.link)
		}
	})
	return indexes, err
}

// gatewaysThrough returns the gateways of the routes through a link.
func gatewaysThrough(link int) (gateways map[netip.Addr]bool, err error) {
	gateways = map[netip.Addr]bool{}
	err = visitMainRoutes(link, func(h hop) {
		if h.gateway.IsValid() {
			gateways[h.gateway.Unmap()] = true
		}
	})
	return gateways, err
}

// routeMatters reports whether a route event changes what List or Manage finds. That is so for a default route, and for
// a route through a managed NIC if links may still use its gateway's address. A gateway without remaining routes can
// wait for the next call of Manage.
func (n *Node) routeMatters(payload []byte, removed bool) bool {
	onlyDefault := removed // see above
	r, ok := parseMainRoute(payload, onlyDefault)
	if !ok || r.isDefault {
		return ok
	}
	return slices.ContainsFunc(r.hops, func(h hop) bool { return h.gateway.IsValid() && !n.holdsGateway(h) })
}

// holdsGateway reports whether the links of the hop's NIC are kept from using the gateway's address, or the NIC does
// not have enforcement.
func (n *Node) holdsGateway(h hop) bool {
	nic, enforced := n.enforcedNIC(h.link)
	if !enforced {
		return true
	}
	_, held := slices.BinarySearchFunc(nic.Policy.NodeAddresses, h.gateway.Unmap(), netip.Addr.Compare)
	return held
}
