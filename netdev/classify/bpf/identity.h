// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// The identity of a frame: whether it carries the MAC address of its link and the
// addresses that the link has. What a frame violates is a reason. A policy decides
// for each NIC whether frames with a reason are dropped or only counted.

// Reasons. Package classify has the same numbers.
#define REASON_MAC 1        // the source MAC address is not one of the sender's
#define REASON_ADDRESS 2    // the source IP address is not one of the link's
#define REASON_ARP 3        // ARP with an address that the link does not have
#define REASON_ND 4         // neighbor discovery with an address that the link does not have
#define REASON_RA 5         // a router advertisement
#define REASON_DHCP 6       // a message of a DHCP server
#define REASON_VLAN 7       // a VLAN tag
#define REASON_FORWARDED 8  // a frame that the pod forwards
#define REASON_RATE 9       // more ARP or neighbor discovery than a link may send
#define REASON_BLOCKED 10   // the link is blocked
#define REASON_PROTOCOL 11  // a protocol between switches or routers, or IP headers that hide the protocol
#define REASON_RECEIVER 12  // a unicast frame for an address that no link has
#define REASON_ISOLATION 13 // a frame between links that must not reach each other
#define REASON_MULTICAST 14 // a message that only a multicast router sends
#define REASONS 16          // a power of 2

// Protocols of tags that bridges and switches add (IEEE 802.1BR, Cisco), of which the kernel's headers have no name.
#define ETH_P_ETAG 0x893f
#define ETH_P_VNTAG 0x8926

#define DHCPV6_RELAY_FORWARD 12 // a type of message (RFC 8415)

// Values of policy.identity.
#define IDENTITY_OFF 0
#define IDENTITY_AUDIT 1
#define IDENTITY_ENFORCE 2

// The rules of a NIC.
struct policy {
	__u8 identity;
	__u8 forwarding; // whether pods may forward frames
	__u8 autoconf;   // whether links receive router advertisements
	__u8 subnets;    // whether a link without addresses may use those of dra_shared_subnets only
	__u8 guarded;    // whether received frames get the source address hidden
	// The programs do not use the first two bytes, in which the plugin keeps the length of its timer for guarded. The
	// others keep the size of the value: plugins of other releases open the same pinned map.
	__u8 unused[ETH_ALEN];
	__u8 vrrp;       // whether links may send VRRP
	__u8 reaches_node; // whether links with LINK_BRIDGE and the node reach each other
	__u8 traces_arp; // whether dra_shared_arp has the senders of ARP
	__u8 pad[2];
};

// Flags of a link.
#define LINK_AUDIT 1       // attached by a release that did not enforce identity
#define LINK_ANY_ADDRESS 2 // no address is recorded
#define LINK_BRIDGE 4      // may exchange frames with other such links of the NIC
#define LINK_BLOCKED 8     // may neither send nor receive
#define LINK_VEPA 16       // sends frames for other links out of the NIC too: see hairpin.h

// A link of a share.
struct link {
	__u64 cookie; // of the pod's network namespace
	__u32 class;  // major and minor number
	__u32 flags;
	__u32 address;       // an IPv4 address of the link as in a frame; 0 if it has none
	__u32 neighbors;     // how much ARP and neighbor discovery it sent since window; see add_neighbor
	__u64 window;        // time in ns
	__u64 address6[2];   // an IPv6 address of the link as in a frame; 0 if it has none
};

// The key of an address. IPv4 addresses are mapped to IPv6 (::ffff:0:0/96).
struct address {
	__u64 parent;
	__u8 bytes[16];
};

// The key of a network: prefixlen counts the 32 bits of parent too.
struct subnet {
	__u32 prefixlen;
	__u32 parent;
	__u8 bytes[16];
};

// Values of dra_shared_subnets.
#define SUBNET_ASSIGNED 1 // links without recorded addresses may use the addresses
#define SUBNET_ALL 2      // all links may

// The key of a MAC address or of a VLAN that all links may use.
struct allowed {
	__u32 parent;
	__u8 mac[ETH_ALEN];
	__u16 vlan; // ID; 0 for an address
	__u32 pad;
};

// The key of a namespace that has a link.
struct tenant {
	__u64 cookie;
	__u64 parent;
};

// Numbers of frames by reason: those that passed at [reason], dropped ones at [REASONS + reason].
struct refusals {
	__u64 frames[2 * REASONS];
	__u64 zero; // always 0; see refuse
};

// The key of refusals.
struct charged {
	__u32 parent;
	__u32 class; // major and minor number
};

// What limits ARP and neighbor discovery of senders other than links, by source address.
struct moderation {
	__u64 window; // time in ns
	__u32 frames; // since window; see add_neighbor
	__u32 pad;    // keeps the size of the value: plugins of other releases open the same pinned map
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct policy);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_policies SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct receiver);
	__type(value, struct link);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_links SEC(".maps");

// The MAC address of the link or of the NIC that has an address, as a number.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct address);
	__type(value, __u64);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_addresses SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct subnet);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_subnets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct allowed);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_allowed SEC(".maps");

// The class of a link in a namespace.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tenant);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_tenants SEC(".maps");

// The class of the share that last sent with an allowed MAC address.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct receiver);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_learned SEC(".maps");

// The addresses of links that no share has; see is_imitated. The value is not used.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct receiver);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_imitated SEC(".maps");

