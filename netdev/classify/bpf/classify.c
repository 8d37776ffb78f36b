// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0 OR MIT OR GPL-2.0-only
//
// These programs assign the frames of a NIC to the HTB classes of shares, and drop
// the frames that do not carry the identity of their sender; see identity.h.
//
// Both programs are attached to the NIC by TCX or to attach points of clsact, and write the
// class of a frame to skb->priority, where HTB reads it. They write it to every
// frame, because macvlan passes the sender's priority to the NIC: a pod could
// otherwise choose its class with SO_PRIORITY.
//
// There is one program per way to identify the sender and to recognize forwarded
// frames, so that the verifier sees only what the kernel supports: the loader
// removes the others. A constant would not do, because the verifier of Linux 6.1
// also checks what is never executed, unless the process has CAP_PERFMON.

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "arp.h"
#include "hairpin.h"
#include "identity.h"
#include "kernel.h"
#include "nic.h"
#include "segments.h"

// Whether an Internet socket belongs to the sender of a frame only if the frame has a route. Tests set it to 0: the
// kernel gives the frames of a test run such a socket, and no route.
const volatile __u8 dra_shared_sockets_need_routes = 1;

// Reports whether the socket of a frame belongs to its sender. A frame keeps its socket when a pod receives it and
// sends it again: through a bridge or a redirect, after which it has arrived at a link of the pod, through a tunnel,
// whose route is one of the pod, or through a link that makes it look like a frame that has not arrived, such as ipvlan
// for multicast. A link that releases routes, such as a bridge, removes the route. So a frame of an Internet socket
// needs a route, and so does a frame of a packet socket in a tunnel.
static __always_inline int has_own_socket(struct __sk_buff *context, int has_cookie, __u64 cookie, int reads_routes)
{
	struct bpf_sock *sk = context->sk;
	struct route route;

	if (!sk || context->ingress_ifindex)
		return 0;
	if (!has_cookie || !reads_routes)
		return 1;
	route = route_of(context);
	if (route.link)
		return route.cookie == cookie;
	if (dra_shared_sockets_need_routes && (sk->family == 2 || sk->family == 10)) // AF_INET, AF_INET6
		return 0;
	return !is_encapsulated(context);
}

// Reports whether the node forwards a frame that no share sent, such as one of a
// pod in the cluster network. Such a frame has the source MAC of the NIC.
static __always_inline int is_forwarded(struct __sk_buff *skb, int reads_routes, const struct nic *nic, __u64 source)
{
	if (!nic->forwarded || source != number_of(nic->mac))
		return 0;
	return nic->forwarded == FORWARDED_BY_ADDRESS || (reads_routes && routed_by_node(skb));
}

