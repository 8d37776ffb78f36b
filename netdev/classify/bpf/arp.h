// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// Records which namespace sends ARP. What the kernel sends for a namespace has a socket or a route, which lead to the
// namespace, except ARP: a bridge in a pod can send ARP with the addresses of another share. So a program runs in
// arp_xmit, the kernel function that all of its ARP passes through, and records the namespace. It costs nothing for
// other frames.

#pragma once

#include "content.h"
#include "kernel.h"

// The addresses in ARP: of the sender, and of the target.
struct arp_addresses {
	__u32 words[5];
};

struct arp_sender {
	__u64 cookie; // of the namespace
	struct arp_addresses addresses;
};

// The namespaces that have sent ARP, by the addresses of the kernel's structures of the frames. The
// kernel uses the memory of a frame for others later, and most ARP, such as that of the cluster network,
// reaches no managed NIC. So an entry can be that of an earlier frame: it counts only for a frame with the
// same addresses in its content.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct arp_sender);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_arp_senders SEC(".maps");

SEC("fentry/arp_xmit")
int BPF_PROG(dra_shared_arp_xmit, struct sk_buff *skb)
{
	__u64 key = (__u64)skb;
	struct arp_sender sender = {.cookie = skb->dev->nd_net.net->net_cookie};
	const unsigned char *arp = skb->head + skb->network_header;

	bpf_probe_read_kernel(&sender.addresses, sizeof(sender.addresses), arp + offsetof(struct arp, sender));
	bpf_map_update_elem(&dra_shared_arp_senders, &key, &sender, BPF_ANY);
	return 0;
}

// Returns the cookie of the namespace that has sent a frame of ARP; 0 if it is not known, such as
// that of a copy which a bridge makes for its second port. keep is set for frames with the NIC's address: a
// link on a VLAN and its NIC both see such a frame.
static __always_inline __u64 cookie_of_arp(struct __sk_buff *context, int keep)
{
	__u64 key = (__u64)kernel_frame(context), cookie;
	struct arp_sender *found = bpf_map_lookup_elem(&dra_shared_arp_senders, &key);
	struct arp_addresses addresses;

	if (!found || bpf_skb_load_bytes(context, ETH_HLEN + offsetof(struct arp, sender), &addresses, sizeof(addresses)))
		return 0;
	cookie = found->cookie;
	for (int i = 0; i < 5; i++)
		if (addresses.words[i] != found->addresses.words[i])
			cookie = 0;
	if (!keep)
		bpf_map_delete_elem(&dra_shared_arp_senders, &key);
	return cookie;
}
