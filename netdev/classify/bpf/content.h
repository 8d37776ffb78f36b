// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// Checks the content of a frame: the addresses in its headers, and the messages that only routers, switches, and
// servers send. A check returns a reason to refuse the frame, or 0; see policy.h.

#pragma once

#include "kernel.h"
#include "policy.h"

// Reports whether an address is in fe80::/10. high is the first half of the address as in a frame.
static __always_inline int is_in_link_local_network(__u64 high)
{
	return (high & 0xc0ff) == 0x80fe;
}

// Reports whether a link may send from an address that is not in struct link. Each link has
// an IPv6 link-local address of its own, so it may use another one only if the network allows
// that address.
static __always_inline int may_use(const struct frame *frame, __u64 high, __u64 low)
{
	__u64 address[] = {frame->parent, high, low};
	__u64 *holder = bpf_map_lookup_elem(&dra_shared_addresses, address);
	int any = !frame->link || frame->link->flags & LINK_ANY_ADDRESS;
	struct link *link;
	__u32 *subnet;

	if (holder && *holder == frame->source)
		return 1;
	if (holder && frame->link)
		return 0;
	if (holder) { // a link of the pod has it, and the pod sends with a further MAC address that the network allows
		link = find_link(frame->parent, *holder);
		return link && frame->cookie && link->cookie == frame->cookie && !(link->flags & LINK_BLOCKED);
	}
	if (frame->forwards)
		return 1;
	if (any && !frame->policy->subnets && frame->link && !is_in_link_local_network(high))
		return 1;
	address[0] = (32 + 128) | (__u64)frame->parent << 32;
	subnet = bpf_map_lookup_elem(&dra_shared_subnets, address);
	return subnet && (any || *subnet == SUBNET_ALL);
}

// address is an IPv4 address as in a frame.
static __always_inline int may_use4(const struct frame *frame, __u32 address)
{
	if (frame->link && frame->link->address && frame->link->address == address)
		return 1;
	return may_use(frame, 0, 0xffff0000ULL | (__u64)address << 32);
}

// Reports whether the second half of an address results from the source MAC address (EUI-64).
static __always_inline int is_eui64_of_source(const struct frame *frame, __u64 low)
{
	__u64 mac = frame->source;

	return low == ((mac & 0xffffff) ^ 0x02) + (0xfeffULL << 24) + ((mac & 0xffffff000000ULL) << 16);
}

// Reports whether a link may have made an address from its MAC address: the link-local one, and,
// where links receive router advertisements, those in the networks of routers (RFC 4862), unless
// another link has the address. Which networks these are does not matter: no other host has the
// second half.
static __always_inline int is_autoconfigured(const struct frame *frame, __u64 high, __u64 low)
{
	__u64 address[] = {frame->parent, high, low};
	__u64 *holder;

	if (!is_eui64_of_source(frame, low))
		return 0;
	if (high == 0x80fe)
		return 1;
	if (!frame->policy->autoconf || !frame->link || (high & 0xff) == 0xff) // multicast
		return 0;
	holder = bpf_map_lookup_elem(&dra_shared_addresses, address);
	return !holder || *holder == frame->source;
}

static __always_inline int may_use6(const struct frame *frame, const __u64 *address)
{
	__u64 high = address[0], low = address[1];

	if (frame->link && (high | low) && frame->link->address6[0] == high && frame->link->address6[1] == low)
		return 1;
	return is_autoconfigured(frame, high, low) || may_use(frame, high, low);
}

// Reports whether the protocol of a frame denotes a VLAN tag.
static __always_inline int is_tag(__u16 protocol)
{
	return protocol == bpf_htons(ETH_P_8021Q) || protocol == bpf_htons(ETH_P_8021AD) ||
	       protocol == bpf_htons(ETH_P_QINQ1) || protocol == bpf_htons(ETH_P_QINQ2) ||
	       protocol == bpf_htons(ETH_P_QINQ3);
}