// Writes the class to a frame that leaves through a NIC, and returns the verdict on
// it; see send. has_cookie is 0 if the cookie of the frame's socket is not known. No namespace
// has the cookie 0. reads_routes is 0 if the kernel does not let the program read
// routes, and checks is 0 if the program does not check the identity of frames.
static __always_inline int classify_sent(struct __sk_buff *skb, int has_cookie, __u64 cookie, int reads_routes,
					 int checks)
{
	__u32 parent = skb->ifindex, class = 0;
	struct nic *nic = bpf_map_lookup_elem(&dra_shared_nics, &parent);
	struct frame frame = {.parent = parent, .cookie = cookie};
	struct counts *counts;
	struct ethhdr eth;
	int has_socket, is_switched = 0;

	if (!nic)
		return TC_ACT_UNSPEC;
	counts = bpf_map_lookup_elem(&dra_shared_counts, &parent);
	if (counts)
		counts->sent++;
	// NICs pad a frame that ends in the Ethernet header, so that it is valid on the network.
	if (hold_first(skb, ETH_HLEN) || bpf_skb_load_bytes(skb, 0, &eth, sizeof(eth)) ||
	    hold_headers(skb, eth.h_proto))
		return TC_ACT_SHOT;
	frame.source = number_of(eth.h_source);
	frame.destination = number_of(eth.h_dest);
	frame.protocol = eth.h_proto;
	frame.own = frame.source == number_of(nic->mac);
	has_socket = has_own_socket(skb, has_cookie, cookie, reads_routes);
	// The namespace of another socket must not be charged for the frame.
	if (!has_socket)
		frame.cookie = cookie = 0;
	// A reply of a pod that was delayed has a socket of the initial namespace, too, and a pod can give
	// it the address of the NIC. Its route shows the pod.
	if (has_socket && has_cookie && cookie == nic->host_cookie && (reads_routes || !is_reply(skb))) {
		skb->priority = nic->major | CLASS_HOST;
		return frame.own ? reach_links(skb, parent, frame.destination) : TC_ACT_UNSPEC;
	}
	// The kernel has sockets with which it replies for all namespaces. Where the node
	// is a container, they return to a namespace that is not the node's either.
	if (has_socket && has_cookie && is_reply(skb) && !class_of_tenant(parent, cookie))
		has_socket = 0;
	if (!frame.own) {
		struct link *link = find_link(parent, frame.source);

		// Without CAP_PERFMON, the verifier of Linux 6.1 does not remember the type
		// of frame.link until the end of the program.
		if (link)
			is_switched = link->flags & LINK_BRIDGE;
		// The frame was checked before it entered the hairpin. While it waited there, a
		// socket with which the kernel replies may have gone to another namespace.
		if (link && is_switched && has_passed_hairpin(skb)) {
			skb->mark = 0;
			skb->priority = !skb->sk && is_arp_or_nd(skb, &eth) && !has_high_rate(link)
						? nic->major | CLASS_CONTROL
						: link->class;
			return TC_ACT_UNSPEC;
		}
		frame.link = link;
	}
	if (has_socket && has_cookie) {
		if (frame.link && frame.link->cookie == cookie)
			class = frame.link->class;
		else if (cookie)
			class = class_of_sender(parent, cookie, frame.source);
	} else if (has_socket) {
		// Without the cookie, a pod can use the class of the host with the
		// NIC's address, as it can use the class of another share with that
		// share's address.
		if (frame.own)
			class = nic->major | CLASS_HOST;
		else
			class = class_of_sender(parent, 0, frame.source);
	} else if (is_arp_or_nd(skb, &eth)) {
		class = nic->major | CLASS_CONTROL;
	} else if (nic->trust_mac) {
		class = class_of_sender(parent, 0, frame.source);
	}
	// The kernel divides a packet that is too large for a link before the packet reaches the NIC, and
	// only the last segment keeps the socket. So without a socket, the route shows the sender. What
	// the kernel itself sends has one, except ARP.
	if (reads_routes && frame.link && !has_socket &&
	    (frame.protocol != bpf_htons(ETH_P_ARP) || skb->ingress_ifindex)) {
		frame.is_unproven = cookie_of_route(skb) != frame.link->cookie;
		if (!class && !frame.is_unproven && !skb->ingress_ifindex)
			class = frame.link->class;
		if (frame.is_unproven && !nic->trust_mac)
			is_switched = 0; // its sender may be a link that must not reach others
	}
	if (!class && is_forwarded(skb, reads_routes, nic, frame.source))
		class = nic->major | CLASS_FORWARDED;
	if (checks)
		frame.policy = bpf_map_lookup_elem(&dra_shared_policies, &parent);
	if (frame.policy && frame.policy->identity) {
		frame.has_socket = has_socket;
		frame.has_cookie = has_cookie;
		if (frame.own) {
			// A NIC that forwards for the cluster network may get frames by a redirect,
			// without a route. They have arrived at a link of the node before.
			frame.is_foreign = (has_socket && has_cookie) || (!nic->forwarded && skb->ingress_ifindex);
			// Without a socket, the kernel of the node sends only ARP without a route. What the
			// kernel of a pod sends through a bridge has no ingress interface either.
			if (!has_socket && !skb->ingress_ifindex && frame.protocol != bpf_htons(ETH_P_ARP))
				frame.is_foreign = 1;
			frame.routed = !reads_routes || routed_by_node(skb);
		}
		if (reads_routes && frame.policy->traces_arp && !has_socket && !skb->ingress_ifindex &&
		    frame.protocol == bpf_htons(ETH_P_ARP)) {
			frame.cookie = cookie_of_arp(skb, frame.own);
			if (frame.own)
				frame.is_foreign = frame.cookie != nic->host_cookie;
			else if (!frame.link)
				frame.is_node_arp = frame.cookie == nic->host_cookie;
			// A bridge may have copied what the pod sends.
			else if (frame.cookie || !frame.policy->forwarding)
				frame.is_unproven = frame.cookie != frame.link->cookie;
		}
		frame.class = class;
		frame.nic = nic;
		__u32 reason = check_sent(skb, &frame);

		if (!reason && reads_routes && !frame.own)
			reason = check_checksum(skb, &frame);
		if (!reason && has_many_segments(skb, reads_routes && !frame.own))
			reason = REASON_PROTOCOL;
		class = frame.class;
		if (reason && refuse(&frame, reason))
			return TC_ACT_SHOT;
	} else if (checks && class == (nic->major | CLASS_CONTROL) && !frame.own &&
		   count_sent(skb, &frame) != RATE_LOW) {
		class = frame.link ? frame.link->class : 0;
	}
	// The limit of the share depends on it, whatever the policy is.
	if (has_many_segments(skb, reads_routes && !frame.own))
		return TC_ACT_SHOT;
	skb->priority = class ? class : nic->major | CLASS_UNIDENTIFIED;
	if (!frame.own)
		skb->mark = 0; // programs of the node that run after this one may obey it
	if (is_switched)
		return enter_hairpin(skb);
	return frame.own ? reach_links(skb, parent, frame.destination) : TC_ACT_UNSPEC;
}

