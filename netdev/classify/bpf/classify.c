// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// These programs assign the frames of a NIC to the HTB classes of shares, and drop
// the frames that do not carry the identity of their sender; see identity.h.
//
// Both programs are attached to the NIC by TCX or to attach points of clsact, and write the
// class of a frame to skb->priority, where HTB reads it. They write it to every
// frame, because macvlan passes the sender's priority to the NIC: a pod could
// otherwise choose its class with SO_PRIORITY.
//
// There is one program per way to identify the sender and to recognize forwarded
// frames, so that the verifier sees only what the kernel supports: the loader
// removes the others. A constant would not do, because the verifier of Linux 6.1
// also checks what is never executed, unless the process has CAP_PERFMON.

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

// Minor numbers of the base classes, which every NIC has. Package shape uses
// the same numbers.
#define CLASS_HOST 2         // frames of sockets in the node's network namespace
#define CLASS_CONTROL 3      // ARP and neighbor discovery: without a socket, or from the wire
#define CLASS_UNIDENTIFIED 4 // frames that cannot be assigned to a share
#define CLASS_FORWARDED 5    // frames that the node forwards
#define CLASS_DROP 7         // of the IFB device: its queue accepts no frame
#define CLASS_MULTICAST 8    // the first of MULTICAST_CLASSES of the IFB device, for multicast and broadcast from
			     // the wire, except ARP and neighbor discovery
#define MULTICAST_CLASSES 8  // a power of 2
#define CLASS_SHARE 16       // the first of a share

// Major numbers of the classes. Package shape uses the same numbers.
#define MAJOR 0xd5a       // of devices with one HTB qdisc: each hairpin, and NICs that do not have one per queue
#define QUEUE_MAJORS 0x5d5 // the upper 12 bits of the others; the lower 4 are the number of the transmit queue

// Values of nic.forwarded.
#define FORWARDED_BY_ROUTE 1   // the node has routed the frame
#define FORWARDED_BY_ADDRESS 2 // the frame has the NIC's source MAC; a share can bridge such a frame

// A NIC.
struct nic {
	__u64 host_cookie;   // cookie of the network namespace that the NIC is in
	__u32 ifb;           // interface index of the device that shapes incoming frames
	__u32 major;         // major number of the classes, in the upper 16 bits
	__u8 mac[ETH_ALEN];
	__u8 trust_mac;      // if set, a frame without a socket selects a share by its source MAC
	__u8 forwarded;      // how to recognize frames for CLASS_FORWARDED; 0 if the NIC has no such class
};

// The key of a sender: the cookie of the sending socket's network namespace,
// the NIC, and the source MAC address. The cookie is 0 in entries for frames
// that the address alone identifies: those that dra_shared_egress_mac looks up,
// and frames without a socket if the administrator trusts addresses.
struct sender {
	__u64 cookie;
	__u32 parent;
	__u8 mac[ETH_ALEN];
	__u8 pad[6]; // explicit, because the kernel compares keys byte by byte
};

// The key of a receiver: the NIC and the destination MAC address.
struct receiver {
	__u32 parent;
	__u8 mac[ETH_ALEN];
	__u8 pad[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct nic);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_nics SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sender);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_tx SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct receiver);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_rx SEC(".maps");

// How many frames of a NIC the programs have seen, on each CPU. The plugin compares
// the numbers with those of the NIC, because programs in front of these can keep
// frames from them.
struct counts {
	__u64 sent;
	__u64 received;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, 256);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct counts);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_counts SEC(".maps");

// The fields of the kernel's types that lead from a socket to the cookie of its
// network namespace. The loader replaces their offsets by those of the kernel.
struct net {
	__u64 net_cookie;
} __attribute__((preserve_access_index));

typedef struct {
	struct net *net;
} possible_net_t;

struct sock_common {
	possible_net_t skc_net;
} __attribute__((preserve_access_index));