// An ARP frame for IPv4 on Ethernet (RFC 826).
struct arp {
	__u32 types;   // of the hardware and of the protocol
	__u16 lengths; // of their addresses
	__u16 operation;
	__u8 sender[ETH_ALEN];
	__u8 sender_address[4];
	__u8 target[ETH_ALEN];
	__u8 target_address[4];
};

static __always_inline __u32 check_arp(struct __sk_buff *skb, const struct frame *frame, int offset)
{
	__u64 words[4] = {}; // the frame has 28 bytes
	__u64 sender;
	__u32 address;

	// A frame without a sender address is a probe (RFC 5227): the sender intends to use the target address.
	if (bpf_skb_load_bytes(skb, offset, words, sizeof(struct arp)))
		return REASON_ARP;
	if ((words[0] & 0xffffffffffffULL) != 0x040600080100ULL)
		return REASON_ARP;
	sender = words[1] & 0xffffffffffffULL;
	address = words[1] >> 48 | (words[2] & 0xffff) << 16;
	if (sender != frame->source)
		return REASON_ARP;
	if (!address)
		address = words[3];
	return may_use4(frame, address) ? 0 : REASON_ARP;
}

// Checks whether a link may send multicast or broadcast to the UDP ports of routers: RIP (520, and 521 for
// IPv6), HSRP (1985, and 2029 for IPv6), GLBP (3222).
static __always_inline __u32 check_router_port(const struct frame *frame, __u32 port)
{
	if (!(frame->destination & 1))
		return 0;
	if ((port == bpf_htons(520) || port == bpf_htons(521)) && !frame->policy->forwarding)
		return REASON_PROTOCOL;
	if ((port == bpf_htons(1985) || port == bpf_htons(2029) || port == bpf_htons(3222)) && !frame->policy->vrrp)
		return REASON_PROTOCOL;
	return 0;
}

// How far dra_shared_find_upper and dra_shared_check_options read.
#define ALL_HEADERS 2112

// Makes the kernel copy the first bytes of a frame, so that what the program checks is what leaves the NIC. A frame can
// have bytes in memory that the sender maps, and can change while the frame waits in a queue: in the ring of a packet
// socket, or in a payload that the kernel does not copy, of which a filter in the pod has removed the headers.
static __always_inline int hold(struct __sk_buff *skb, __u32 length)
{
	return bpf_skb_pull_data(skb, length < skb->len ? length : skb->len);
}

// Calls hold unless the kernel has copied the bytes before, as it does with the headers that it makes itself.
static __always_inline int hold_first(struct __sk_buff *skb, __u32 length)
{
	if ((void *)(long)skb->data + length <= (void *)(long)skb->data_end)
		return 0;
	return hold(skb, length);
}

// Calls hold for the bytes that the programs read of most frames of a protocol: the Ethernet header, the IP header, and
// 8 bytes of the upper layer.
static __always_inline int hold_headers(struct __sk_buff *skb, __u16 protocol)
{
	if (protocol == bpf_htons(ETH_P_IP))
		return hold_first(skb, ETH_HLEN + 20 + 8);
	return hold_first(skb, ETH_HLEN + 40 + 8);
}

// Checks the ports of a UDP packet for IPv4, and in a message of a DHCP client (RFC 2131) its MAC address
// (chaddr), the address that it has, such as one that it releases (ciaddr), and that no relay has forwarded
// it (giaddr). offset is the offset of the UDP header. A fragment can show addresses other than the message has.
static __always_inline __u32 check_dhcp(struct __sk_buff *skb, const struct frame *frame, int offset, int is_fragment)
{
	__u64 mac = 0;
	__u32 ports, address, types, relay;

	if (bpf_skb_load_bytes(skb, offset, &ports, sizeof(ports)))
		return REASON_DHCP; // a header that does not fit hides the ports
	if ((ports & 0xffff) == bpf_htons(67) || ports >> 16 == bpf_htons(68))
		return REASON_DHCP;
	if (ports >> 16 != bpf_htons(67))
		return check_router_port(frame, ports >> 16);
	// The kernel divides a packet into messages of which the program sees the first.
	if (is_fragment || skb->gso_size || hold(skb, offset + 8 + 28 + ETH_ALEN) ||
	    bpf_skb_load_bytes(skb, offset + 8, &types, sizeof(types)) ||
	    bpf_skb_load_bytes(skb, offset + 8 + 12, &address, sizeof(address)) ||
	    bpf_skb_load_bytes(skb, offset + 8 + 24, &relay, sizeof(relay)) ||
	    bpf_skb_load_bytes(skb, offset + 8 + 28, &mac, ETH_ALEN))
		return REASON_DHCP;
	if (types != 0x00060101 || relay) // a request with an Ethernet address, and no hops
		return REASON_DHCP;
	if (mac != frame->source)
		return REASON_MAC;
	return !address || may_use4(frame, address) ? 0 : REASON_ADDRESS;
}