// Classifies a frame that leaves through a NIC, and chooses its transmit queue.
static __always_inline int send(struct __sk_buff *skb, int has_cookie, __u64 cookie, int reads_routes, int checks)
{
	int verdict = classify_sent(skb, has_cookie, cookie, reads_routes, checks);

	if (verdict == TC_ACT_UNSPEC)
		choose_queue(skb);
	return verdict;
}

// Returns the cookie of the network namespace of a frame's socket, which it reads
// from the kernel's memory; 0 without a socket.
static __always_inline __u64 cookie_of_socket(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	struct sock_common *common;

	// The verifier permits no arithmetic with a pointer to a socket. Reading the
	// variable that has the pointer yields a number.
	if (!sk || bpf_probe_read_kernel(&common, sizeof(common), &sk))
		return 0;
	return BPF_CORE_READ(common, skc_net.net, net_cookie);
}

// Each egress program exists twice: the loader uses the one without checks if the kernel refuses the
// other, as Linux 6.1 does without CAP_PERFMON. The trials at the start of the plugin also use it, because
// the kernel verifies it faster.

// Identifies the sender by the cookie, which a helper returns.
SEC("tc")
int dra_shared_egress_helper(struct __sk_buff *skb)
{
	return send(skb, 1, skb->sk ? bpf_get_netns_cookie(skb) : 0, 0, 1);
}

SEC("tc")
int dra_shared_egress_helper_unchecked(struct __sk_buff *skb)
{
	return send(skb, 1, skb->sk ? bpf_get_netns_cookie(skb) : 0, 0, 0);
}

// Identifies the sender as dra_shared_egress_helper does, and reads routes.
SEC("tc")
int dra_shared_egress_helper_routes(struct __sk_buff *skb)
{
	return send(skb, 1, skb->sk ? bpf_get_netns_cookie(skb) : 0, 1, 1);
}

SEC("tc")
int dra_shared_egress_helper_routes_unchecked(struct __sk_buff *skb)
{
	return send(skb, 1, skb->sk ? bpf_get_netns_cookie(skb) : 0, 1, 0);
}

// Identifies the sender by the cookie, which it reads from the kernel's memory, as
// it does the route.
SEC("tc")
int dra_shared_egress_socket(struct __sk_buff *skb)
{
	return send(skb, 1, cookie_of_socket(skb), 1, 1);
}