// Returns an address as a number, the first byte lowest.
static __always_inline __u64 number_of(const __u8 *mac)
{
	__u64 number = 0;

	for (int i = 0; i < ETH_ALEN; i++)
		number |= (__u64)mac[i] << (8 * i);
	return number;
}

// The fields of the kernel's types that lead from a frame to the link that its
// route names.
struct net_device {
	possible_net_t nd_net;
	int ifindex;
	void *rx_handler_data;
} __attribute__((preserve_access_index));

struct dst_entry {
	struct net_device *dev;
} __attribute__((preserve_access_index));

struct sk_buff {
	struct net_device *dev;
	unsigned long _skb_refdst;
	unsigned char *head, *data;
	__u16 network_header, transport_header, inner_transport_header; // from head
	__u8 ip_summed : 2;
	__u8 encapsulation : 1; // whether a tunnel has added headers
	__u16 csum_start, csum_offset; // from head, and from csum_start
} __attribute__((preserve_access_index));

#define SKB_DST_NOREF 1UL // a flag in _skb_refdst, which otherwise is a pointer

// Returns the kernel's structure of a frame. The verifier permits no access to it. Reading
// the variable that has the pointer yields a number.
static __always_inline struct sk_buff *kernel_frame(struct __sk_buff *context)
{
	struct sk_buff *skb = 0;

	bpf_probe_read_kernel(&skb, sizeof(skb), &context);
	return skb;
}

// Returns the struct sk_buff of a frame (kfunc, Linux 6.2). The program then reads fields directly; a helper call costs
// about 20 ns per field.
extern void *bpf_cast_to_kern_ctx(void *context) __ksym __weak;

// Returns a read-only pointer of the given type (kfunc, Linux 6.2).
extern void *bpf_rdonly_cast(const void *object, __u32 type) __ksym __weak;

// What the route of a frame names.
struct route {
	__u32 link;   // interface index; 0 if the frame has no route
	__u64 cookie; // of the network namespace of the link
};

// Returns the route of a frame: without a link if it has none, or if it was deleted. When a route is deleted in
// any namespace while frames wait in a queue, the kernel replaces its link by one that has no index and belongs to
// the initial namespace (blackhole_netdev).
static __always_inline struct route route_of(struct __sk_buff *context)
{
	struct route route = {};
	struct dst_entry *entry;
	struct net_device *link;
	struct sk_buff *skb;

	if (bpf_cast_to_kern_ctx && bpf_rdonly_cast) {
		skb = bpf_cast_to_kern_ctx(context);
		entry = (struct dst_entry *)(skb->_skb_refdst & ~SKB_DST_NOREF);
		if (!entry)
			return route;
		entry = bpf_rdonly_cast(entry, bpf_core_type_id_kernel(struct dst_entry));
		link = entry->dev;
		route.link = link->ifindex;
		if (route.link)
			route.cookie = link->nd_net.net->net_cookie;
		return route;
	}
	entry = (struct dst_entry *)(BPF_CORE_READ(kernel_frame(context), _skb_refdst) & ~SKB_DST_NOREF);
	link = entry ? BPF_CORE_READ(entry, dev) : 0;
	if (link)
		route.link = BPF_CORE_READ(link, ifindex);
	if (route.link)
		route.cookie = BPF_CORE_READ(link, nd_net.net, net_cookie);
	return route;
}

// Reports whether the network stack of the node has routed a frame: out of the NIC, or of another link of the
// node, such as a VLAN on the NIC. A pod cannot cause this for the frames that it sends through its link: their
// route, if any, names a link of the pod, and a frame loses its route when it moves between namespaces or
// is bridged.
static __always_inline int routed_by_node(struct __sk_buff *context)
{
	struct route route = route_of(context);
	struct sk_buff *skb;

	if (!route.link)
		return 0;
	if (bpf_cast_to_kern_ctx) {
		skb = bpf_cast_to_kern_ctx(context);
		return route.cookie == skb->dev->nd_net.net->net_cookie;
	}
	return route.cookie == BPF_CORE_READ(kernel_frame(context), dev, nd_net.net, net_cookie);
}

