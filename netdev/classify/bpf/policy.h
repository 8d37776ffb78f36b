// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// The rules of a NIC, the links of shares with their addresses, and what a frame violates: a reason. A policy decides for
// each NIC whether frames with a reason are dropped or only counted.

#pragma once

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "nic.h"

// Reports whether a frame is ARP or IPv6 neighbor discovery (ICMPv6, next header
// 58, types 133 to 137).
static __always_inline int is_arp_or_nd(struct __sk_buff *skb, const struct ethhdr *eth)
{
	__u8 next, type;

	if (eth->h_proto == bpf_htons(ETH_P_ARP))
		return 1;
	if (eth->h_proto != bpf_htons(ETH_P_IPV6))
		return 0;
	if (bpf_skb_load_bytes(skb, ETH_HLEN + 6, &next, 1) || next != 58)
		return 0;
	if (bpf_skb_load_bytes(skb, ETH_HLEN + 40, &type, 1))
		return 0;
	return type >= 133 && type <= 137;
}

// Reasons. Package classify has the same numbers.
#define REASON_MAC 1        // the source MAC address is not one of the sender's
#define REASON_ADDRESS 2    // the source IP address is not one of the link's
#define REASON_ARP 3        // ARP with an address that the link does not have
#define REASON_ND 4         // neighbor discovery with an address that the link does not have
#define REASON_RA 5         // a router advertisement
#define REASON_DHCP 6       // a message of a DHCP server
#define REASON_VLAN 7       // a VLAN tag
#define REASON_FORWARDED 8  // a frame that the pod forwards
#define REASON_RATE 9       // more ARP or neighbor discovery than a link may send
#define REASON_BLOCKED 10   // the link is blocked
#define REASON_PROTOCOL 11  // a protocol between switches or routers, or IP headers that hide the protocol
#define REASON_RECEIVER 12  // a unicast frame for an address that no link has
#define REASON_ISOLATION 13 // a frame between links that must not reach each other
#define REASON_MULTICAST 14 // a message that only a multicast router sends
#define REASONS 16          // a power of 2

// Protocols of tags of bridges and switches (IEEE 802.1BR, Cisco), for which the kernel headers define no constant.
#define ETH_P_ETAG 0x893f
#define ETH_P_VNTAG 0x8926

#define DHCPV6_RELAY_FORWARD 12 // a type of message (RFC 8415)

// Values of policy.identity.
#define IDENTITY_OFF 0
#define IDENTITY_AUDIT 1
#define IDENTITY_ENFORCE 2

// The rules of a NIC.
struct policy {
	__u8 identity;
	__u8 forwarding; // whether pods may forward frames
	__u8 autoconf;   // whether links receive router advertisements
	__u8 subnets;    // whether a link without addresses may use only addresses in dra_shared_subnets
	__u8 guarded;    // whether the source address of received frames is replaced
	// The programs do not use the first two bytes, in which the plugin keeps the length of its timer for guarded. The
	// others keep the size of the value: plugins of other releases open the same pinned map.
	__u8 unused[ETH_ALEN];
	__u8 vrrp;       // whether links may send VRRP
	__u8 reaches_node; // whether links with LINK_BRIDGE and the node reach each other
	__u8 traces_arp; // whether dra_shared_arp has the senders of ARP
	__u8 pad[2];
};

// Flags of a link.
#define LINK_AUDIT 1       // attached by a release that did not enforce identity
#define LINK_ANY_ADDRESS 2 // no address is recorded
#define LINK_BRIDGE 4      // may exchange frames with other such links of the NIC
#define LINK_BLOCKED 8     // may neither send nor receive
#define LINK_VEPA 16       // sends frames for other links out of the NIC too: see hairpin.h

// A link of a share.
struct link {
	__u64 cookie; // of the pod's network namespace
	__u32 class;  // major and minor number
	__u32 flags;
	__u32 address;       // an IPv4 address of the link as in a frame; 0 if it has none
	__u32 neighbors;     // how much ARP and neighbor discovery it sent since window; see add_neighbor
	__u64 window;        // time in ns
	__u64 address6[2];   // an IPv6 address of the link as in a frame; 0 if it has none
};

// The key of an address. IPv4 addresses are mapped to IPv6 (::ffff:0:0/96).
struct address {
	__u64 parent;
	__u8 bytes[16];
};

// The key of a network: prefixlen counts the 32 bits of parent too.
struct subnet {
	__u32 prefixlen;
	__u32 parent;
	__u8 bytes[16];
};

// Values of dra_shared_subnets.
#define SUBNET_ASSIGNED 1 // links without recorded addresses may use the addresses
#define SUBNET_ALL 2      // all links may

// The key of a MAC address or of a VLAN that all links may use.
struct allowed {
	__u32 parent;
	__u8 mac[ETH_ALEN];
	__u16 vlan; // ID; 0 for an address
	__u32 pad;
};

// The key of a namespace that has a link.
struct tenant {
	__u64 cookie;
	__u64 parent;
};

// Numbers of frames by reason: those that passed at [reason], dropped ones at [REASONS + reason].
struct refusals {
	__u64 frames[2 * REASONS];
	__u64 zero; // always 0; see refuse
};