// Reports whether a message of IGMP is one of a router: a query (0x11), DVMRP (0x13), PIM version 1
// (0x14), or an advertisement of a multicast router (0x30, RFC 4286).
static __always_inline int is_igmp_of_router(__u32 type)
{
	return type == 0x11 || type == 0x13 || type == 0x14 || type == 0x30;
}

// Reports whether a message of ICMPv6 is one of a multicast router: a query of MLD (130), or an
// advertisement of a multicast router (151, RFC 4286).
static __always_inline int is_mld_of_router(__u32 type)
{
	return type == 130 || type == 151;
}

// Checks whether a link may send a protocol of routers: VRRP (112), PIM (103), EIGRP (88), OSPF (89).
static __always_inline __u32 check_protocol(const struct frame *frame, __u32 protocol)
{
	if (protocol == 112 && !frame->policy->vrrp)
		return REASON_PROTOCOL;
	if ((protocol == 88 || protocol == 89) && !frame->policy->forwarding)
		return REASON_PROTOCOL;
	return protocol == 103 ? REASON_MULTICAST : 0;
}

static __always_inline __u32 check_ipv4(struct __sk_buff *skb, const struct frame *frame)
{
	__u64 words[2];
	__u32 source, header, protocol, fragment, reason;
	__u8 type;

	// The first 16 bytes of the header: the source is at 12.
	if (bpf_skb_load_bytes(skb, ETH_HLEN, words, sizeof(words)))
		return REASON_PROTOCOL;
	source = words[1] >> 32;
	header = (words[0] & 0xf) * 4;
	fragment = ((words[0] >> 48 & 0x1f) << 8) | words[0] >> 56;
	protocol = words[1] >> 8 & 0xff;
	if (header < 20 || (header > 20 && hold(skb, ETH_HLEN + header + 8)))
		return REASON_PROTOCOL;
	if (protocol == 17) {
		reason = fragment ? 0 : check_dhcp(skb, frame, ETH_HLEN + header, words[0] >> 48 & 0x20);
		if (reason)
			return reason;
	} else if ((protocol == 2 || protocol == 1) && !fragment) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + header, &type, 1))
			return REASON_PROTOCOL;
		if (protocol == 1 && type == 9) // an advertisement of a router (RFC 1256)
			return REASON_RA;
		if (protocol == 2 && is_igmp_of_router(type))
			return REASON_MULTICAST;
	} else if (protocol != 6) {
		reason = check_protocol(frame, protocol);
		if (reason)
			return reason;
	}
	return !source || frame->forwards || may_use4(frame, source) ? 0 : REASON_ADDRESS;
}

// Where an IPv6 packet has its upper layer.
struct upper {
	__u32 protocol;
	__u32 offset;
	__u32 flags;
};

#define UPPER_EXTENDED 1 // extension headers precede it
#define UPPER_REST 2     // it is in an earlier fragment
#define UPPER_HIDDEN 4   // there are too many headers, or the upper header starts after the end of the packet

#define EXTENSIONS 6 // headers before the upper layer

// Reports whether a header is an extension header: hop-by-hop options, routing,
// fragment, authentication, or destination options.
static __always_inline int is_extension(__u32 next)
{
	return next == 0 || next == 43 || next == 44 || next == 51 || next == 60;
}