// Returns the cookie of the network namespace whose network stack has routed a frame: that of the pod
// that sends it. Returns 0 without a route: for frames that a pod bridges or sends through a packet
// socket, and for ARP.
static __always_inline __u64 cookie_of_route(struct __sk_buff *context)
{
	return route_of(context).cookie;
}

// Reports whether a tunnel has added headers to a frame.
static __always_inline int is_encapsulated(struct __sk_buff *context)
{
	struct sk_buff *skb;

	if (bpf_cast_to_kern_ctx) {
		skb = bpf_cast_to_kern_ctx(context);
		return BPF_CORE_READ_BITFIELD(skb, encapsulation);
	}
	skb = kernel_frame(context);
	return BPF_CORE_READ_BITFIELD_PROBED(skb, encapsulation);
}

// Whether an Internet socket belongs to the sender of a frame only if the frame has a route. Tests set it to 0: the
// kernel gives the frames of a test run such a socket, and no route.
const volatile __u8 dra_shared_sockets_need_routes = 1;

// Reports whether the socket of a frame belongs to its sender. A frame keeps its socket when a pod receives it and
// sends it again: through a bridge or a redirect, after which it has arrived at a link of the pod, through a tunnel,
// whose route is one of the pod, or through a link that makes it look like a frame that has not arrived, such as ipvlan
// for multicast. A link that releases routes, such as a bridge, hides the route. So Internet sockets need one, and
// those of packet sockets need one in a tunnel.
static __always_inline int has_own_socket(struct __sk_buff *context, int has_cookie, __u64 cookie, int reads_routes)
{
	struct bpf_sock *sk = context->sk;
	struct route route;

	if (!sk || context->ingress_ifindex)
		return 0;
	if (!has_cookie || !reads_routes)
		return 1;
	route = route_of(context);
	if (route.link)
		return route.cookie == cookie;
	if (dra_shared_sockets_need_routes && (sk->family == 2 || sk->family == 10)) // AF_INET, AF_INET6
		return 0;
	return !is_encapsulated(context);
}

// Reports whether the node forwards a frame that no share sent, such as one of a
// pod in the cluster network. Such a frame has the source MAC of the NIC.
static __always_inline int is_forwarded(struct __sk_buff *skb, int reads_routes, const struct nic *nic, __u64 source)
{
	if (!nic->forwarded || source != number_of(nic->mac))
		return 0;
	return nic->forwarded == FORWARDED_BY_ADDRESS || (reads_routes && routed_by_node(skb));
}

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

// The kernel divides a packet while no other frame leaves the NIC, and counts the segments in 16 bits: HTB would count
// 65,537 segments as one. The largest packets of TCP (BIG TCP) have fewer than 400 segments of 1,448 bytes.
#define MAX_SEGMENTS 1024

// The payload of a segment must be at least this many times as long as the headers that HTB does not count.
#define SEGMENT_RATIO 4

// Returns how many bytes of the headers of each segment HTB does not count (before Linux 6.17): those between the outer
// and the inner transport header of a packet in a tunnel, and the latter, of TCP at most with a timestamp.
static __always_inline __u32 uncounted_headers(struct __sk_buff *context)
{
	struct sk_buff *skb;

	if (!is_encapsulated(context))
		return 0;
	if (bpf_cast_to_kern_ctx) {
		skb = bpf_cast_to_kern_ctx(context);
		return (__u16)(skb->inner_transport_header - skb->transport_header) + 32;
	}
	skb = kernel_frame(context);
	return (__u16)(BPF_CORE_READ(skb, inner_transport_header) - BPF_CORE_READ(skb, transport_header)) + 32;
}

// Reports whether the kernel, or the NIC, would divide a packet into more than MAX_SEGMENTS, or into segments most of
// which HTB would not count. A pod chooses the length of segments, and the headers in a tunnel. checks_tunnels is 0 for
// tunnels of the node and of its cluster network, because no share limits them.
static __always_inline int has_many_segments(struct __sk_buff *skb, int checks_tunnels)
{
	if (!skb->gso_size)
		return 0;
	return skb->len > skb->gso_size * MAX_SEGMENTS ||
	       (checks_tunnels && uncounted_headers(skb) * SEGMENT_RATIO > skb->gso_size);
}

