// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// The kernel's structure of a frame, and of its route.

#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

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