// The time at which a sender with a hash was listed last; see was_listed. The key has the hash in the lower 32 bits, and
// the interface index of the NIC.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, __u64);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_listed SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct receiver);
	__type(value, struct moderation);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_moderation SEC(".maps");

// The MAC address, as a number, of the last host on the network that has used an address of a link.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct address);
	__type(value, __u64);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_conflicts SEC(".maps");

// The refused frames of a class. All CPUs use the same numbers: they change rarely, and one set of numbers for each CPU
// would take 34 KB of kernel memory for each share of a node with 128 CPUs.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct charged);
	__type(value, struct refusals);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dra_shared_refused SEC(".maps");

// Reports whether links with LINK_BRIDGE and the node reach each other through a NIC.
static __always_inline int reaches_node(__u32 parent)
{
	struct policy *policy = bpf_map_lookup_elem(&dra_shared_policies, &parent);

	return policy && policy->reaches_node;
}

// What the programs know of a frame.
struct frame {
	struct nic *nic;
	struct policy *policy;
	struct link *link; // of the sender, or of the receiver for a frame that arrived
	__u64 cookie;
	__u64 source;
	__u64 destination;
	__u32 parent;
	__u32 class;    // 0 if the frame has none
	__u32 charged;  // the class that refusals are counted for
	__u32 protocol; // as in the frame
	int own;        // whether the source is the NIC's
	int has_socket; // of a pod, or of the node
	int has_cookie;
	int is_unproven;// whether a frame without a socket may come from another namespace than the link's
	int returned;   // whether the frame arrived from the hairpin of the NIC
	int forwards;   // whether the pod forwards or bridges it, so that its IP addresses are not the link's
	int is_foreign; // whether another namespace than the node's may have sent it
	int is_node_arp;// whether it is ARP that the kernel of the node has made
	int routed;     // whether the node has routed it, or that is not known
};

// A key is an array of whole words; see class_of_sender.

static __always_inline struct link *find_link(__u32 parent, __u64 mac)
{
	__u64 key[] = {parent | mac << 32, mac >> 32};

	return bpf_map_lookup_elem(&dra_shared_links, key);
}

static __always_inline int is_allowed_mac(__u32 parent, __u64 mac)
{
	__u64 key[] = {parent | mac << 32, mac >> 32};

	_Static_assert(sizeof(key) == sizeof(struct allowed), "the key has padding");
	return bpf_map_lookup_elem(&dra_shared_allowed, key) != 0;
}

static __always_inline int is_allowed_vlan(__u32 parent, __u16 vlan)
{
	__u64 key[] = {parent, (__u64)vlan << 16};

	return vlan && bpf_map_lookup_elem(&dra_shared_allowed, key) != 0;
}

static __always_inline __u32 class_of_tenant(__u32 parent, __u64 cookie)
{
	__u64 key[] = {cookie, parent};
	__u32 *class;

	if (!cookie)
		return 0;
	class = bpf_map_lookup_elem(&dra_shared_tenants, key);
	return class ? *class : 0;
}

// Counts a frame with a reason for the class frame->class, or as unidentified if that is none of a
// share, and reports whether it must be dropped.
static __always_inline int refuse(const struct frame *frame, __u32 reason)
{
	__u32 class = (frame->class & 0xffff) >= CLASS_SHARE ? frame->class : frame->nic->major | CLASS_UNIDENTIFIED;
	__u64 key = frame->parent | (__u64)class << 32;
	struct refusals *refusals = bpf_map_lookup_elem(&dra_shared_refused, &key);
	int drop = frame->policy->identity == IDENTITY_ENFORCE && !(frame->link && frame->link->flags & LINK_AUDIT);

	if (refusals) {
		// Without CAP_PERFMON, the verifier refuses an index whose bounds depend on the path. It does not
		// know what the program reads from a map, so that the mask sets the bounds on every path.
		__u64 index = (reason + (drop ? REASONS : 0) + refusals->zero) & (2 * REASONS - 1);

		__sync_fetch_and_add(&refusals->frames[index], 1);
	}
	return drop;
}

// Reports whether the frame's socket is one with which the kernel replies for all
// namespaces: of the type raw, and of the protocol ICMP, TCP, or ICMPv6. While a queue
// of a pod delays a reply, its socket returns to the initial namespace.
static __always_inline int is_reply(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;

	if (!sk)
		return 0;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->type != 3 || (sk->family != 2 && sk->family != 10)) // SOCK_RAW, AF_INET, AF_INET6
		return 0;
	return sk->protocol == 1 || sk->protocol == 6 || sk->protocol == 58;
}

// How much ARP and neighbor discovery a sender may send in a second.
#define NEIGHBORS_PER_SECOND 100   // in CLASS_CONTROL
#define BROADCASTS_PER_SECOND 1000 // multicast and broadcast, in any class
#define NEWCOMERS_PER_SECOND 20    // senders that a NIC gets to know
#define SECOND 1000000000ULL

// What the rate of a sender means for a frame of ARP or neighbor discovery.
#define RATE_LOW 0       // the frame may use CLASS_CONTROL
#define RATE_HIGH 1      // the frame uses the class of its sender
#define RATE_EXCESSIVE 2 // the frame is multicast or broadcast, and refused

