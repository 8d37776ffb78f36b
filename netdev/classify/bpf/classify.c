// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// These programs assign the frames of a NIC to the HTB classes of shares.
//
// Both programs are attached to the clsact hooks of the NIC, and write the
// class of a frame to skb->priority, where HTB reads it. They write it to every
// frame, because macvlan passes the sender's priority to the NIC: a pod could
// otherwise choose its class with SO_PRIORITY.
//
// The programs return TC_ACT_UNSPEC, so that the kernel runs other programs at
// the hooks as well.

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// Minor numbers of the base classes, which every NIC has. Package shape uses
// the same numbers.
#define CLASS_HOST 2         // frames of sockets in the node's network namespace
#define CLASS_CONTROL 3      // ARP and neighbor discovery without a socket; multicast from the wire
#define CLASS_UNIDENTIFIED 4 // frames that cannot be assigned to a share

// A NIC.
struct nic {
	__u64 host_cookie;   // cookie of the network namespace that the NIC is in
	__u32 ifb;           // interface index of the device that shapes incoming frames
	__u32 major;         // major number of the classes, in the upper 16 bits
	__u8 mac[ETH_ALEN];
	__u8 trust_mac;      // if set, a frame without a socket selects a share by its source MAC
	__u8 pad;
};

// The key of a sender: the cookie of the sending socket's network namespace,
// the NIC, and the source MAC address. The cookie is 0 in entries for frames
// that the address alone identifies: on kernels without the helper for cookies,
// and for frames without a socket if the administrator trusts addresses.
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

// Whether the kernel has bpf_get_netns_cookie for tc programs (Linux 6.15 or
// newer). The loader sets it before loading. It is a constant, so the verifier
// removes the call of the helper on a kernel that lacks it.
const volatile __u8 has_cookie = 1;

// Reports whether a frame is ARP or IPv6 neighbor discovery (ICMPv6, next header
// 58, types 133 to 137).
static __always_inline int is_neighbor_discovery(struct __sk_buff *skb, const struct ethhdr *eth)
{
	__u8 next = 0, type = 0;

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

static __always_inline int same_mac(const __u8 *a, const __u8 *b)
{
	__u8 differ = 0;

	for (int i = 0; i < ETH_ALEN; i++)
		differ |= a[i] ^ b[i];
	return !differ;
}

// Returns the class of a sender, or 0 if no share has that sender.
static __always_inline __u32 class_of_sender(__u32 parent, __u64 cookie, const __u8 *mac)
{
	struct sender key = {.cookie = cookie, .parent = parent};
	__u32 *class;

	__builtin_memcpy(key.mac, mac, ETH_ALEN);
	class = bpf_map_lookup_elem(&dra_shared_tx, &key);
	return class ? *class : 0;
}

SEC("tc")
int dra_shared_egress(struct __sk_buff *skb)
{
	__u32 parent = skb->ifindex, class = 0;
	struct nic *nic = bpf_map_lookup_elem(&dra_shared_nics, &parent);
	struct ethhdr eth;

	if (!nic)
		return TC_ACT_UNSPEC;
	if (bpf_skb_load_bytes(skb, 0, &eth, sizeof(eth))) {
		skb->priority = nic->major | CLASS_UNIDENTIFIED;
		return TC_ACT_UNSPEC;
	}
	if (skb->sk && has_cookie) {
		__u64 cookie = bpf_get_netns_cookie(skb);

		if (cookie == nic->host_cookie)
			class = nic->major | CLASS_HOST;
		else
			class = class_of_sender(parent, cookie, eth.h_source);
	} else if (skb->sk) {
		// Without the cookie, a pod can use the class of the host with the
		// NIC's address, as it can use the class of another share with that
		// share's address.
		if (same_mac(eth.h_source, nic->mac))
			class = nic->major | CLASS_HOST;
		else
			class = class_of_sender(parent, 0, eth.h_source);
	} else if (is_neighbor_discovery(skb, &eth)) {
		class = nic->major | CLASS_CONTROL;
	} else if (nic->trust_mac) {
		class = class_of_sender(parent, 0, eth.h_source);
	}
	skb->priority = class ? class : nic->major | CLASS_UNIDENTIFIED;
	return TC_ACT_UNSPEC;
}

SEC("tc")
int dra_shared_ingress(struct __sk_buff *skb)
{
	__u32 parent = skb->ifindex, *class;
	struct nic *nic = bpf_map_lookup_elem(&dra_shared_nics, &parent);
	struct receiver key = {.parent = parent};

	if (!nic)
		return TC_ACT_UNSPEC;
	if (bpf_skb_load_bytes(skb, 0, key.mac, ETH_ALEN))
		return TC_ACT_SHOT; // too short to have a destination address
	if (same_mac(key.mac, nic->mac))
		return TC_ACT_UNSPEC; // for the node itself, which has no limit
	class = bpf_map_lookup_elem(&dra_shared_rx, &key);
	if (class)
		skb->priority = *class;
	else if (key.mac[0] & 1)
		skb->priority = nic->major | CLASS_CONTROL;
	else
		skb->priority = nic->major | CLASS_UNIDENTIFIED;
	return bpf_redirect(nic->ifb, 0);
}

char _license[] SEC("license") = "Dual MIT/GPL";
