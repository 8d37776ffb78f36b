// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// The hairpin of a NIC switches frames between the links of shares that may reach each
// other. It is a pair of virtual Ethernet links on the node. What such a share sends,
// to the network or to another link, first passes the queues of the outer link, so that
// its grant limits the sum. The program at the inner link then returns the frame to the
// NIC: as one that arrived, if it is for another link, or as one that leaves.
//
// If the policy of the NIC lets links and the node reach each other, frames for the node return
// as ones that arrived, too, and the frames of the node for such links arrive with the mark.
//
// The links of these shares are macvlans in mode VEPA, with which the kernel switches no
// frames itself, so that the NIC checks the identity of all of them.

#pragma once

#include "policy.h"

// The key is the interface index of the NIC or of the inner link.
struct hairpin {
	__u32 peer;  // interface index of the outer link, or of the NIC
	__u32 inner; // interface index of the inner link
	// Random and not 0. In the entry of the NIC: the mark of frames that are in the hairpin or have
	// passed it. In that of the inner link: the priority of frames that have passed it and leave.
	__u32 mark;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 512);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct hairpin);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_hairpins SEC(".maps");

// Returns the hairpin of a NIC or of an inner link; 0 if there is none. The key is a whole word;
// see class_of_sender.
static __always_inline struct hairpin *find_hairpin(__u32 index)
{
	__u64 key = index;

	return bpf_map_lookup_elem(&dra_shared_hairpins, &key);
}

// Reports whether a frame that leaves through a NIC has passed its hairpin. To forge this, a pod
// would have to guess both the mark and the priority, and to forward frames from a link with the same
// interface index. It can try millions of values per second, so one word is not enough.
static __always_inline int has_passed_hairpin(struct __sk_buff *skb)
{
	struct hairpin *hairpin;

	if (!skb->mark)
		return 0;
	hairpin = find_hairpin(skb->ifindex);
	if (!hairpin || skb->mark != hairpin->mark || skb->ingress_ifindex != hairpin->inner)
		return 0;
	hairpin = find_hairpin(hairpin->inner);
	return hairpin && skb->priority == hairpin->mark;
}

// Sends a frame of a link that leaves through a NIC to the hairpin, and returns the verdict on
// it.
static __always_inline int enter_hairpin(struct __sk_buff *skb)
{
	struct hairpin *hairpin = find_hairpin(skb->ifindex);

	if (!hairpin)
		return TC_ACT_UNSPEC;
	skb->mark = hairpin->mark;
	// Volatile, because the verifier refuses to write a part of the priority.
	*(volatile __u32 *)&skb->priority = MAJOR << 16 | (skb->priority & 0xffff);
	return bpf_redirect(hairpin->peer, 0);
}

// Reports whether a frame that arrived at a NIC comes from the hairpin, and removes its mark.
// Neither the network nor a pod can forge this: a frame loses its mark when it moves from the
// namespace of a pod to that of the NIC.
static __always_inline int leave_hairpin(struct __sk_buff *skb)
{
	struct hairpin *hairpin;

	if (!skb->mark)
		return 0;
	hairpin = find_hairpin(skb->ifindex);
	if (!hairpin || skb->mark != hairpin->mark)
		return 0;
	skb->mark = 0;
	return 1;
}

// Lets the links of a NIC receive a frame of the node that leaves through it, and returns the
// verdict on it.
static __always_inline int reach_links(struct __sk_buff *skb, __u32 parent, __u64 destination)
{
	struct hairpin *hairpin;
	struct link *link;
	__u32 mark;

	if (!reaches_node(parent))
		return TC_ACT_UNSPEC;
	hairpin = find_hairpin(parent);
	if (!hairpin)
		return TC_ACT_UNSPEC; // no link may exchange frames
	if (destination & 1) {
		mark = skb->mark;
		skb->mark = hairpin->mark;
		bpf_clone_redirect(skb, parent, BPF_F_INGRESS);
		skb->mark = mark;
		return TC_ACT_UNSPEC;
	}
	link = find_link(parent, destination);
	if (!link || !(link->flags & LINK_BRIDGE))
		return TC_ACT_UNSPEC;
	skb->mark = hairpin->mark;
	return bpf_redirect(parent, BPF_F_INGRESS);
}

// Reports whether a frame in the hairpin of a NIC is for the node, and may reach it.
static __always_inline int is_for_node(__u32 parent, __u64 destination)
{
	struct nic *nic = bpf_map_lookup_elem(&dra_shared_nics, &parent);

	return nic && destination == number_of(nic->mac) && reaches_node(parent);
}

// Returns frames to the NIC; it is attached to the inner link.
SEC("tc")
int dra_shared_hairpin(struct __sk_buff *skb)
{
	struct hairpin *hairpin = find_hairpin(skb->ifindex), *nic;
	__u64 destination;
	struct ethhdr eth;
	struct link *link;

	if (!hairpin || bpf_skb_load_bytes(skb, 0, &eth, sizeof(eth)))
		return TC_ACT_SHOT;
	nic = find_hairpin(hairpin->peer);
	if (!nic || skb->mark != nic->mark)
		return TC_ACT_SHOT;
	skb->priority = hairpin->mark;
	destination = number_of(eth.h_dest);
	if (destination & 1) {
		bpf_clone_redirect(skb, hairpin->peer, BPF_F_INGRESS);
		return bpf_redirect(hairpin->peer, 0);
	}
	link = find_link(hairpin->peer, destination);
	if ((link && link->flags & LINK_BRIDGE) || is_for_node(hairpin->peer, destination))
		return bpf_redirect(hairpin->peer, BPF_F_INGRESS);
	return bpf_redirect(hairpin->peer, 0);
}