// Adds a frame to the counts of a second: of all frames in the lower 16 bits, and of multicast
// and broadcast in the upper. A sender cannot choose how often it has to answer, so answers do not
// count as broadcast.
static __always_inline __u32 add_neighbor(__u32 *counts, __u64 destination)
{
	__u32 before = *counts, added = 0;

	if ((before & 0xffff) <= NEIGHBORS_PER_SECOND)
		added = 1;
	if (destination & 1 && before >> 16 <= BROADCASTS_PER_SECOND)
		added += 1 << 16;
	if (added)
		__sync_fetch_and_add(counts, added); // a sender may use several CPUs
	return before + added;
}

static __always_inline int rate_of(__u32 counts, __u64 destination)
{
	if (destination & 1 && counts >> 16 > BROADCASTS_PER_SECOND)
		return RATE_EXCESSIVE;
	return (counts & 0xffff) > NEIGHBORS_PER_SECOND ? RATE_HIGH : RATE_LOW;
}

// No message of ARP or neighbor discovery needs to be longer, so that longer ones may not use CLASS_CONTROL.
#define NEIGHBOR_LENGTH 128

// Counts ARP or neighbor discovery of a link, and returns its rate.
static __always_inline int count_neighbor(struct __sk_buff *skb, struct link *link, __u64 destination)
{
	__u64 now = bpf_ktime_get_ns();
	int rate;

	if (now - link->window > SECOND) {
		link->window = now;
		link->neighbors = 0;
	}
	rate = rate_of(add_neighbor(&link->neighbors, destination), destination);
	return skb->len > NEIGHBOR_LENGTH && rate == RATE_LOW ? RATE_HIGH : rate;
}

// Reports whether the rate of ARP and neighbor discovery of a link was high at its last frame.
static __always_inline int has_high_rate(const struct link *link)
{
	return rate_of(link->neighbors, 0) != RATE_LOW;
}

// Reports whether a NIC may get to know a sender of ARP and neighbor discovery. A host can use another
// address in each frame. Its frames must not fill CLASS_CONTROL, nor the map of the senders that are
// known. Their number is counted with a key that no address has.
static __always_inline int may_be_known(__u32 parent)
{
	__u64 key[] = {parent, 1ULL << 16};
	struct moderation *m = bpf_map_lookup_elem(&dra_shared_moderation, key), first = {};
	__u64 now = bpf_ktime_get_ns();

	if (!m || now - m->window > SECOND) {
		first.window = now;
		first.frames = 1;
		bpf_map_update_elem(&dra_shared_moderation, key, &first, BPF_ANY);
		return 1;
	}
	__sync_fetch_and_add(&m->frames, 1);
	return m->frames <= NEWCOMERS_PER_SECOND;
}

// Counts ARP or neighbor discovery of a source address that no link has, and returns its rate.
// is_allowed is set if the network allows the address for all links.
static __always_inline int count_other(struct __sk_buff *skb, const struct frame *frame, int is_allowed)
{
	__u64 key[] = {frame->parent | frame->source << 32, frame->source >> 32};
	struct moderation *m = bpf_map_lookup_elem(&dra_shared_moderation, key), first = {};
	__u64 now = bpf_ktime_get_ns();
	int rate = RATE_LOW;

	if (!m && !is_allowed && !may_be_known(frame->parent))
		return RATE_HIGH;
	if (!m || now - m->window > SECOND) {
		first.window = now;
		first.frames = 1 | (frame->destination & 1) << 16;
		bpf_map_update_elem(&dra_shared_moderation, key, &first, BPF_ANY);
	} else {
		rate = rate_of(add_neighbor(&m->frames, frame->destination), frame->destination);
	}
	return skb->len > NEIGHBOR_LENGTH && rate == RATE_LOW ? RATE_HIGH : rate;
}

// Counts ARP or neighbor discovery that leaves through a NIC, and returns its rate.
static __always_inline int count_sent(struct __sk_buff *skb, const struct frame *frame)
{
	return frame->link ? count_neighbor(skb, frame->link, frame->destination) : count_other(skb, frame, 0);
}

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
	// The data can be those of another handler of the NIC, such as a bridge.
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

// Reports whether an address is in fe80::/10. high is the first half of the address as in a frame.
static __always_inline int is_in_link_local_network(__u64 high)
{
	return (high & 0xc0ff) == 0x80fe;
}

// Reports whether a link may send from an address that is not in struct link. Each link has
// an IPv6 link-local address of its own, so it may use another one only if the network allows
// that address.
static __always_inline int may_use(const struct frame *frame, __u64 high, __u64 low)
{
	__u64 address[] = {frame->parent, high, low};
	__u64 *holder = bpf_map_lookup_elem(&dra_shared_addresses, address);
	int any = !frame->link || frame->link->flags & LINK_ANY_ADDRESS;
	struct link *link;
	__u32 *subnet;

	if (holder && *holder == frame->source)
		return 1;
	if (holder && frame->link)
		return 0;
	if (holder) { // a link of the pod has it, and the pod sends with a further MAC address that the network allows
		link = find_link(frame->parent, *holder);
		return link && frame->cookie && link->cookie == frame->cookie && !(link->flags & LINK_BLOCKED);
	}
	if (frame->forwards)
		return 1;
	if (any && !frame->policy->subnets && frame->link && !is_in_link_local_network(high))
		return 1;
	address[0] = (32 + 128) | (__u64)frame->parent << 32;
	subnet = bpf_map_lookup_elem(&dra_shared_subnets, address);
	return subnet && (any || *subnet == SUBNET_ALL);
}