// Returns the fields of struct upper in bits 0, 8, and 32. The verifier checks a
// global function by itself, and not again for each way to its call.
__noinline __u64 dra_shared_find_upper(struct __sk_buff *skb, __u32 next)
{
	__u32 offset = ETH_HLEN + 40, flags = 0, end;
	__u16 length = 0;
	__u64 head;

	for (int i = 0; i < EXTENSIONS && is_extension(next); i++) {
		flags |= UPPER_EXTENDED;
		if (offset > 2048 || bpf_skb_load_bytes(skb, offset, &head, sizeof(head))) {
			flags |= UPPER_HIDDEN;
			break;
		}
		if (next == 44 && (head >> 16 & 0xff || head >> 24 & 0xf8)) {
			next = head & 0xff;
			flags |= UPPER_REST;
			break;
		}
		if (next == 44)
			offset += 8;
		else if (next == 51)
			offset += ((head >> 8 & 0xff) + 2) * 4;
		else
			offset += ((head >> 8 & 0xff) + 1) * 8;
		next = head & 0xff;
	}
	if ((!(flags & UPPER_REST) && is_extension(next)) || offset > ALL_HEADERS - 8)
		flags |= UPPER_HIDDEN;
	// In a first fragment, the header can start in the next one, and what follows in this frame is not part
	// of the packet (RFC 7112). A packet that the kernel has not divided yet can have the length 0.
	bpf_skb_load_bytes(skb, ETH_HLEN + 4, &length, sizeof(length));
	end = ETH_HLEN + 40 + bpf_ntohs(length);
	if (length && (offset > end || ((next == 17 || next == 58) && !(flags & UPPER_REST) && offset + 4 > end)))
		flags |= UPPER_HIDDEN;
	return (next & 0xff) | flags << 8 | (__u64)offset << 32;
}

static __always_inline struct upper find_upper(struct __sk_buff *skb, __u32 next)
{
	struct upper upper = {.protocol = next, .offset = ETH_HLEN + 40};
	__u64 found;

	if (is_extension(next)) {
		found = dra_shared_find_upper(skb, next);
		upper.protocol = found & 0xff;
		upper.flags = found >> 8 & 0xff;
		upper.offset = found >> 32;
	}
	return upper;
}

#define ND_ROUTER_SOLICITATION 133
#define ND_ROUTER_ADVERTISEMENT 134
#define ND_NEIGHBOR_SOLICITATION 135
#define ND_NEIGHBOR_ADVERTISEMENT 136
#define ND_REDIRECT 137
#define ND_OPTIONS 5 // in one frame

// Reports whether a link may send a message of neighbor discovery about an address.
// A solicitation asks for the address of another link, unless it has no source
// address: then the sender finds out whether another link has the address.
static __always_inline int may_use_target(struct __sk_buff *skb, const struct frame *frame, __u32 type,
					  const __u64 *target)
{
	__u64 source[2];

	if (type == ND_NEIGHBOR_SOLICITATION) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 8, source, sizeof(source)))
			return 0;
		if (source[0] | source[1])
			return 1;
	}
	return may_use6(frame, target);
}

// Checks the options of a message of neighbor discovery, which start at offset: a
// link-layer address, of the source (1) or of the target (2), must be mac. Returns a
// reason, or 0. It is global for the reason that dra_shared_find_upper is.
__noinline __u32 dra_shared_check_options(struct __sk_buff *skb, __u32 offset, __u64 mac)
{
	__u64 option;
	__u32 kind;

	for (int i = 0; i < ND_OPTIONS; i++) {
		if (offset > 2048)
			return REASON_ND;
		if (bpf_skb_load_bytes(skb, offset, &option, sizeof(option)))
			return 0; // there is no further option
		kind = option & 0xff;
		if (((kind == 1 || kind == 2) && option >> 16 != mac) || !(option >> 8 & 0xff))
			return REASON_ND;
		offset += (option >> 8 & 0xff) * 8;
	}
	return REASON_ND; // too many options
}

