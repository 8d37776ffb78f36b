// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// Gives received frames a random source address if a link of a pod imitates their sender, or lists it in mode source.
// The kernel would otherwise deliver them to that link.

#pragma once

#include "kernel.h"
#include "policy.h"

// Replaces the source address of a received frame by a random one, so that no link in mode source
// recognizes the sender. A pod could list an address that is the same for all frames.
static __always_inline void hide_source(struct __sk_buff *skb)
{
	__u64 source = 0x02 | (__u64)bpf_get_prandom_u32() << 8; // unicast, locally administered

	bpf_skb_store_bytes(skb, ETH_ALEN, &source, ETH_ALEN, 0);
}

// Reports whether a pod has, or had, a link with the address of the host that sent a frame. The kernel
// takes the host's multicast and broadcast for that of the link, and delivers it to no other link, nor
// to the node.
static __always_inline int is_imitated(const struct frame *frame)
{
	__u64 key[] = {frame->parent | frame->source << 32, frame->source >> 32};

	return frame->destination & 1 && !frame->returned && bpf_map_lookup_elem(&dra_shared_imitated, key);
}

// The offsets in the kernel's structure of a NIC with macvlans (struct macvlan_port) of the NIC, and of the hash table
// of the senders that links in mode source list. The structure belongs to a module, so that the loader finds the
// offsets in its type information. 0 means that they are not known.
const volatile __u32 dra_shared_port_device = 0;
const volatile __u32 dra_shared_port_senders = 0;

// Returns the index of a sender in the hash table: macvlan_eth_hash() and hash_64() of the kernel, with 8 bits.
static __always_inline __u64 bucket_of(__u64 source)
{
	return ((source << 16) * 0x61C8864680B583EBULL) >> 56;
}

// Reports whether a link in mode source may list the sender of a frame: a sender with the same hash is listed. Such a
// link receives the frame, and with the flag nodst, no other link and not the node. It can be down, and in a network
// namespace that the node does not see.
static __always_inline int is_listed(struct __sk_buff *context, __u64 source)
{
	__u64 bucket = bucket_of(source), first = 0, device = 0;
	struct sk_buff *skb;
	void *port;

	if (!dra_shared_port_senders)
		return 0;
	if (bpf_cast_to_kern_ctx) {
		skb = bpf_cast_to_kern_ctx(context);
		port = skb->dev->rx_handler_data;
	} else {
		skb = kernel_frame(context);
		port = BPF_CORE_READ(skb, dev, rx_handler_data);
	}
	if (!port)
		return 0;
	bpf_probe_read_kernel(&first, sizeof(first), port + dra_shared_port_senders + bucket * sizeof(first));
	if (!first)
		return 0;
	// The pointer may belong to another receive handler of the NIC, such as a bridge's.
	bpf_probe_read_kernel(&device, sizeof(device), port + dra_shared_port_device);
	return device == (__u64)(bpf_cast_to_kern_ctx ? skb->dev : BPF_CORE_READ(skb, dev));
}

// How long a sender counts as listed, in ns.
#define LISTED_TIME (60 * SECOND)

// The time at which a sender was listed last on any NIC. The loader sets it to the current time, because the map can
// have entries of an earlier plugin.
__u64 dra_shared_last_listed = 0;

// Reports whether a time of bpf_ktime_get_ns is in the last minute. Another processor may have written it after this
// one has read the clock.
static __always_inline int is_recent(__u64 time, __u64 now)
{
	return (__s64)(now - time) <= (__s64)LISTED_TIME;
}

// Reports whether a link in mode source lists the sender of a frame, or has listed one with the same hash in the last
// minute. A link could otherwise list senders only while their frames wait in a queue: behind it, the kernel reads the
// list.
static __always_inline int was_listed(struct __sk_buff *skb, __u32 parent, __u64 source)
{
	__u64 key = bucket_of(source) | (__u64)parent << 32, now = bpf_ktime_get_ns();
	__u64 *last;

	if (!is_listed(skb, source)) {
		if (!is_recent(dra_shared_last_listed, now))
			return 0;
		last = bpf_map_lookup_elem(&dra_shared_listed, &key);
		return last && is_recent(*last, now);
	}
	dra_shared_last_listed = now;
	bpf_map_update_elem(&dra_shared_listed, &key, &now, BPF_ANY);
	return 1;
}