// address is an IPv4 address as in a frame.
static __always_inline int may_use4(const struct frame *frame, __u32 address)
{
	if (frame->link && frame->link->address && frame->link->address == address)
		return 1;
	return may_use(frame, 0, 0xffff0000ULL | (__u64)address << 32);
}

// Reports whether the second half of an address results from the source MAC address (EUI-64).
static __always_inline int is_eui64_of_source(const struct frame *frame, __u64 low)
{
	__u64 mac = frame->source;

	return low == ((mac & 0xffffff) ^ 0x02) + (0xfeffULL << 24) + ((mac & 0xffffff000000ULL) << 16);
}

// Reports whether a link may have made an address from its MAC address: the link-local one, and,
// where links receive router advertisements, those in the networks of routers (RFC 4862), unless
// another link has the address. Which networks these are does not matter: no other host has the
// second half.
static __always_inline int is_autoconfigured(const struct frame *frame, __u64 high, __u64 low)
{
	__u64 address[] = {frame->parent, high, low};
	__u64 *holder;

	if (!is_eui64_of_source(frame, low))
		return 0;
	if (high == 0x80fe)
		return 1;
	if (!frame->policy->autoconf || !frame->link || (high & 0xff) == 0xff) // multicast
		return 0;
	holder = bpf_map_lookup_elem(&dra_shared_addresses, address);
	return !holder || *holder == frame->source;
}

static __always_inline int may_use6(const struct frame *frame, const __u64 *address)
{
	__u64 high = address[0], low = address[1];

	if (frame->link && (high | low) && frame->link->address6[0] == high && frame->link->address6[1] == low)
		return 1;
	return is_autoconfigured(frame, high, low) || may_use(frame, high, low);
}

// Reports whether the protocol of a frame denotes a VLAN tag.
static __always_inline int is_tag(__u16 protocol)
{
	return protocol == bpf_htons(ETH_P_8021Q) || protocol == bpf_htons(ETH_P_8021AD) ||
	       protocol == bpf_htons(ETH_P_QINQ1) || protocol == bpf_htons(ETH_P_QINQ2) ||
	       protocol == bpf_htons(ETH_P_QINQ3);
}

// An ARP frame for IPv4 on Ethernet (RFC 826).
struct arp {
	__u32 types;   // of the hardware and of the protocol
	__u16 lengths; // of their addresses
	__u16 operation;
	__u8 sender[ETH_ALEN];
	__u8 sender_address[4];
	__u8 target[ETH_ALEN];
	__u8 target_address[4];
};

static __always_inline __u32 check_arp(struct __sk_buff *skb, const struct frame *frame, int offset)
{
	__u64 words[4] = {}; // the frame has 28 bytes
	__u64 sender;
	__u32 address;

	// A sender without an address asks whether another host has the target (RFC 5227), which claims it.
	if (bpf_skb_load_bytes(skb, offset, words, sizeof(struct arp)))
		return REASON_ARP;
	if ((words[0] & 0xffffffffffffULL) != 0x040600080100ULL)
		return REASON_ARP;
	sender = words[1] & 0xffffffffffffULL;
	address = words[1] >> 48 | (words[2] & 0xffff) << 16;
	if (sender != frame->source)
		return REASON_ARP;
	if (!address)
		address = words[3];
	return may_use4(frame, address) ? 0 : REASON_ARP;
}

// Checks whether a link may send multicast or broadcast to the UDP ports of routers: RIP (520, and 521 for
// IPv6), HSRP (1985, and 2029 for IPv6), GLBP (3222).
static __always_inline __u32 check_router_port(const struct frame *frame, __u32 port)
{
	if (!(frame->destination & 1))
		return 0;
	if ((port == bpf_htons(520) || port == bpf_htons(521)) && !frame->policy->forwarding)
		return REASON_PROTOCOL;
	if ((port == bpf_htons(1985) || port == bpf_htons(2029) || port == bpf_htons(3222)) && !frame->policy->vrrp)
		return REASON_PROTOCOL;
	return 0;
}

// How far dra_shared_find_upper and dra_shared_check_options read.
#define ALL_HEADERS 2112

// Makes the kernel copy the first bytes of a frame, so that what the program checks is what leaves the NIC. A frame can
// have bytes in memory that the sender maps, and can change while the frame waits in a queue: in the ring of a packet
// socket, or in a payload that the kernel does not copy, of which a filter in the pod has removed the headers.
static __always_inline int hold(struct __sk_buff *skb, __u32 length)
{
	return bpf_skb_pull_data(skb, length < skb->len ? length : skb->len);
}

// Calls hold unless the kernel has copied the bytes before, as it does with the headers that it makes itself.
static __always_inline int hold_first(struct __sk_buff *skb, __u32 length)
{
	if ((void *)(long)skb->data + length <= (void *)(long)skb->data_end)
		return 0;
	return hold(skb, length);
}

// Calls hold for the bytes that the programs read of most frames of a protocol: the Ethernet header, the IP header, and
// 8 bytes of the upper layer.
static __always_inline int hold_headers(struct __sk_buff *skb, __u16 protocol)
{
	if (protocol == bpf_htons(ETH_P_IP))
		return hold_first(skb, ETH_HLEN + 20 + 8);
	return hold_first(skb, ETH_HLEN + 40 + 8);
}