// Checks a message of neighbor discovery (RFC 4861). The message follows the IPv6
// header at once.
static __always_inline __u32 check_nd(struct __sk_buff *skb, const struct frame *frame, __u32 type)
{
	__u32 offset = ETH_HLEN + 40 + 8;
	__u64 words[2];

	if (type == ND_ROUTER_ADVERTISEMENT)
		return REASON_RA;
	if (type == ND_REDIRECT)
		return REASON_ND;
	// A solicitation assigns its source address to the MAC address in its option. Of other frames that a
	// pod forwards, the source is not checked.
	if (frame->forwards) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 8, words, sizeof(words)))
			return REASON_ND;
		if ((words[0] | words[1]) && !may_use6(frame, words))
			return REASON_ND;
	}
	if (type != ND_ROUTER_SOLICITATION) {
		if (bpf_skb_load_bytes(skb, offset, words, sizeof(words)) || !may_use_target(skb, frame, type, words))
			return REASON_ND;
		offset += 16;
	}
	return dra_shared_check_options(skb, offset, frame->source);
}

static __always_inline __u32 check_ipv6(struct __sk_buff *skb, const struct frame *frame)
{
	__u64 source[2];
	struct upper upper;
	__u8 next, type;
	__u32 reason, ports;

	if (bpf_skb_load_bytes(skb, ETH_HLEN + 6, &next, 1) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN + 8, source, sizeof(source)))
		return REASON_PROTOCOL;
	if ((source[0] | source[1]) && !frame->forwards && !may_use6(frame, source))
		return REASON_ADDRESS;
	if ((is_extension(next) || next == 58) && hold(skb, ALL_HEADERS))
		return REASON_PROTOCOL;
	upper = find_upper(skb, next);
	if (upper.flags & UPPER_HIDDEN)
		return REASON_PROTOCOL;
	reason = check_protocol(frame, upper.protocol);
	if (reason)
		return reason;
	if (upper.flags & UPPER_REST)
		return 0;
	if (upper.protocol == 17) {
		if (bpf_skb_load_bytes(skb, upper.offset, &ports, sizeof(ports)))
			return REASON_DHCP; // a header that does not fit hides the ports
		if ((ports & 0xffff) == bpf_htons(547) || ports >> 16 == bpf_htons(546))
			return REASON_DHCP;
		if (ports >> 16 == bpf_htons(547) &&
		    (skb->gso_size || hold(skb, upper.offset + 9) || bpf_skb_load_bytes(skb, upper.offset + 8, &type, 1) ||
		     type == DHCPV6_RELAY_FORWARD))
			return REASON_DHCP;
		return check_router_port(frame, ports >> 16);
	}
	if (upper.protocol != 58)
		return 0;
	if (bpf_skb_load_bytes(skb, upper.offset, &type, 1))
		return REASON_PROTOCOL;
	if (is_mld_of_router(type))
		return REASON_MULTICAST;
	if (type < ND_ROUTER_SOLICITATION || type > ND_REDIRECT)
		return 0;
	if (upper.flags & UPPER_EXTENDED)
		return type == ND_ROUTER_ADVERTISEMENT ? REASON_RA : REASON_ND;
	return check_nd(skb, frame, type);
}

// Reports whether a frame is a router advertisement, or has headers that prevent this from being known. The kernel
// removes the first tag of a frame before the program sees it, and further ones with VLAN 0 in the pod.
static __always_inline int is_advertisement(struct __sk_buff *skb, const struct frame *frame)
{
	struct upper upper;
	__u8 next, type;
	__u16 vlan;

	if (is_tag(frame->protocol))
		return bpf_skb_load_bytes(skb, ETH_HLEN, &vlan, sizeof(vlan)) || !(bpf_ntohs(vlan) & 0xfff);
	if (frame->protocol != bpf_htons(ETH_P_IPV6) || bpf_skb_load_bytes(skb, ETH_HLEN + 6, &next, 1))
		return 0;
	upper = find_upper(skb, next);
	if (upper.flags & UPPER_HIDDEN)
		return 1;
	return upper.protocol == 58 && !(upper.flags & UPPER_REST) &&
	       !bpf_skb_load_bytes(skb, upper.offset, &type, 1) && type == ND_ROUTER_ADVERTISEMENT;
}