// Returns the multicast class of a sender. Each class has a part of the rate for multicast, so
// that a sender leaves some to the senders of the other classes. Shares cannot choose their
// addresses.
static __always_inline __u32 multicast_class(__u64 source)
{
	return CLASS_MULTICAST + ((source * 0x9e3779b97f4a7c15ULL) >> 32) % MULTICAST_CLASSES;
}

// Makes the filter after the program send a frame through the transmit queue whose HTB qdisc has the class
// of the frame: its action takes the queue from the lower 4 bits of the hash (see steer.go). The other bits
// divide the flows of a share in its fq_codel queue.
static __always_inline void choose_queue(struct __sk_buff *skb)
{
	__u32 class = skb->priority, hash;

	if (class >> 20 != QUEUE_MAJORS)
		return;
	hash = skb->hash;
	if (!hash)
		hash = bpf_get_hash_recalc(skb);
	bpf_set_hash(skb, (hash & ~0xfU) | (class >> 16 & 0xf));
}

// The functions below write the keys in whole words. The verifier of Linux 6.1
// refuses to write a part of a word on the stack of which another part was
// written, unless the process that loads the program has CAP_PERFMON.

// Returns the class of a sender, or 0 if no share has that sender.
static __always_inline __u32 class_of_sender(__u32 parent, __u64 cookie, __u64 mac)
{
	__u64 key[] = {cookie, parent | mac << 32, mac >> 32};
	__u32 *class;

	_Static_assert(sizeof(key) == sizeof(struct sender), "the key of a sender has padding");
	class = bpf_map_lookup_elem(&dra_shared_tx, key);
	return class ? *class : 0;
}

// Returns the class of a receiver, or 0 if no share has that receiver.
static __always_inline __u32 class_of_receiver(__u32 parent, __u64 mac)
{
	__u64 key[] = {parent | mac << 32, mac >> 32};
	__u32 *class;

	_Static_assert(sizeof(key) >= sizeof(struct receiver), "the key of a receiver is longer");
	class = bpf_map_lookup_elem(&dra_shared_rx, key);
	return class ? *class : 0;
}

#include "identity.h"
#include "arp.h"
#include "hairpin.h"

