// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// The identity of a frame: whether it carries the MAC address of its link and the
// addresses that the link has.

#pragma once

#include "content.h"
#include "hiding.h"
#include "policy.h"

// Reports whether a frame is ARP or neighbor discovery; see is_arp_or_nd.
static __always_inline int frame_is_arp_or_nd(struct __sk_buff *skb, const struct frame *frame)
{
	struct ethhdr eth = {.h_proto = frame->protocol};

	return is_arp_or_nd(skb, &eth);
}

// Checks ARP with the address of the NIC that has no socket. The kernel of a pod can send it, too, through
// a bridge that has this address, so it must not assign the address of a link or of a gateway to the NIC.
static __always_inline __u32 check_arp_of_node(struct __sk_buff *skb, const struct frame *frame)
{
	__u64 address[] = {frame->parent, 0, 0}, *holder;
	__u32 sender;

	if (frame->protocol != bpf_htons(ETH_P_ARP))
		return 0;
	if (bpf_skb_load_bytes(skb, ETH_HLEN + 14, &sender, sizeof(sender)))
		return REASON_ARP;
	address[2] = 0xffff0000ULL | (__u64)sender << 32;
	holder = bpf_map_lookup_elem(&dra_shared_addresses, address);
	return holder && *holder != frame->source ? REASON_ARP : 0;
}

// Checks a frame with a MAC address that no link has, and may set frame->class.
static __always_inline __u32 check_other(struct __sk_buff *skb, struct frame *frame)
{
	__u32 tenant = class_of_tenant(frame->parent, frame->cookie);
	__u64 key[] = {frame->parent | frame->source << 32, frame->source >> 32};
	__u32 *learned, reason;
	int rate;

	if (frame->own) {
		// The node sends it, or forwards it. Without a route of the node, a frame of
		// another namespace is one that a pod sends through its link. A pod may have
		// created that namespace, and it may not contain a link of a share. On a NIC
		// that forwards for the cluster network, it can also be a frame of the pod of a
		// share that the node forwards with its socket.
		if ((!tenant || frame->nic->forwarded) && (!frame->is_foreign || frame->routed))
			return frame->has_socket ? 0 : check_arp_of_node(skb, frame);
		frame->class = tenant;
		return REASON_MAC;
	}
	// Another link of the node has its address, or the NIC has it now and the plugin has not written it yet.
	if (frame->is_node_arp)
		return 0;
	if (frame->class & 0xffff && frame->has_socket)
		return 0; // a link that an earlier release attached
	if (class_of_receiver(frame->parent, frame->source))
		return frame->has_socket && frame->has_cookie ? REASON_MAC : 0;
	if (!is_allowed_mac(frame->parent, frame->source)) {
		frame->class = tenant;
		return REASON_MAC;
	}
	if (tenant) {
		frame->class = tenant;
		learned = bpf_map_lookup_elem(&dra_shared_learned, key);
		if (!learned || *learned != tenant)
			bpf_map_update_elem(&dra_shared_learned, key, &tenant, BPF_ANY);
	}
	reason = check_content(skb, frame);
	if (reason || !frame_is_arp_or_nd(skb, frame))
		return reason;
	rate = count_other(skb, frame, 1);
	if (rate == RATE_EXCESSIVE)
		return REASON_RATE;
	if (rate == RATE_HIGH && !tenant)
		frame->class = 0;
	return 0;
}

// Returns the reason to refuse a frame that leaves through a NIC; 0 if there is none.
static __always_inline __u32 check_sent(struct __sk_buff *skb, struct frame *frame)
{
	struct link *link = frame->link;
	__u32 class = frame->class, reason;
	int rate = RATE_LOW;

	if (!link)
		return check_other(skb, frame);
	frame->class = link->class; // for the counters
	if (link->flags & LINK_BLOCKED)
		return REASON_BLOCKED;
	if (frame->has_socket && frame->has_cookie && link->cookie != frame->cookie) {
		frame->link = 0; // another namespace uses the address
		frame->class = class_of_tenant(frame->parent, frame->cookie);
		return REASON_MAC;
	}
	if (!frame->has_socket && (skb->ingress_ifindex || (frame->is_unproven && frame->policy->forwarding))) {
		frame->forwards = 1;
		if (frame->is_unproven)
			frame->class = 0; // another pod may have sent it with the address of the link
		if (!frame->policy->forwarding && !frame->nic->trust_mac)
			return REASON_FORWARDED;
	} else if (frame->is_unproven && !frame->nic->trust_mac) {
		frame->class = class_of_tenant(frame->parent, frame->cookie);
		return REASON_MAC;
	}
	reason = check_content(skb, frame);
	// What another pod may have sent must not use up the rate of the link.
	if (!reason && frame_is_arp_or_nd(skb, frame))
		rate = frame->is_unproven ? count_other(skb, frame, 1) : count_neighbor(skb, link, frame->destination);
	if (rate == RATE_EXCESSIVE)
		reason = REASON_RATE;
	if (reason)
		return reason;
	if (rate == RATE_LOW)
		frame->class = class;
	else if (frame->forwards)
		frame->class = 0;
	return 0;
}

// Returns the reason to refuse a unicast frame that arrived for a link; 0 if there is
// none. frame->link is the receiver. It sets frame->charged, and frame->link to the
// link of charged.
static __always_inline __u32 check_received(struct __sk_buff *skb, struct frame *frame)
{
	__u64 key[] = {frame->parent | frame->destination << 32, frame->destination >> 32};
	struct link *receiver = frame->link, *sender;
	__u32 *learned, tenant;

	if (!frame->class) {
		learned = bpf_map_lookup_elem(&dra_shared_learned, key);
		if (learned)
			frame->class = *learned;
		else if (!is_allowed_mac(frame->parent, frame->destination))
			return REASON_RECEIVER;
	}
	frame->charged = frame->class;
	if (receiver && receiver->flags & LINK_BLOCKED)
		return REASON_BLOCKED;
	if (!frame->policy->autoconf && is_advertisement(skb, frame))
		return REASON_RA;
	sender = find_link(frame->parent, frame->source);
	if (!sender) {
		tenant = class_of_tenant(frame->parent, frame->cookie);
		if (!tenant || is_allowed_mac(frame->parent, frame->source))
			return 0;
		frame->charged = tenant;
		frame->link = 0;
		return REASON_MAC;
	}
	frame->charged = sender->class;
	frame->link = sender;
	if (sender->flags & LINK_BLOCKED)
		return REASON_BLOCKED;
	// The kernel switches frames between links that an earlier release attached. Other
	// links exchange frames through the hairpin.
	if (!receiver || !(sender->flags & receiver->flags & LINK_BRIDGE) ||
	    (sender->flags | receiver->flags) & LINK_VEPA)
		return REASON_ISOLATION;
	if (frame->cookie != sender->cookie && class_of_tenant(frame->parent, frame->cookie))
		return REASON_MAC;
	return hold_headers(skb, frame->protocol) ? REASON_PROTOCOL : check_content(skb, frame);
}

// Returns the reason to refuse a unicast frame that a link of the NIC has sent to another
// through the hairpin, which the NIC has checked when the link sent it.
static __always_inline __u32 check_returned(struct frame *frame)
{
	frame->charged = frame->class;
	return frame->link && frame->link->flags & LINK_BLOCKED ? REASON_BLOCKED : 0;
}