// Checks the ports of a UDP packet for IPv4, and in a message of a DHCP client (RFC 2131) its MAC address
// (chaddr), the address that it has, such as one that it releases (ciaddr), and that no relay has forwarded
// it (giaddr). offset is the offset of the UDP header. A fragment can show other addresses than the message has.
static __always_inline __u32 check_dhcp(struct __sk_buff *skb, const struct frame *frame, int offset, int is_fragment)
{
	__u64 mac = 0;
	__u32 ports, address, types, relay;

	if (bpf_skb_load_bytes(skb, offset, &ports, sizeof(ports)))
		return REASON_DHCP; // a header that does not fit hides the ports
	if ((ports & 0xffff) == bpf_htons(67) || ports >> 16 == bpf_htons(68))
		return REASON_DHCP;
	if (ports >> 16 != bpf_htons(67))
		return check_router_port(frame, ports >> 16);
	// The kernel divides a packet into messages of which the program sees the first.
	if (is_fragment || skb->gso_size || hold(skb, offset + 8 + 28 + ETH_ALEN) ||
	    bpf_skb_load_bytes(skb, offset + 8, &types, sizeof(types)) ||
	    bpf_skb_load_bytes(skb, offset + 8 + 12, &address, sizeof(address)) ||
	    bpf_skb_load_bytes(skb, offset + 8 + 24, &relay, sizeof(relay)) ||
	    bpf_skb_load_bytes(skb, offset + 8 + 28, &mac, ETH_ALEN))
		return REASON_DHCP;
	if (types != 0x00060101 || relay) // a request with an Ethernet address, and no hops
		return REASON_DHCP;
	if (mac != frame->source)
		return REASON_MAC;
	return !address || may_use4(frame, address) ? 0 : REASON_ADDRESS;
}

// Reports whether a message of IGMP is one of a router: a query (0x11), DVMRP (0x13), PIM version 1
// (0x14), or an advertisement of a multicast router (0x30, RFC 4286).
static __always_inline int is_igmp_of_router(__u32 type)
{
	return type == 0x11 || type == 0x13 || type == 0x14 || type == 0x30;
}

// Reports whether a message of ICMPv6 is one of a multicast router: a query of MLD (130), or an
// advertisement of a multicast router (151, RFC 4286).
static __always_inline int is_mld_of_router(__u32 type)
{
	return type == 130 || type == 151;
}

// Checks whether a link may send a protocol of routers: VRRP (112), PIM (103), EIGRP (88), OSPF (89).
static __always_inline __u32 check_protocol(const struct frame *frame, __u32 protocol)
{
	if (protocol == 112 && !frame->policy->vrrp)
		return REASON_PROTOCOL;
	if ((protocol == 88 || protocol == 89) && !frame->policy->forwarding)
		return REASON_PROTOCOL;
	return protocol == 103 ? REASON_MULTICAST : 0;
}

static __always_inline __u32 check_ipv4(struct __sk_buff *skb, const struct frame *frame)
{
	__u64 words[2];
	__u32 source, header, protocol, fragment, reason;
	__u8 type;

	// The first 16 bytes of the header: the source is at 12.
	if (bpf_skb_load_bytes(skb, ETH_HLEN, words, sizeof(words)))
		return REASON_PROTOCOL;
	source = words[1] >> 32;
	header = (words[0] & 0xf) * 4;
	fragment = ((words[0] >> 48 & 0x1f) << 8) | words[0] >> 56;
	protocol = words[1] >> 8 & 0xff;
	if (header < 20 || (header > 20 && hold(skb, ETH_HLEN + header + 8)))
		return REASON_PROTOCOL;
	if (protocol == 17) {
		reason = fragment ? 0 : check_dhcp(skb, frame, ETH_HLEN + header, words[0] >> 48 & 0x20);
		if (reason)
			return reason;
	} else if ((protocol == 2 || protocol == 1) && !fragment) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + header, &type, 1))
			return REASON_PROTOCOL;
		if (protocol == 1 && type == 9) // an advertisement of a router (RFC 1256)
			return REASON_RA;
		if (protocol == 2 && is_igmp_of_router(type))
			return REASON_MULTICAST;
	} else if (protocol != 6) {
		reason = check_protocol(frame, protocol);
		if (reason)
			return reason;
	}
	return !source || frame->forwards || may_use4(frame, source) ? 0 : REASON_ADDRESS;
}

// Where an IPv6 packet has its upper layer.
struct upper {
	__u32 protocol;
	__u32 offset;
	__u32 flags;
};

#define UPPER_EXTENDED 1 // extension headers precede it
#define UPPER_REST 2     // it is in an earlier fragment
#define UPPER_HIDDEN 4   // there are too many headers, or the protocol belongs to a header behind the packet

#define EXTENSIONS 6 // headers before the upper layer

// Reports whether a header is an extension header: hop-by-hop options, routing,
// fragment, authentication, or destination options.
static __always_inline int is_extension(__u32 next)
{
	return next == 0 || next == 43 || next == 44 || next == 51 || next == 60;
}