// The key of refusals.
struct charged {
	__u32 parent;
	__u32 class; // major and minor number
};

// What limits ARP and neighbor discovery of senders other than links, by source address.
struct moderation {
	__u64 window; // time in ns
	__u32 frames; // since window; see add_neighbor
	__u32 pad;    // keeps the size of the value: plugins of other releases open the same pinned map
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct policy);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_policies SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct receiver);
	__type(value, struct link);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_links SEC(".maps");

// The MAC address of the link or of the NIC that has an address, as a number.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct address);
	__type(value, __u64);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_addresses SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct subnet);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_subnets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct allowed);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_allowed SEC(".maps");

// The class of a link in a namespace.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tenant);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_tenants SEC(".maps");

// The class of the share that last sent with an allowed MAC address.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct receiver);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_learned SEC(".maps");

// The addresses of links that no share has; see is_imitated. The value is not used.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct receiver);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_imitated SEC(".maps");

// The time at which a sender with a hash was listed last; see was_listed. The key has the hash in the lower 32 bits, and
// the interface index of the NIC.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, __u64);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_listed SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct receiver);
	__type(value, struct moderation);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_moderation SEC(".maps");

// The MAC address, as a number, of the last host on the network that has used an address of a link.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct address);
	__type(value, __u64);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_conflicts SEC(".maps");

// The refused frames of a class. All CPUs use the same numbers: they change rarely, and one set of numbers for each CPU
// would take 34 KB of kernel memory for each share of a node with 128 CPUs.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct charged);
	__type(value, struct refusals);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_refused SEC(".maps");

// Reports whether links with LINK_BRIDGE and the node reach each other through a NIC.
static __always_inline int reaches_node(__u32 parent)
{
	struct policy *policy = bpf_map_lookup_elem(&dra_shared_policies, &parent);

	return policy && policy->reaches_node;
}

// What the programs know of a frame.
struct frame {
	struct nic *nic;
	struct policy *policy;
	struct link *link; // of the sender, or of the receiver for a frame that arrived
	__u64 cookie;
	__u64 source;
	__u64 destination;
	__u32 parent;
	__u32 class;    // 0 if the frame has none
	__u32 charged;  // the class that refusals are counted for
	__u32 protocol; // as in the frame
	int own;        // whether the source is the NIC's
	int has_socket; // of a pod, or of the node
	int has_cookie;
	int is_unproven;// whether a frame without a socket may come from a namespace other than the link's
	int returned;   // whether the frame arrived from the hairpin of the NIC
	int forwards;   // whether the pod forwards or bridges it, so that its IP addresses are not the link's
	int is_foreign; // whether a namespace other than the node's may have sent it
	int is_node_arp;// whether it is ARP that the kernel of the node has made
	int routed;     // whether the node has routed it, or that is not known
};

// A key is an array of whole words; see class_of_sender.

static __always_inline struct link *find_link(__u32 parent, __u64 mac)
{
	__u64 key[] = {parent | mac << 32, mac >> 32};

	return bpf_map_lookup_elem(&dra_shared_links, key);
}

static __always_inline int is_allowed_mac(__u32 parent, __u64 mac)
{
	__u64 key[] = {parent | mac << 32, mac >> 32};

	_Static_assert(sizeof(key) == sizeof(struct allowed), "the key has padding");
	return bpf_map_lookup_elem(&dra_shared_allowed, key) != 0;
}

static __always_inline int is_allowed_vlan(__u32 parent, __u16 vlan)
{
	__u64 key[] = {parent, (__u64)vlan << 16};

	return vlan && bpf_map_lookup_elem(&dra_shared_allowed, key) != 0;
}

static __always_inline __u32 class_of_tenant(__u32 parent, __u64 cookie)
{
	__u64 key[] = {cookie, parent};
	__u32 *class;

	if (!cookie)
		return 0;
	class = bpf_map_lookup_elem(&dra_shared_tenants, key);
	return class ? *class : 0;
}

// Counts a frame with a reason for the class frame->class, or as unidentified if that is none of a
// share, and reports whether it must be dropped.
static __always_inline int refuse(const struct frame *frame, __u32 reason)
{
	__u32 class = (frame->class & 0xffff) >= CLASS_SHARE ? frame->class : frame->nic->major | CLASS_UNIDENTIFIED;
	__u64 key = frame->parent | (__u64)class << 32;
	struct refusals *refusals = bpf_map_lookup_elem(&dra_shared_refused, &key);
	int drop = frame->policy->identity == IDENTITY_ENFORCE && !(frame->link && frame->link->flags & LINK_AUDIT);

	if (refusals) {
		// Without CAP_PERFMON, the verifier refuses an index whose bounds depend on the path. It does not
		// know what the program reads from a map, so that the mask sets the bounds on every path.
		__u64 index = (reason + (drop ? REASONS : 0) + refusals->zero) & (2 * REASONS - 1);

		__sync_fetch_and_add(&refusals->frames[index], 1);
	}
	return drop;
}