SEC("tc")
int dra_shared_egress_socket_unchecked(struct __sk_buff *skb)
{
	return send(skb, 1, cookie_of_socket(skb), 1, 0);
}

// Identifies the sender by its address alone.
SEC("tc")
int dra_shared_egress_mac(struct __sk_buff *skb)
{
	return send(skb, 0, 0, 0, 1);
}

SEC("tc")
int dra_shared_egress_mac_unchecked(struct __sk_buff *skb)
{
	return send(skb, 0, 0, 0, 0);
}

// Writes the class to a frame that arrived at a NIC, and returns whether the
// frame belongs to the device that shapes incoming frames. It does not for
// frames to the node itself, which has no limit. A frame between links of the node
// arrives here too, and may still have its socket; cookie is 0 if it has none, or if
// the cookie is not known. reads_lists is 0 if the kernel does not let the program read lists of senders, and
// checks is 0 if the program does not check the identity of frames.
static __always_inline int classify_received(struct __sk_buff *skb, struct nic *nic, __u64 cookie, int reads_lists,
					     int checks)
{
	__u32 parent = skb->ifindex, reason;
	struct frame frame = {.parent = parent, .cookie = cookie, .nic = nic};
	struct ethhdr eth;

	frame.returned = leave_hairpin(skb);
	if (bpf_skb_load_bytes(skb, 0, &eth, sizeof(eth))) {
		skb->priority = nic->major | CLASS_UNIDENTIFIED;
		return 1;
	}
	frame.source = number_of(eth.h_source);
	frame.destination = number_of(eth.h_dest);
	frame.protocol = eth.h_proto;
	if (checks)
		frame.policy = bpf_map_lookup_elem(&dra_shared_policies, &parent);
	if (frame.policy && !frame.policy->identity)
		frame.policy = 0;
	if (frame.policy &&
	    (frame.policy->guarded || is_imitated(&frame) || (reads_lists && was_listed(skb, parent, frame.source))))
		hide_source(skb);
	if (frame.destination == number_of(nic->mac))
		return 0;
	if (!frame.returned && skb->pkt_type == PACKET_HOST) {
		// It has the address of a member of the bond or bridge that the NIC is, or one that the NIC got since. A link
		// of a pod could have this address, too, so the program makes the NIC the only receiver.
		bpf_skb_store_bytes(skb, 0, nic->mac, ETH_ALEN, 0);
		return 0;
	}
	if (frame.destination & 1) {
		if (frame.returned) {
			// The links receive copies. The node, which would receive the frame
			// itself, ignores it, unless it is from a link that reaches the node.
			if (frame.source == number_of(nic->mac) || !reaches_node(parent))
				bpf_skb_change_type(skb, PACKET_OTHERHOST);
		} else if (frame.policy && !frame.policy->autoconf && is_advertisement(skb, &frame)) {
			// Only the node receives frames with the NIC's address.
			bpf_skb_store_bytes(skb, 0, nic->mac, ETH_ALEN, 0);
			return 0;
		}
		skb->priority = nic->major | multicast_class(frame.source);
		if (is_arp_or_nd(skb, &eth)) {
			if (checks && !frame.returned)
				note_conflict(skb, &frame);
			if (count_other(skb, &frame, 0) == RATE_LOW)
				skb->priority = nic->major | CLASS_CONTROL;
		}
		return 1;
	}
	frame.link = find_link(parent, frame.destination);
	frame.class = frame.link ? frame.link->class : class_of_receiver(parent, frame.destination);
	if (frame.policy) {
		struct link *receiver = frame.link;
		__u32 class;

		reason = frame.returned ? check_returned(&frame) : check_received(skb, &frame);
		class = frame.class;
		frame.class = frame.charged;
		if (reason && refuse(&frame, reason)) {
			skb->priority = nic->major | CLASS_DROP;
			return 1;
		}
		frame.class = class;
		frame.link = receiver;
	}
	skb->priority = frame.class ? frame.class : nic->major | CLASS_UNIDENTIFIED;
	// The answer that a share waits for must not wait behind a flood in the queue of the share.
	if (frame.class && !frame.returned && is_arp_or_nd(skb, &eth) &&
	    count_other(skb, &frame, 0) == RATE_LOW)
		skb->priority = nic->major | CLASS_CONTROL;
	return 1;
}