// Returns the fields of struct upper in bits 0, 8, and 32. The verifier checks a
// global function by itself, and not again for each way to its call.
__noinline __u64 dra_shared_find_upper(struct __sk_buff *skb, __u32 next)
{
	__u32 offset = ETH_HLEN + 40, flags = 0, end;
	__u16 length = 0;
	__u64 head;

	for (int i = 0; i < EXTENSIONS && is_extension(next); i++) {
		flags |= UPPER_EXTENDED;
		if (offset > 2048 || bpf_skb_load_bytes(skb, offset, &head, sizeof(head))) {
			flags |= UPPER_HIDDEN;
			break;
		}
		if (next == 44 && (head >> 16 & 0xff || head >> 24 & 0xf8)) {
			next = head & 0xff;
			flags |= UPPER_REST;
			break;
		}
		if (next == 44)
			offset += 8;
		else if (next == 51)
			offset += ((head >> 8 & 0xff) + 2) * 4;
		else
			offset += ((head >> 8 & 0xff) + 1) * 8;
		next = head & 0xff;
	}
	if ((!(flags & UPPER_REST) && is_extension(next)) || offset > ALL_HEADERS - 8)
		flags |= UPPER_HIDDEN;
	// In a first fragment, the header can start in the next one, and what follows in this frame is not part
	// of the packet (RFC 7112). A packet that the kernel has not divided yet can have the length 0.
	bpf_skb_load_bytes(skb, ETH_HLEN + 4, &length, sizeof(length));
	end = ETH_HLEN + 40 + bpf_ntohs(length);
	if (length && (offset > end || ((next == 17 || next == 58) && !(flags & UPPER_REST) && offset + 4 > end)))
		flags |= UPPER_HIDDEN;
	return (next & 0xff) | flags << 8 | (__u64)offset << 32;
}

static __always_inline struct upper find_upper(struct __sk_buff *skb, __u32 next)
{
	struct upper upper = {.protocol = next, .offset = ETH_HLEN + 40};
	__u64 found;

	if (is_extension(next)) {
		found = dra_shared_find_upper(skb, next);
		upper.protocol = found & 0xff;
		upper.flags = found >> 8 & 0xff;
		upper.offset = found >> 32;
	}
	return upper;
}

#define ND_ROUTER_SOLICITATION 133
#define ND_ROUTER_ADVERTISEMENT 134
#define ND_NEIGHBOR_SOLICITATION 135
#define ND_NEIGHBOR_ADVERTISEMENT 136
#define ND_REDIRECT 137
#define ND_OPTIONS 5 // in one frame

// Reports whether a link may send a message of neighbor discovery about an address.
// A solicitation asks for the address of another link, unless it has no source
// address: then the sender finds out whether another link has the address.
static __always_inline int may_use_target(struct __sk_buff *skb, const struct frame *frame, __u32 type,
					  const __u64 *target)
{
	__u64 source[2];

	if (type == ND_NEIGHBOR_SOLICITATION) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 8, source, sizeof(source)))
			return 0;
		if (source[0] | source[1])
			return 1;
	}
	return may_use6(frame, target);
}

// Checks the options of a message of neighbor discovery, which start at offset: a
// link-layer address, of the source (1) or of the target (2), must be mac. Returns a
// reason, or 0. It is global for the reason that dra_shared_find_upper is.
__noinline __u32 dra_shared_check_options(struct __sk_buff *skb, __u32 offset, __u64 mac)
{
	__u64 option;
	__u32 kind;

	for (int i = 0; i < ND_OPTIONS; i++) {
		if (offset > 2048)
			return REASON_ND;
		if (bpf_skb_load_bytes(skb, offset, &option, sizeof(option)))
			return 0; // there is no further option
		kind = option & 0xff;
		if (((kind == 1 || kind == 2) && option >> 16 != mac) || !(option >> 8 & 0xff))
			return REASON_ND;
		offset += (option >> 8 & 0xff) * 8;
	}
	return REASON_ND; // too many options
}

// Checks a message of neighbor discovery (RFC 4861). The message follows the IPv6
// header at once.
static __always_inline __u32 check_nd(struct __sk_buff *skb, const struct frame *frame, __u32 type)
{
	__u32 offset = ETH_HLEN + 40 + 8;
	__u64 words[2];

	if (type == ND_ROUTER_ADVERTISEMENT)
		return REASON_RA;
	if (type == ND_REDIRECT)
		return REASON_ND;
	// A solicitation assigns its source address to the MAC address in its option. Of other frames that a
	// pod forwards, the source is not checked.
	if (frame->forwards) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 8, words, sizeof(words)))
			return REASON_ND;
		if ((words[0] | words[1]) && !may_use6(frame, words))
			return REASON_ND;
	}
	if (type != ND_ROUTER_SOLICITATION) {
		if (bpf_skb_load_bytes(skb, offset, words, sizeof(words)) || !may_use_target(skb, frame, type, words))
			return REASON_ND;
		offset += 16;
	}
	return dra_shared_check_options(skb, offset, frame->source);
}