// Writes the class to a frame that leaves through a NIC, and returns the verdict on
// it; see send. has_cookie is 0 if the cookie of the frame's socket is not known. No namespace
// has the cookie 0. reads_routes is 0 if the kernel does not let the program read
// routes, and checks is 0 if the program does not check the identity of frames.
static __always_inline int classify_sent(struct __sk_buff *skb, int has_cookie, __u64 cookie, int reads_routes,
					 int checks)
{
	__u32 parent = skb->ifindex, class = 0;
	struct nic *nic = bpf_map_lookup_elem(&dra_shared_nics, &parent);
	struct frame frame = {.parent = parent, .cookie = cookie};
	struct counts *counts;
	struct ethhdr eth;
	int has_socket, is_switched = 0;

	if (!nic)
		return TC_ACT_UNSPEC;
	counts = bpf_map_lookup_elem(&dra_shared_counts, &parent);
	if (counts)
		counts->sent++;
	// NICs pad a frame that ends in the Ethernet header, so that it is valid on the network.
	if (hold_first(skb, ETH_HLEN) || bpf_skb_load_bytes(skb, 0, &eth, sizeof(eth)) ||
	    hold_headers(skb, eth.h_proto))
		return TC_ACT_SHOT;
	frame.source = number_of(eth.h_source);
	frame.destination = number_of(eth.h_dest);
	frame.protocol = eth.h_proto;
	frame.own = frame.source == number_of(nic->mac);
	has_socket = has_own_socket(skb, has_cookie, cookie, reads_routes);
	// The namespace of another socket must not be charged for the frame.
	if (!has_socket)
		frame.cookie = cookie = 0;
	// A reply of a pod that was delayed has a socket of the initial namespace, too, and a pod can give
	// it the address of the NIC. Its route shows the pod.
	if (has_socket && has_cookie && cookie == nic->host_cookie && (reads_routes || !is_reply(skb))) {
		skb->priority = nic->major | CLASS_HOST;
		return frame.own ? reach_links(skb, parent, frame.destination) : TC_ACT_UNSPEC;
	}
	// The kernel has sockets with which it replies for all namespaces. Where the node
	// is a container, they return to a namespace that is not the node's either.
	if (has_socket && has_cookie && is_reply(skb) && !class_of_tenant(parent, cookie))
		has_socket = 0;
	if (!frame.own) {
		struct link *link = find_link(parent, frame.source);

		// Without CAP_PERFMON, the verifier of Linux 6.1 does not remember the type
		// of frame.link until the end of the program.
		if (link)
			is_switched = link->flags & LINK_BRIDGE;
		// The frame was checked before it entered the hairpin. While it waited there, a
		// socket with which the kernel replies may have gone to another namespace.
		if (link && is_switched && has_passed_hairpin(skb)) {
			skb->mark = 0;
			skb->priority = !skb->sk && is_arp_or_nd(skb, &eth) && !has_high_rate(link)
						? nic->major | CLASS_CONTROL
						: link->class;
			return TC_ACT_UNSPEC;
		}
		frame.link = link;
	}
	if (has_socket && has_cookie) {
		if (frame.link && frame.link->cookie == cookie)
			class = frame.link->class;
		else if (cookie)
			class = class_of_sender(parent, cookie, frame.source);
	} else if (has_socket) {
		// Without the cookie, a pod can use the class of the host with the
		// NIC's address, as it can use the class of another share with that
		// share's address.
		if (frame.own)
			class = nic->major | CLASS_HOST;
		else
			class = class_of_sender(parent, 0, frame.source);
	} else if (is_arp_or_nd(skb, &eth)) {
		class = nic->major | CLASS_CONTROL;
	} else if (nic->trust_mac) {
		class = class_of_sender(parent, 0, frame.source);
	}
	// The kernel divides a packet that is too large for a link before the packet reaches the NIC, and
	// only the last segment keeps the socket. So without a socket, the route shows the sender. What
	// the kernel itself sends has one, except ARP.
	if (reads_routes && frame.link && !has_socket &&
	    (frame.protocol != bpf_htons(ETH_P_ARP) || skb->ingress_ifindex)) {
		frame.is_unproven = cookie_of_route(skb) != frame.link->cookie;
		if (!class && !frame.is_unproven && !skb->ingress_ifindex)
			class = frame.link->class;
		if (frame.is_unproven && !nic->trust_mac)
			is_switched = 0; // its sender may be a link that must not reach others
	}
	if (!class && is_forwarded(skb, reads_routes, nic, frame.source))
		class = nic->major | CLASS_FORWARDED;
	if (checks)
		frame.policy = bpf_map_lookup_elem(&dra_shared_policies, &parent);
	if (frame.policy && frame.policy->identity) {
		frame.has_socket = has_socket;
		frame.has_cookie = has_cookie;
		if (frame.own) {
			// A NIC that forwards for the cluster network may get frames by a redirect,
			// without a route. They have arrived at a link of the node before.
			frame.is_foreign = (has_socket && has_cookie) || (!nic->forwarded && skb->ingress_ifindex);
			// Without a socket, the kernel of the node sends only ARP without a route. What the
			// kernel of a pod sends through a bridge has no ingress interface either.
			if (!has_socket && !skb->ingress_ifindex && frame.protocol != bpf_htons(ETH_P_ARP))
				frame.is_foreign = 1;
			frame.routed = !reads_routes || routed_by_node(skb);
		}
		if (reads_routes && frame.policy->traces_arp && !has_socket && !skb->ingress_ifindex &&
		    frame.protocol == bpf_htons(ETH_P_ARP)) {
			frame.cookie = cookie_of_arp(skb, frame.own);
			if (frame.own)
				frame.is_foreign = frame.cookie != nic->host_cookie;
			else if (!frame.link)
				frame.is_node_arp = frame.cookie == nic->host_cookie;
			// A bridge may have copied what the pod sends.
			else if (frame.cookie || !frame.policy->forwarding)
				frame.is_unproven = frame.cookie != frame.link->cookie;
		}
		frame.class = class;
		frame.nic = nic;
		__u32 reason = check_sent(skb, &frame);

		if (!reason && reads_routes && !frame.own)
			reason = check_checksum(skb, &frame);
		if (!reason && has_many_segments(skb, reads_routes && !frame.own))
			reason = REASON_PROTOCOL;
		class = frame.class;
		if (reason && refuse(&frame, reason))
			return TC_ACT_SHOT;
	} else if (checks && class == (nic->major | CLASS_CONTROL) && !frame.own &&
		   count_sent(skb, &frame) != RATE_LOW) {
		class = frame.link ? frame.link->class : 0;
	}
	// The limit of the share depends on it, whatever the policy is.
	if (has_many_segments(skb, reads_routes && !frame.own))
		return TC_ACT_SHOT;
	skb->priority = class ? class : nic->major | CLASS_UNIDENTIFIED;
	if (!frame.own)
		skb->mark = 0; // programs of the node that run after this one may obey it
	if (is_switched)
		return enter_hairpin(skb);
	return frame.own ? reach_links(skb, parent, frame.destination) : TC_ACT_UNSPEC;
}

