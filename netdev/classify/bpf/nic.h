// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// What the plugin writes about a NIC and its shares, and the classes of frames.

#pragma once

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_helpers.h>

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
// the numbers with those of the NIC, because programs that run earlier can take
// frames before these see them.
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

// Returns an address as a number, the first byte lowest.
static __always_inline __u64 number_of(const __u8 *mac)
{
	__u64 number = 0;

	for (int i = 0; i < ETH_ALEN; i++)
		number |= (__u64)mac[i] << (8 * i);
	return number;
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