// Remembers if the sender of ARP or neighbor discovery that arrived uses the address of a link. Hosts
// that ask whether an address is in use have no address yet.
static __always_inline void note_conflict(struct __sk_buff *skb, const struct frame *frame)
{
	__u64 address[] = {frame->parent, 0, 0}, words[2];
	__u64 *holder, *noted, source = frame->source;
	__u32 offset = ETH_HLEN + 8; // of the source address in IPv6
	__u8 type;

	if (frame->protocol == bpf_htons(ETH_P_ARP)) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 8, words, sizeof(words)))
			return;
		source = words[0] & 0xffffffffffffULL;
		address[2] = 0xffff0000ULL | (words[0] >> 48 | (words[1] & 0xffff) << 16) << 32;
	} else {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 40, &type, 1))
			return;
		if (type == ND_NEIGHBOR_ADVERTISEMENT)
			offset = ETH_HLEN + 40 + 8; // of the target
		if (bpf_skb_load_bytes(skb, offset, &address[1], 16))
			return;
	}
	holder = bpf_map_lookup_elem(&dra_shared_addresses, address);
	// 0 holds the addresses of gateways.
	if (!holder || !*holder || *holder == source || *holder == number_of(frame->nic->mac))
		return;
	noted = bpf_map_lookup_elem(&dra_shared_conflicts, address);
	if (!noted || *noted != source)
		bpf_map_update_elem(&dra_shared_conflicts, address, &source, BPF_ANY);
}

// Reports whether a frame in the format of IEEE 802.3 carries another protocol of Ethernet (SNAP, RFC 1042, and
// IEEE 802.1H). Linux does not receive it, but Windows, some switches, and bridges to Wi-Fi take it for that protocol.
static __always_inline int hides_protocol(struct __sk_buff *skb, const struct frame *frame)
{
	__u64 header;

	if (bpf_ntohs(frame->protocol) >= ETH_P_802_3_MIN || bpf_skb_load_bytes(skb, ETH_HLEN, &header, sizeof(header)))
		return 0;
	header &= 0xffffffffffffULL;
	return header == 0x00000003aaaaULL || header == 0xf8000003aaaaULL;
}

// Checks what a frame of a link contains.
static __always_inline __u32 check_content(struct __sk_buff *skb, const struct frame *frame)
{
	__u16 tag[2]; // with the protocol that follows

	// The addresses 01:80:c2:00:00:00 to 3f belong to protocols between switches and routers, and
	// 01:00:0c:cc:cc:cc and cd to those of Cisco.
	if ((frame->destination & 0xc0ffffffffffULL) == 0x0000c28001ULL ||
	    (frame->destination & 0xfeffffffffffULL) == 0xcccccc0c0001ULL)
		return REASON_PROTOCOL;
	if (skb->vlan_present)
		return skb->vlan_proto == bpf_htons(ETH_P_8021Q) && !is_tag(frame->protocol) &&
				       is_allowed_vlan(frame->parent, skb->vlan_tci & 0xfff)
			       ? 0
			       : REASON_VLAN;
	switch (frame->protocol) {
	case bpf_htons(ETH_P_PAUSE):
	case bpf_htons(ETH_P_SLOW):
	case bpf_htons(ETH_P_LLDP):
	case bpf_htons(ETH_P_MPLS_UC):
	case bpf_htons(ETH_P_MPLS_MC):
	case bpf_htons(ETH_P_PPP_DISC):
	case bpf_htons(ETH_P_PPP_SES):
	case bpf_htons(ETH_P_ETAG):
	case bpf_htons(ETH_P_VNTAG):
		return REASON_PROTOCOL;
	case bpf_htons(ETH_P_QINQ1):
	case bpf_htons(ETH_P_QINQ2):
	case bpf_htons(ETH_P_QINQ3):
	case bpf_htons(ETH_P_8021AD):
		return REASON_VLAN;
	case bpf_htons(ETH_P_8021Q):
		if (bpf_skb_load_bytes(skb, ETH_HLEN, tag, sizeof(tag)))
			return REASON_VLAN;
		return is_allowed_vlan(frame->parent, bpf_ntohs(tag[0]) & 0xfff) && !is_tag(tag[1]) ? 0 : REASON_VLAN;
	case bpf_htons(ETH_P_ARP):
		return check_arp(skb, frame, ETH_HLEN);
	case bpf_htons(ETH_P_IP):
		return check_ipv4(skb, frame);
	case bpf_htons(ETH_P_IPV6):
		return check_ipv6(skb, frame);
	}
	return hides_protocol(skb, frame) ? REASON_PROTOCOL : 0;
}

