// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// Which share a frame belongs to.
//
// Both programs sit at the parent NIC's clsact hooks and write skb->priority,
// which HTB takes for the class to queue in. Setting it here, on every frame,
// is also what keeps a pod from choosing its class with SO_PRIORITY: macvlan
// passes the sender's priority on to the parent.
//
// Frames go on to whatever other programs are attached (TC_ACT_UNSPEC).

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// The minor numbers of the classes that every NIC has; see package shape.
#define CLASS_HOST 2         // the node's own sockets
#define CLASS_CONTROL 3      // ARP and neighbour discovery without a socket; multicast from the wire
#define CLASS_UNIDENTIFIED 4 // everything that no share can be made answerable for

// A parent NIC.
struct nic {
	__u64 host_cookie;   // of the network namespace that the NIC is in
	__u32 ifb;           // index of the device that shapes what comes in
	__u32 major;         // of its HTB, in the upper 16 bits
	__u8 mac[ETH_ALEN];
	__u8 trust_mac;      // frames without a socket may select a share by MAC
	__u8 pad;
};

// Who sends: the network namespace of the sending socket and the source
// address. A cookie of 0 stands for "any", where the kernel cannot tell or
// the administrator trusts addresses.
struct sender {
	__u64 cookie;
	__u32 parent;
	__u8 mac[ETH_ALEN];
	__u8 pad[6]; // no hole: keys are compared byte by byte
};

// Who receives.
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

// Set before loading; a constant, so that the verifier never sees the helper
// on a kernel that lacks it (bpf_get_netns_cookie in tc programs: about 6.15).
const volatile __u8 has_cookie = 1;

static __always_inline int neighbour_discovery(struct __sk_buff *skb, const struct ethhdr *eth)
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
		// A pod can take the NIC's own address as well as a sibling's: the
		// host's class is no more protected here than another share's.
		if (same_mac(eth.h_source, nic->mac))
			class = nic->major | CLASS_HOST;
		else
			class = class_of_sender(parent, 0, eth.h_source);
	} else if (neighbour_discovery(skb, &eth)) {
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
		return TC_ACT_SHOT; // shorter than an address: nobody's
	if (same_mac(key.mac, nic->mac))
		return TC_ACT_UNSPEC; // the node's own
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