static __always_inline __u32 check_ipv6(struct __sk_buff *skb, const struct frame *frame)
{
	__u64 source[2];
	struct upper upper;
	__u8 next, type;
	__u32 reason, ports;

	if (bpf_skb_load_bytes(skb, ETH_HLEN + 6, &next, 1) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN + 8, source, sizeof(source)))
		return REASON_PROTOCOL;
	if ((source[0] | source[1]) && !frame->forwards && !may_use6(frame, source))
		return REASON_ADDRESS;
	if ((is_extension(next) || next == 58) && hold(skb, ALL_HEADERS))
		return REASON_PROTOCOL;
	upper = find_upper(skb, next);
	if (upper.flags & UPPER_HIDDEN)
		return REASON_PROTOCOL;
	reason = check_protocol(frame, upper.protocol);
	if (reason)
		return reason;
	if (upper.flags & UPPER_REST)
		return 0;
	if (upper.protocol == 17) {
		if (bpf_skb_load_bytes(skb, upper.offset, &ports, sizeof(ports)))
			return REASON_DHCP; // a header that does not fit hides the ports
		if ((ports & 0xffff) == bpf_htons(547) || ports >> 16 == bpf_htons(546))
			return REASON_DHCP;
		if (ports >> 16 == bpf_htons(547) &&
		    (skb->gso_size || hold(skb, upper.offset + 9) || bpf_skb_load_bytes(skb, upper.offset + 8, &type, 1) ||
		     type == DHCPV6_RELAY_FORWARD))
			return REASON_DHCP;
		return check_router_port(frame, ports >> 16);
	}
	if (upper.protocol != 58)
		return 0;
	if (bpf_skb_load_bytes(skb, upper.offset, &type, 1))
		return REASON_PROTOCOL;
	if (is_mld_of_router(type))
		return REASON_MULTICAST;
	if (type < ND_ROUTER_SOLICITATION || type > ND_REDIRECT)
		return 0;
	if (upper.flags & UPPER_EXTENDED)
		return type == ND_ROUTER_ADVERTISEMENT ? REASON_RA : REASON_ND;
	return check_nd(skb, frame, type);
}

// Reports whether a frame is a router advertisement, or hides behind its headers whether it is one. The kernel
// removes the first tag of a frame before the program sees it, and further ones with VLAN 0 in the pod.
static __always_inline int is_advertisement(struct __sk_buff *skb, const struct frame *frame)
{
	struct upper upper;
	__u8 next, type;
	__u16 vlan;

	if (is_tag(frame->protocol))
		return bpf_skb_load_bytes(skb, ETH_HLEN, &vlan, sizeof(vlan)) || !(bpf_ntohs(vlan) & 0xfff);
	if (frame->protocol != bpf_htons(ETH_P_IPV6) || bpf_skb_load_bytes(skb, ETH_HLEN + 6, &next, 1))
		return 0;
	upper = find_upper(skb, next);
	if (upper.flags & UPPER_HIDDEN)
		return 1;
	return upper.protocol == 58 && !(upper.flags & UPPER_REST) &&
	       !bpf_skb_load_bytes(skb, upper.offset, &type, 1) && type == ND_ROUTER_ADVERTISEMENT;
}

// Remembers if the sender of ARP or neighbor discovery that arrived uses the address of a link. Hosts
// that ask whether an address is in use have no address yet.
static __always_inline void note_conflict(struct __sk_buff *skb, const struct frame *frame)
{
	__u64 address[] = {frame->parent, 0, 0}, words[2];
	__u64 *holder, *noted, source = frame->source;
	__u32 offset = ETH_HLEN + 8; // of the source address in IPv6
	__u8 type;

	if (frame->protocol == bpf_htons(ETH_P_ARP)) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 8, words, sizeof(words)))
			return;
		source = words[0] & 0xffffffffffffULL;
		address[2] = 0xffff0000ULL | (words[0] >> 48 | (words[1] & 0xffff) << 16) << 32;
	} else {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 40, &type, 1))
			return;
		if (type == ND_NEIGHBOR_ADVERTISEMENT)
			offset = ETH_HLEN + 40 + 8; // of the target
		if (bpf_skb_load_bytes(skb, offset, &address[1], 16))
			return;
	}
	holder = bpf_map_lookup_elem(&dra_shared_addresses, address);
	// 0 holds the addresses of gateways.
	if (!holder || !*holder || *holder == source || *holder == number_of(frame->nic->mac))
		return;
	noted = bpf_map_lookup_elem(&dra_shared_conflicts, address);
	if (!noted || *noted != source)
		bpf_map_update_elem(&dra_shared_conflicts, address, &source, BPF_ANY);
}

// Reports whether a frame in the format of IEEE 802.3 carries another protocol of Ethernet (SNAP, RFC 1042, and
// IEEE 802.1H). Linux does not receive it, but Windows, some switches, and bridges to Wi-Fi take it for that protocol.
static __always_inline int hides_protocol(struct __sk_buff *skb, const struct frame *frame)
{
	__u64 header;

	if (bpf_ntohs(frame->protocol) >= ETH_P_802_3_MIN || bpf_skb_load_bytes(skb, ETH_HLEN, &header, sizeof(header)))
		return 0;
	header &= 0xffffffffffffULL;
	return header == 0x00000003aaaaULL || header == 0xf8000003aaaaULL;
}

