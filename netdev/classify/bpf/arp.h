// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// The sender of ARP. What the kernel sends for a namespace has a socket or a route, which
// lead to the namespace, except ARP: a bridge in a pod can send ARP with the addresses of
// another share. So a program runs in arp_xmit, the function of the kernel that all of its ARP
// passes, and remembers the namespace. It costs nothing for other frames.

// The cookies of the namespaces that have sent ARP, by the addresses of the kernel's structures
// of the frames.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, __u64);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_arp SEC(".maps");

SEC("fentry/arp_xmit")
int BPF_PROG(dra_shared_arp_xmit, struct sk_buff *skb)
{
	__u64 key = (__u64)skb, cookie = skb->dev->nd_net.net->net_cookie;

	bpf_map_update_elem(&dra_shared_arp, &key, &cookie, BPF_ANY);
	return 0;
}

// Returns the cookie of the namespace that has sent a frame of ARP; 0 if it is not known, such as
// that of a copy which a bridge makes for its second port. The kernel uses the memory of a frame
// for others later, so an entry must not stay. Only those of frames with the NIC's address do: a
// link on a VLAN and its NIC both see such a frame.
static __always_inline __u64 cookie_of_arp(struct __sk_buff *context, int keep)
{
	__u64 key = (__u64)kernel_frame(context), *found, cookie;

	found = bpf_map_lookup_elem(&dra_shared_arp, &key);
	if (!found)
		return 0;
	cookie = *found;
	if (!keep)
		bpf_map_delete_elem(&dra_shared_arp, &key);
	return cookie;
}
