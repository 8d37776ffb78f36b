// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

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
	// VEPA sends all frames out of the NIC, including those for other links of the NIC. With
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
	// Table is the number of the routing table; 0 means the main table.
	Table uint32
	// Optional means that the pod may already have a route to the destination, such as through another link, and
	// keeps it.
	Optional bool
}

// Rule is a rule of the pod's routing policy: packets that it matches are routed by a table.
type Rule struct {
	// Source and Destination are the networks that it matches; if one is invalid, it matches
	// any. If both are, the rule matches packets from each address of the link.
	Source, Destination netip.Prefix
	Table               uint32
	// Priority orders the rules, the lowest first. It is at least 1: with 0, the kernel would
	// choose another one for each attempt, and add the rule again.
	Priority uint32
}

func (r Rule) String() string {
	text := fmt.Sprintf("to table %d", r.Table)
	if r.Destination.IsValid() {
		text = fmt.Sprintf("to %s ", r.Destination) + text
	}
	if r.Source.IsValid() {
		text = fmt.Sprintf("from %s ", r.Source) + text
	}
	return text
}

// Neighbor is a permanent entry of the link's neighbor table.
type Neighbor struct {
	Address netip.Addr
	MAC     net.HardwareAddr
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

// upRequests bring a link up and then add its routes and neighbors, because the kernel
// accepts them only for links that are up. Request i, from 1, adds route i-1, and the
// neighbors follow; describeUpError depends on this.
func upRequests(index int, s LinkSpec) []*nl.NetlinkRequest {
	up := nl.NewNetlinkRequest(unix.RTM_NEWLINK, 0)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index, msg.Flags, msg.Change = int32(index), unix.IFF_UP, unix.IFF_UP
	up.AddData(msg)
	requests := []*nl.NetlinkRequest{up}
	for _, route := range s.requiredRoutes() {
		requests = append(requests, routeRequest(index, route))
	}
	for _, neighbor := range s.Neighbors {
		requests = append(requests, neighborRequest(index, neighbor))
	}
	return requests
}

// requiredRoutes returns the routes without which the link is of no use.
func (s LinkSpec) requiredRoutes() []Route {
	return slices.DeleteFunc(slices.Clone(s.Routes), func(r Route) bool { return r.Optional })
}

// optionalRoutes returns the routes that the pod may already have.
func (s LinkSpec) optionalRoutes() []Route {
	return slices.DeleteFunc(slices.Clone(s.Routes), func(r Route) bool { return !r.Optional })
}

func neighborRequest(index int, neighbor Neighbor) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	r.AddData(&netlink.Ndmsg{Family: family(neighbor.Address), Index: uint32(index), State: netlink.NUD_PERMANENT})
	r.AddData(nl.NewRtAttr(unix.NDA_DST, neighbor.Address.AsSlice()))
	r.AddData(nl.NewRtAttr(unix.NDA_LLADDR, neighbor.MAC))
	return r
}

// rulesFor returns the rules of a link that have a valid Source or Destination.
func rulesFor(s LinkSpec) (rules []Rule) {
	for _, rule := range s.Rules {
		if rule.Source.IsValid() || rule.Destination.IsValid() {
			rules = append(rules, rule)
			continue
		}
		for _, address := range s.Addresses {
			rule.Source = netip.PrefixFrom(address.Addr(), address.Addr().BitLen())
			rules = append(rules, rule)
		}
	}
	return rules
}

// ruleRequest adds a rule with RTM_NEWRULE, or removes it with RTM_DELRULE.
func ruleRequest(kind int, rule Rule) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(kind, 0)
	if kind == unix.RTM_NEWRULE {
		r.Flags |= unix.NLM_F_CREATE | unix.NLM_F_EXCL
	}
	// struct fib_rule_hdr has the layout of struct rtmsg, with the action as Type.
	msg := &nl.RtMsg{RtMsg: unix.RtMsg{Type: unix.FR_ACT_TO_TBL}}
	r.AddData(msg)
	for attribute, network := range map[int]netip.Prefix{unix.FRA_SRC: rule.Source, unix.FRA_DST: rule.Destination} {
		if !network.IsValid() {
			continue
		}
		msg.Family = family(network.Addr())
		if attribute == unix.FRA_SRC {
			msg.Src_len = uint8(network.Bits())
		} else {
			msg.Dst_len = uint8(network.Bits())
		}
		if network.Bits() > 0 {
			r.AddData(nl.NewRtAttr(attribute, network.Addr().AsSlice()))
		}
	}
	r.AddData(nl.NewRtAttr(unix.FRA_TABLE, nl.Uint32Attr(rule.Table)))
	r.AddData(nl.NewRtAttr(unix.FRA_PROTOCOL, []byte{unix.RTPROT_STATIC}))
	r.AddData(nl.NewRtAttr(unix.FRA_PRIORITY, nl.Uint32Attr(rule.Priority)))
	return r
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
	switch {
	case !route.Gateway.IsValid():
		msg.Scope = unix.RT_SCOPE_LINK
	case route.Gateway.Is4() && route.Gateway.IsLinkLocalUnicast():
		msg.Flags |= unix.RTNH_F_ONLINK // as for IPv6, no address of the link needs to be in its network
	}
	r.AddData(msg)
	if route.Table > 0 {
		msg.Table = unix.RT_TABLE_UNSPEC
		r.AddData(nl.NewRtAttr(unix.RTA_TABLE, nl.Uint32Attr(route.Table)))
	}
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