// Checks what a frame of a link contains.
static __always_inline __u32 check_content(struct __sk_buff *skb, const struct frame *frame)
{
	__u16 tag[2]; // with the protocol that follows

	// The addresses 01:80:c2:00:00:00 to 3f belong to protocols between switches and routers, and
	// 01:00:0c:cc:cc:cc and cd to those of Cisco.
	if ((frame->destination & 0xc0ffffffffffULL) == 0x0000c28001ULL ||
	    (frame->destination & 0xfeffffffffffULL) == 0xcccccc0c0001ULL)
		return REASON_PROTOCOL;
	if (skb->vlan_present)
		return skb->vlan_proto == bpf_htons(ETH_P_8021Q) && !is_tag(frame->protocol) &&
				       is_allowed_vlan(frame->parent, skb->vlan_tci & 0xfff)
			       ? 0
			       : REASON_VLAN;
	switch (frame->protocol) {
	case bpf_htons(ETH_P_PAUSE):
	case bpf_htons(ETH_P_SLOW):
	case bpf_htons(ETH_P_LLDP):
	case bpf_htons(ETH_P_MPLS_UC):
	case bpf_htons(ETH_P_MPLS_MC):
	case bpf_htons(ETH_P_PPP_DISC):
	case bpf_htons(ETH_P_PPP_SES):
	case bpf_htons(ETH_P_ETAG):
	case bpf_htons(ETH_P_VNTAG):
		return REASON_PROTOCOL;
	case bpf_htons(ETH_P_QINQ1):
	case bpf_htons(ETH_P_QINQ2):
	case bpf_htons(ETH_P_QINQ3):
	case bpf_htons(ETH_P_8021AD):
		return REASON_VLAN;
	case bpf_htons(ETH_P_8021Q):
		if (bpf_skb_load_bytes(skb, ETH_HLEN, tag, sizeof(tag)))
			return REASON_VLAN;
		return is_allowed_vlan(frame->parent, bpf_ntohs(tag[0]) & 0xfff) && !is_tag(tag[1]) ? 0 : REASON_VLAN;
	case bpf_htons(ETH_P_ARP):
		return check_arp(skb, frame, ETH_HLEN);
	case bpf_htons(ETH_P_IP):
		return check_ipv4(skb, frame);
	case bpf_htons(ETH_P_IPV6):
		return check_ipv6(skb, frame);
	}
	return hides_protocol(skb, frame) ? REASON_PROTOCOL : 0;
}

#define CHECKSUM_PARTIAL 3
#define NO_CHECKSUM (~0U)

// Returns the offset in a frame at which the kernel or the NIC will write a checksum, or NO_CHECKSUM. It is
// global for the reason that dra_shared_find_upper is.
__noinline __u32 dra_shared_checksum_field(struct __sk_buff *context)
{
	struct sk_buff *skb;
	__u64 headroom;

	if (bpf_cast_to_kern_ctx) {
		skb = bpf_cast_to_kern_ctx(context);
		if (BPF_CORE_READ_BITFIELD(skb, ip_summed) != CHECKSUM_PARTIAL)
			return NO_CHECKSUM;
		headroom = skb->data - skb->head;
		return skb->csum_start + skb->csum_offset - headroom;
	}
	skb = kernel_frame(context);
	if (BPF_CORE_READ_BITFIELD_PROBED(skb, ip_summed) != CHECKSUM_PARTIAL)
		return NO_CHECKSUM;
	headroom = BPF_CORE_READ(skb, data) - BPF_CORE_READ(skb, head);
	return BPF_CORE_READ(skb, csum_start) + BPF_CORE_READ(skb, csum_offset) - headroom;
}

// Checks that a checksum will not be written over a field that the program has checked. A program that sends
// through a packet socket, or that rewrites frames in the pod, chooses both the position and the value.
static __always_inline __u32 check_checksum(struct __sk_buff *skb, const struct frame *frame)
{
	__u32 field = dra_shared_checksum_field(skb), upper, protocol, ports;
	struct upper found;
	__u8 byte;

	if (field == NO_CHECKSUM)
		return 0;
	if (skb->vlan_present)
		return field >= ETH_HLEN ? 0 : REASON_VLAN;
	if (is_tag(frame->protocol))
		return field >= ETH_HLEN + 4 ? 0 : REASON_VLAN; // behind the tag
	switch (frame->protocol) {
	case bpf_htons(ETH_P_ARP):
		return REASON_ARP;
	case bpf_htons(ETH_P_IP):
		if (bpf_skb_load_bytes(skb, ETH_HLEN, &byte, 1))
			return REASON_PROTOCOL;
		upper = ETH_HLEN + (byte & 0xf) * 4;
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 9, &byte, 1))
			return REASON_PROTOCOL;
		protocol = byte;
		break;
	case bpf_htons(ETH_P_IPV6):
		if (bpf_skb_load_bytes(skb, ETH_HLEN + 6, &byte, 1))
			return REASON_PROTOCOL;
		found = find_upper(skb, byte);
		upper = found.offset;
		protocol = found.protocol;
		break;
	default:
		return field >= ETH_HLEN ? 0 : REASON_PROTOCOL;
	}
	if (protocol == 58) // ICMPv6
		return field == upper + 2 ? 0 : REASON_PROTOCOL;
	if (protocol != 17) // of TCP, or of a packet in a tunnel
		return field >= upper + 8 ? 0 : REASON_PROTOCOL;
	if (field == upper + 6)
		return 0;
	if (field < upper + 8 || bpf_skb_load_bytes(skb, upper, &ports, sizeof(ports)))
		return REASON_PROTOCOL;
	return ports >> 16 == bpf_htons(67) ? REASON_DHCP : 0;
}

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
		// another namespace is one that a pod sends through its link. Such a namespace
		// can be one that a pod has made, and need not have a link of a share. On a NIC
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