// Classifies a frame that leaves through a NIC, and chooses its transmit queue.
static __always_inline int send(struct __sk_buff *skb, int has_cookie, __u64 cookie, int reads_routes, int checks)
{
	int verdict = classify_sent(skb, has_cookie, cookie, reads_routes, checks);

	if (verdict == TC_ACT_UNSPEC)
		choose_queue(skb);
	return verdict;
}

// Returns the cookie of the network namespace of a frame's socket, which it reads
// from the kernel's memory; 0 without a socket.
static __always_inline __u64 cookie_of_socket(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	struct sock_common *common;

	// The verifier permits no arithmetic with a pointer to a socket. Reading the
	// variable that has the pointer yields a number.
	if (!sk || bpf_probe_read_kernel(&common, sizeof(common), &sk))
		return 0;
	return BPF_CORE_READ(common, skc_net.net, net_cookie);
}

// Each egress program exists twice: the loader uses the one without checks if the kernel refuses the
// other, as Linux 6.1 does without CAP_PERFMON. The trials at the start of the plugin also use it, because
// the kernel verifies it faster.

// Identifies the sender by the cookie, which a helper returns.
SEC("tc")
int dra_shared_egress_helper(struct __sk_buff *skb)
{
	return send(skb, 1, skb->sk ? bpf_get_netns_cookie(skb) : 0, 0, 1);
}

SEC("tc")
int dra_shared_egress_helper_unchecked(struct __sk_buff *skb)
{
	return send(skb, 1, skb->sk ? bpf_get_netns_cookie(skb) : 0, 0, 0);
}

// Identifies the sender as dra_shared_egress_helper does, and reads routes.
SEC("tc")
int dra_shared_egress_helper_routes(struct __sk_buff *skb)
{
	return send(skb, 1, skb->sk ? bpf_get_netns_cookie(skb) : 0, 1, 1);
}

SEC("tc")
int dra_shared_egress_helper_routes_unchecked(struct __sk_buff *skb)
{
	return send(skb, 1, skb->sk ? bpf_get_netns_cookie(skb) : 0, 1, 0);
}

// Identifies the sender by the cookie, which it reads from the kernel's memory, as
// it does the route.
SEC("tc")
int dra_shared_egress_socket(struct __sk_buff *skb)
{
	return send(skb, 1, cookie_of_socket(skb), 1, 1);
}