// Reports whether the frame's socket is one with which the kernel replies for all
// namespaces: of the type raw, and of the protocol ICMP, TCP, or ICMPv6. While a queue
// of a pod delays a reply, its socket returns to the initial namespace.
static __always_inline int is_reply(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;

	if (!sk)
		return 0;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->type != 3 || (sk->family != 2 && sk->family != 10)) // SOCK_RAW, AF_INET, AF_INET6
		return 0;
	return sk->protocol == 1 || sk->protocol == 6 || sk->protocol == 58;
}

// How much ARP and neighbor discovery a sender may send in a second.
#define NEIGHBORS_PER_SECOND 100   // in CLASS_CONTROL
#define BROADCASTS_PER_SECOND 1000 // multicast and broadcast, in any class
#define NEWCOMERS_PER_SECOND 20    // new senders that a NIC records per second
#define SECOND 1000000000ULL

// What the rate of a sender means for a frame of ARP or neighbor discovery.
#define RATE_LOW 0       // the frame may use CLASS_CONTROL
#define RATE_HIGH 1      // the frame uses the class of its sender
#define RATE_EXCESSIVE 2 // the frame is multicast or broadcast, and refused

// Adds a frame to the counts of a second: of all frames in the lower 16 bits, and of multicast
// and broadcast in the upper. A sender cannot choose how often it has to answer, so answers do not
// count as broadcast.
static __always_inline __u32 add_neighbor(__u32 *counts, __u64 destination)
{
	__u32 before = *counts, added = 0;

	if ((before & 0xffff) <= NEIGHBORS_PER_SECOND)
		added = 1;
	if (destination & 1 && before >> 16 <= BROADCASTS_PER_SECOND)
		added += 1 << 16;
	if (added)
		__sync_fetch_and_add(counts, added); // a sender may use several CPUs
	return before + added;
}

static __always_inline int rate_of(__u32 counts, __u64 destination)
{
	if (destination & 1 && counts >> 16 > BROADCASTS_PER_SECOND)
		return RATE_EXCESSIVE;
	return (counts & 0xffff) > NEIGHBORS_PER_SECOND ? RATE_HIGH : RATE_LOW;
}

// No message of ARP or neighbor discovery needs to be longer, so that longer ones may not use CLASS_CONTROL.
#define NEIGHBOR_LENGTH 128

// Counts ARP or neighbor discovery of a link, and returns its rate.
static __always_inline int count_neighbor(struct __sk_buff *skb, struct link *link, __u64 destination)
{
	__u64 now = bpf_ktime_get_ns();
	int rate;

	if (now - link->window > SECOND) {
		link->window = now;
		link->neighbors = 0;
	}
	rate = rate_of(add_neighbor(&link->neighbors, destination), destination);
	return skb->len > NEIGHBOR_LENGTH && rate == RATE_LOW ? RATE_HIGH : rate;
}

// Reports whether the rate of ARP and neighbor discovery of a link was high at its last frame.
static __always_inline int has_high_rate(const struct link *link)
{
	return rate_of(link->neighbors, 0) != RATE_LOW;
}

// Reports whether the NIC may record a new sender of ARP and neighbor discovery. A host can use another
// address in each frame. Its frames must not fill CLASS_CONTROL, nor the map of the senders that are
// known. Their number is counted with a key that no address has.
static __always_inline int may_be_known(__u32 parent)
{
	__u64 key[] = {parent, 1ULL << 16};
	struct moderation *m = bpf_map_lookup_elem(&dra_shared_moderation, key), first = {};
	__u64 now = bpf_ktime_get_ns();

	if (!m || now - m->window > SECOND) {
		first.window = now;
		first.frames = 1;
		bpf_map_update_elem(&dra_shared_moderation, key, &first, BPF_ANY);
		return 1;
	}
	__sync_fetch_and_add(&m->frames, 1);
	return m->frames <= NEWCOMERS_PER_SECOND;
}

// Counts ARP or neighbor discovery of a source address that no link has, and returns its rate.
// is_allowed is set if the network allows the address for all links.
static __always_inline int count_other(struct __sk_buff *skb, const struct frame *frame, int is_allowed)
{
	__u64 key[] = {frame->parent | frame->source << 32, frame->source >> 32};
	struct moderation *m = bpf_map_lookup_elem(&dra_shared_moderation, key), first = {};
	__u64 now = bpf_ktime_get_ns();
	int rate = RATE_LOW;

	if (!m && !is_allowed && !may_be_known(frame->parent))
		return RATE_HIGH;
	if (!m || now - m->window > SECOND) {
		first.window = now;
		first.frames = 1 | (frame->destination & 1) << 16;
		bpf_map_update_elem(&dra_shared_moderation, key, &first, BPF_ANY);
	} else {
		rate = rate_of(add_neighbor(&m->frames, frame->destination), frame->destination);
	}
	return skb->len > NEIGHBOR_LENGTH && rate == RATE_LOW ? RATE_HIGH : rate;
}

// Counts ARP or neighbor discovery that leaves through a NIC, and returns its rate.
static __always_inline int count_sent(struct __sk_buff *skb, const struct frame *frame)
{
	return frame->link ? count_neighbor(skb, frame->link, frame->destination) : count_other(skb, frame, 0);
}
