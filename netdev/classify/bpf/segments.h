// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// The segments into which the kernel or the NIC divides a packet.

#pragma once

#include "kernel.h"

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
