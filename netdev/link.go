// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Mode is the mode of a macvlan: whether it can reach other macvlans of the NIC.
type Mode uint32

// Values of Mode, the numbers of enum macvlan_mode in linux/if_link.h.
const (
	// Private isolates the links of a NIC from each other.
	Private Mode = 1
	// VEPA sends all frames out of the NIC, also those for other links of the NIC. With
	// enforcement, links that are attached in mode Bridge have it, and the hairpin of the
	// NIC switches their frames: see classify.Hairpin.
	VEPA Mode = 2
	// Bridge switches frames between the links of a NIC inside the node.
	Bridge Mode = 4
)

// Route is a route through a link.
type Route struct {
	Destination netip.Prefix
	Gateway     netip.Addr // the zero value means that the destination is on the link
}

// The functions below build netlink requests. The caller chooses the socket to
// send them through.

// createRequest creates a macvlan that is down. The caller sends the request in
// the NIC's namespace, and the kernel creates the link in the namespace that
// the descriptor nsfd refers to. Moving the link there later would hold the
// kernel's RTNL lock for 16 to 20 ms.
func createRequest(s LinkSpec, mode Mode, name string, nsfd int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	r.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	r.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	r.AddData(nl.NewRtAttr(unix.IFLA_LINK, nl.Uint32Attr(uint32(s.Parent))))
	r.AddData(nl.NewRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(nsfd))))
	r.AddData(nl.NewRtAttr(unix.IFLA_ADDRESS, s.MAC))
	if s.MTU != 0 {
		r.AddData(nl.NewRtAttr(unix.IFLA_MTU, nl.Uint32Attr(uint32(s.MTU))))
	}
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.ZeroTerminated("macvlan"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	data.AddRtAttr(nl.IFLA_MACVLAN_MODE, nl.Uint32Attr(uint32(mode)))
	r.AddData(info)
	return r
}

// configureRequest sets the name, the alias, the maximum segment size, and arp_notify of
// a link that is down. It is separate from createRequest because the kernel ignores an
// alias when it creates a link.
func configureRequest(index int, name string, s LinkSpec) *nl.NetlinkRequest {
	set := setLinkRequest(index)
	set.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	if s.Alias != "" {
		set.AddData(nl.NewRtAttr(unix.IFLA_IFALIAS, []byte(s.Alias)))
	}
	if s.SegmentBytes != 0 {
		set.AddData(nl.NewRtAttr(unix.IFLA_GSO_MAX_SIZE, nl.Uint32Attr(uint32(s.SegmentBytes))))
	}
	announceIPv4(set)
	return set
}

// addressRequests add the addresses of a link. Request i adds address i;
// describeAddressError depends on this.
func addressRequests(index int, s LinkSpec) (requests []*nl.NetlinkRequest) {
	for _, a := range s.Addresses {
		requests = append(requests, addressRequest(index, a))
	}
	return requests
}

// upRequests bring a link up and then add its routes, because the kernel
// accepts routes only for links that are up. Request i, from 1, adds route i-1;
// describeUpError depends on this.
func upRequests(index int, s LinkSpec) []*nl.NetlinkRequest {
	up := nl.NewNetlinkRequest(unix.RTM_NEWLINK, 0)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index, msg.Flags, msg.Change = int32(index), unix.IFF_UP, unix.IFF_UP
	up.AddData(msg)
	requests := []*nl.NetlinkRequest{up}
	for _, route := range s.Routes {
		requests = append(requests, routeRequest(index, route))
	}
	return requests
}

func setLinkRequest(index int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_SETLINK, 0)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	r.AddData(msg)
	return r
}

func family(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func addressRequest(index int, p netip.Prefix) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	msg := nl.NewIfAddrmsg(int(family(p.Addr())))
	msg.Index, msg.Prefixlen = uint32(index), uint8(p.Bits())
	if p.Addr().Is6() {
		// Without this flag, duplicate address detection makes the address
		// unusable for 1.5 s.
		msg.Flags = unix.IFA_F_NODAD
	}
	r.AddData(msg)
	r.AddData(nl.NewRtAttr(unix.IFA_LOCAL, p.Addr().AsSlice()))
	r.AddData(nl.NewRtAttr(unix.IFA_ADDRESS, p.Addr().AsSlice()))
	if p.Addr().Is4() && p.Bits() < 31 {
		r.AddData(nl.NewRtAttr(unix.IFA_BROADCAST, broadcast(p).AsSlice()))
	}
	return r
}

// broadcast returns the IPv4 broadcast address of a prefix.
func broadcast(p netip.Prefix) netip.Addr {
	b := p.Addr().As4()
	for bit := p.Bits(); bit < 32; bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	return netip.AddrFrom4(b)
}

func routeRequest(index int, route Route) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	msg := nl.NewRtMsg()
	msg.Family = family(route.Destination.Addr())
	msg.Dst_len = uint8(route.Destination.Bits())
	msg.Protocol = unix.RTPROT_STATIC
	if !route.Gateway.IsValid() {
		msg.Scope = unix.RT_SCOPE_LINK
	}
	r.AddData(msg)
	if route.Destination.Bits() > 0 {
		r.AddData(nl.NewRtAttr(unix.RTA_DST, route.Destination.Addr().AsSlice()))
	}
	if route.Gateway.IsValid() {
		r.AddData(nl.NewRtAttr(unix.RTA_GATEWAY, route.Gateway.AsSlice()))
	}
	r.AddData(nl.NewRtAttr(unix.RTA_OIF, nl.Uint32Attr(uint32(index))))
	return r
}

func deleteRequest(index int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_DELLINK, 0)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	r.AddData(msg)
	return r
}

// inNamespace makes a link request act on the namespace with the ID nsid.
func inNamespace(r *nl.NetlinkRequest, nsid int) *nl.NetlinkRequest {
	r.AddData(nl.NewRtAttr(unix.IFLA_TARGET_NETNSID, nl.Uint32Attr(uint32(nsid))))
	return r
}

func getLinkRequest(index int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_GETLINK, 0)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	r.AddData(msg)
	return r
}

func getLinkByNameRequest(name string) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_GETLINK, 0)
	r.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	r.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	return r
}

// parseLink parses the payload of an RTM_NEWLINK message.
func parseLink(payload []byte) (netlink.Link, error) { return netlink.LinkDeserialize(nil, payload) }