SEC("tc")
int dra_shared_egress_socket_unchecked(struct __sk_buff *skb)
{
	return send(skb, 1, cookie_of_socket(skb), 1, 0);
}

// Identifies the sender by its address alone.
SEC("tc")
int dra_shared_egress_mac(struct __sk_buff *skb)
{
	return send(skb, 0, 0, 0, 1);
}

SEC("tc")
int dra_shared_egress_mac_unchecked(struct __sk_buff *skb)
{
	return send(skb, 0, 0, 0, 0);
}

// Writes the class to a frame that arrived at a NIC, and returns whether the
// frame belongs to the device that shapes incoming frames. It does not for
// frames to the node itself, which has no limit. A frame between links of the node
// arrives here too, and may still have its socket; cookie is 0 if it has none, or if
// the cookie is not known. reads_lists is 0 if the kernel does not let the program read lists of senders, and
// checks is 0 if the program does not check the identity of frames.
static __always_inline int classify_received(struct __sk_buff *skb, struct nic *nic, __u64 cookie, int reads_lists,
					     int checks)
{
	__u32 parent = skb->ifindex, reason;
	struct frame frame = {.parent = parent, .cookie = cookie, .nic = nic};
	struct ethhdr eth;

	frame.returned = leave_hairpin(skb);
	if (bpf_skb_load_bytes(skb, 0, &eth, sizeof(eth))) {
		skb->priority = nic->major | CLASS_UNIDENTIFIED;
		return 1;
	}
	frame.source = number_of(eth.h_source);
	frame.destination = number_of(eth.h_dest);
	frame.protocol = eth.h_proto;
	if (checks)
		frame.policy = bpf_map_lookup_elem(&dra_shared_policies, &parent);
	if (frame.policy && !frame.policy->identity)
		frame.policy = 0;
	if (frame.policy &&
	    (frame.policy->guarded || is_imitated(&frame) || (reads_lists && was_listed(skb, parent, frame.source))))
		hide_source(skb);
	if (frame.destination == number_of(nic->mac))
		return 0;
	if (!frame.returned && skb->pkt_type == PACKET_HOST) {
		// It has the address of a member of the bond or bridge that the NIC is, or one that the NIC got since. A link
		// of a pod could have this address, too, so the program makes the NIC the only receiver.
		bpf_skb_store_bytes(skb, 0, nic->mac, ETH_ALEN, 0);
		return 0;
	}
	if (frame.destination & 1) {
		if (frame.returned) {
			// The links receive copies. The node, which would receive the frame
			// itself, ignores it, unless it is from a link that reaches the node.
			if (frame.source == number_of(nic->mac) || !reaches_node(parent))
				bpf_skb_change_type(skb, PACKET_OTHERHOST);
		} else if (frame.policy && !frame.policy->autoconf && is_advertisement(skb, &frame)) {
			// Only the node receives frames with the NIC's address.
			bpf_skb_store_bytes(skb, 0, nic->mac, ETH_ALEN, 0);
			return 0;
		}
		skb->priority = nic->major | multicast_class(frame.source);
		if (is_arp_or_nd(skb, &eth)) {
			if (checks && !frame.returned)
				note_conflict(skb, &frame);
			if (count_other(skb, &frame, 0) == RATE_LOW)
				skb->priority = nic->major | CLASS_CONTROL;
		}
		return 1;
	}
	frame.link = find_link(parent, frame.destination);
	frame.class = frame.link ? frame.link->class : class_of_receiver(parent, frame.destination);
	if (frame.policy) {
		struct link *receiver = frame.link;
		__u32 class;

		reason = frame.returned ? check_returned(&frame) : check_received(skb, &frame);
		class = frame.class;
		frame.class = frame.charged;
		if (reason && refuse(&frame, reason)) {
			skb->priority = nic->major | CLASS_DROP;
			return 1;
		}
		frame.class = class;
		frame.link = receiver;
	}
	skb->priority = frame.class ? frame.class : nic->major | CLASS_UNIDENTIFIED;
	// The answer that a share waits for must not wait behind a flood in the queue of the share.
	if (frame.class && !frame.returned && is_arp_or_nd(skb, &eth) &&
	    count_other(skb, &frame, 0) == RATE_LOW)
		skb->priority = nic->major | CLASS_CONTROL;
	return 1;
}