// Values that a program of a filter without direct action returns. They make the
// kernel go on with the next filter, or run the filter's actions.
#define FILTER_NEXT 0
#define FILTER_ACT (-1)

// Counts a frame that arrived. Returns 0 if this driver does not manage the NIC.
static __always_inline struct nic *arrive(struct __sk_buff *skb)
{
	__u32 parent = skb->ifindex;
	struct nic *nic = bpf_map_lookup_elem(&dra_shared_nics, &parent);
	struct counts *counts;

	if (!nic)
		return 0;
	counts = bpf_map_lookup_elem(&dra_shared_counts, &parent);
	if (counts)
		counts->received++;
	return nic;
}

// Returns the value of a program at the attach point of clsact. The action of its filter redirects
// the frames: before Linux 6.4, an IFB device drops what bpf_redirect sends.
static __always_inline int filter_received(struct __sk_buff *skb, __u64 cookie, int reads_lists, int checks)
{
	struct nic *nic = arrive(skb);

	if (!nic || !classify_received(skb, nic, cookie, reads_lists, checks))
		return FILTER_NEXT;
	choose_queue(skb);
	return FILTER_ACT;
}

// Returns the value of a program that is attached by TCX (Linux 6.6), which redirects
// the frames itself. Programs after it see the frames of the node only.
static __always_inline int redirect_received(struct __sk_buff *skb, __u64 cookie, int reads_lists, int checks)
{
	struct nic *nic = arrive(skb);

	if (!nic || !classify_received(skb, nic, cookie, reads_lists, checks))
		return TC_ACT_UNSPEC;
	choose_queue(skb);
	return bpf_redirect(nic->ifb, 0);
}

// Does not know the cookie of a frame's sender.
SEC("tc")
int dra_shared_ingress_mac(struct __sk_buff *skb)
{
	return filter_received(skb, 0, 0, 1);
}

SEC("tc")
int dra_shared_ingress_mac_tcx(struct __sk_buff *skb)
{
	return redirect_received(skb, 0, 0, 1);
}

SEC("tc")
int dra_shared_ingress_helper(struct __sk_buff *skb)
{
	return filter_received(skb, skb->sk ? bpf_get_netns_cookie(skb) : 0, 0, 1);
}

SEC("tc")
int dra_shared_ingress_helper_tcx(struct __sk_buff *skb)
{
	return redirect_received(skb, skb->sk ? bpf_get_netns_cookie(skb) : 0, 0, 1);
}

// Know the cookie as dra_shared_ingress_helper does, and read lists of senders.
SEC("tc")
int dra_shared_ingress_helper_lists(struct __sk_buff *skb)
{
	return filter_received(skb, skb->sk ? bpf_get_netns_cookie(skb) : 0, 1, 1);
}

SEC("tc")
int dra_shared_ingress_helper_lists_tcx(struct __sk_buff *skb)
{
	return redirect_received(skb, skb->sk ? bpf_get_netns_cookie(skb) : 0, 1, 1);
}

SEC("tc")
int dra_shared_ingress_socket(struct __sk_buff *skb)
{
	return filter_received(skb, cookie_of_socket(skb), 1, 1);
}

SEC("tc")
int dra_shared_ingress_socket_tcx(struct __sk_buff *skb)
{
	return redirect_received(skb, cookie_of_socket(skb), 1, 1);
}

// Needs no cookie, because it checks no frame.
SEC("tc")
int dra_shared_ingress_unchecked(struct __sk_buff *skb)
{
	return filter_received(skb, 0, 0, 0);
}

SEC("tc")
int dra_shared_ingress_unchecked_tcx(struct __sk_buff *skb)
{
	return redirect_received(skb, 0, 0, 0);
}

char _license[] SEC("license") = "Dual MIT/GPL";