#define CHECKSUM_PARTIAL 3
#define NO_CHECKSUM (~0U)

// Returns the offset in a frame at which the kernel or the NIC will write a checksum, or NO_CHECKSUM. It is
// global for the reason that dra_shared_find_upper is.
__noinline __u32 dra_shared_checksum_field(struct __sk_buff *context)
{
	struct sk_buff *skb;
	__u64 headroom;

	if (bpf_cast_to_kern_ctx) {
		skb = bpf_cast_to_kern_ctx(context);
		if (BPF_CORE_READ_BITFIELD(skb, ip_summed) != CHECKSUM_PARTIAL)
			return NO_CHECKSUM;
		headroom = skb->data - skb->head;
		return skb->csum_start + skb->csum_offset - headroom;
	}
	skb = kernel_frame(context);
	if (BPF_CORE_READ_BITFIELD_PROBED(skb, ip_summed) != CHECKSUM_PARTIAL)
		return NO_CHECKSUM;
	headroom = BPF_CORE_READ(skb, data) - BPF_CORE_READ(skb, head);
	return BPF_CORE_READ(skb, csum_start) + BPF_CORE_READ(skb, csum_offset) - headroom;
}

// Checks that a checksum will not be written over a field that the program has checked. A program that sends
// through a packet socket, or that rewrites frames in the pod, chooses both the position and the value.
static __always_inline __u32 check_checksum(struct __sk_buff *skb, const struct frame *frame)
{
	__u32 field = dra_shared_checksum_field(skb), upper, protocol, ports;
	struct upper found;
	__u8 byte;

	if (field == NO_CHECKSUM)
		return 0;
	if (skb->vlan_present)
		return field >= ETH_HLEN ? 0 : REASON_VLAN;
	if (is_tag(frame->protocol))
		return field >= ETH_HLEN + 4 ? 0 : REASON_VLAN; // behind the tag
	switch (frame->protocol) {
	case bpf_htons(ETH_P_ARP):
		return REASON_ARP;
	case bpf_htons(ETH_P_IP):
		if (bpf_skb_load_bytes(skb, ETH_HLEN, &byte, 1))
			return REASON_PROTOCOL;
		upper = ETH_HLEN + (byte & 0xf) * 4;
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 9, &byte, 1))
			return REASON_PROTOCOL;
		protocol = byte;
		break;
	case bpf_htons(ETH_P_IPV6):
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 6, &byte, 1))
			return REASON_PROTOCOL;
		found = find_upper(skb, byte);
		upper = found.offset;
		protocol = found.protocol;
		break;
	default:
		return field >= ETH_HLEN ? 0 : REASON_PROTOCOL;
	}
	if (protocol == 58) // ICMPv6
		return field == upper + 2 ? 0 : REASON_PROTOCOL;
	if (protocol != 17) // of TCP, or of a packet in a tunnel
		return field >= upper + 8 ? 0 : REASON_PROTOCOL;
	if (field == upper + 6)
		return 0;
	if (field < upper + 8 || bpf_skb_load_bytes(skb, upper, &ports, sizeof(ports)))
		return REASON_PROTOCOL;
	return ports >> 16 == bpf_htons(67) ? REASON_DHCP : 0;
}