// Values that a program of a filter without direct action returns. They make the
// kernel go on with the next filter, or run the filter's actions.
#define FILTER_NEXT 0
#define FILTER_ACT (-1)

// Counts a frame that arrived. Returns 0 if this driver does not manage the NIC.
static __always_inline struct nic *arrive(struct __sk_buff *skb)
{
	__u32 parent = skb->ifindex;
	struct nic *nic = bpf_map_lookup_elem(&dra_shared_nics, &parent);
	struct counts *counts;

	if (!nic)
		return 0;
	counts = bpf_map_lookup_elem(&dra_shared_counts, &parent);
	if (counts)
		counts->received++;
	return nic;
}

// Returns the value of a program at the attach point of clsact. The action of its filter redirects
// the frames: before Linux 6.4, an IFB device drops what bpf_redirect sends.
static __always_inline int filter_received(struct __sk_buff *skb, __u64 cookie, int reads_lists, int checks)
{
	struct nic *nic = arrive(skb);

	if (!nic || !classify_received(skb, nic, cookie, reads_lists, checks))
		return FILTER_NEXT;
	choose_queue(skb);
	return FILTER_ACT;
}

// Returns the value of a program that is attached by TCX (Linux 6.6), which redirects
// the frames itself. Programs after it see the frames of the node only.
static __always_inline int redirect_received(struct __sk_buff *skb, __u64 cookie, int reads_lists, int checks)
{
	struct nic *nic = arrive(skb);

	if (!nic || !classify_received(skb, nic, cookie, reads_lists, checks))
		return TC_ACT_UNSPEC;
	choose_queue(skb);
	return bpf_redirect(nic->ifb, 0);
}

// Does not know the cookie of a frame's sender.
SEC("tc")
int dra_shared_ingress_mac(struct __sk_buff *skb)
{
	return filter_received(skb, 0, 0, 1);
}

SEC("tc")
int dra_shared_ingress_mac_tcx(struct __sk_buff *skb)
{
	return redirect_received(skb, 0, 0, 1);
}

SEC("tc")
int dra_shared_ingress_helper(struct __sk_buff *skb)
{
	return filter_received(skb, skb->sk ? bpf_get_netns_cookie(skb) : 0, 0, 1);
}

SEC("tc")
int dra_shared_ingress_helper_tcx(struct __sk_buff *skb)
{
	return redirect_received(skb, skb->sk ? bpf_get_netns_cookie(skb) : 0, 0, 1);
}

// Know the cookie as dra_shared_ingress_helper does, and read lists of senders.
SEC("tc")
int dra_shared_ingress_helper_lists(struct __sk_buff *skb)
{
	return filter_received(skb, skb->sk ? bpf_get_netns_cookie(skb) : 0, 1, 1);
}

SEC("tc")
int dra_shared_ingress_helper_lists_tcx(struct __sk_buff *skb)
{
	return redirect_received(skb, skb->sk ? bpf_get_netns_cookie(skb) : 0, 1, 1);
}

SEC("tc")
int dra_shared_ingress_socket(struct __sk_buff *skb)
{
	return filter_received(skb, cookie_of_socket(skb), 1, 1);
}

SEC("tc")
int dra_shared_ingress_socket_tcx(struct __sk_buff *skb)
{
	return redirect_received(skb, cookie_of_socket(skb), 1, 1);
}

// Needs no cookie, because it checks no frame.
SEC("tc")
int dra_shared_ingress_unchecked(struct __sk_buff *skb)
{
	return filter_received(skb, 0, 0, 0);
}

SEC("tc")
int dra_shared_ingress_unchecked_tcx(struct __sk_buff *skb)
{
	return redirect_received(skb, 0, 0, 0);
}

char _license[] SEC("license") = "Dual MIT/GPL";
