// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// Degraded conditions. While one is true, the plugin runs without a feature. They are the values of the label
// condition on the metric dra_shared_degraded.
const (
	// DegradedDevicesNotWatched means that the plugin notices added and removed devices late.
	DegradedDevicesNotWatched = "DevicesNotWatched"
	// DegradedFeaturesDisabled means that the API server dropped fields of the ResourceSlices, because the cluster's
	// feature gates are off.
	DegradedFeaturesDisabled = "FeaturesDisabled"
	// DegradedHookNotWatched means that the plugin reinstalls a removed hook late.
	DegradedHookNotWatched = "HookNotWatched"
	// DegradedNodeNotWatched means that the plugin is not permitted to watch its Node, so it does not notice when the
	// Node was deleted and registered again: the plugin's ResourceSlices are then deleted again and again.
	DegradedNodeNotWatched = "NodeNotWatched"
	// DegradedNotCollected means that the plugin does not remove orphaned kernel objects, because
	// it cannot read a record.
	DegradedNotCollected = "NotCollected"
	// DegradedPodsNotReadable means that the plugin is not permitted to get pods, so it does not detect pods with
	// containers that do not reference their claim.
	DegradedPodsNotReadable = "PodsNotReadable"
	// DegradedSlicesRefused means that the API server refuses the plugin's ResourceSlices, for example because RBAC or
	// an admission policy denies them.
	DegradedSlicesRefused = "SlicesRefused"
)

// Reasons to refuse a frame. They are the values of the label reason on the metric dra_shared_refused_frames_total.
const (
	// RefusalSourceMAC means that a frame has a source MAC address other than the link's, or a
	// sender in another network namespace.
	RefusalSourceMAC = "SourceMAC"
	// RefusalSourceAddress means that a frame has a source IP address that the link does not have.
	RefusalSourceAddress = "SourceAddress"
	// RefusalARP means that ARP assigns an address to a link that does not have it.
	RefusalARP = "ARP"
	// RefusalNeighborDiscovery means that a neighbor discovery message assigns an address to a link that does not have
	// it, or is an IPv6 redirect.
	RefusalNeighborDiscovery = "NeighborDiscovery"
	// RefusalRouterAdvertisement means that a pod sends a router advertisement.
	RefusalRouterAdvertisement = "RouterAdvertisement"
	// RefusalDHCPServer means that a pod sends a DHCP server's message.
	RefusalDHCPServer = "DHCPServer"
	// RefusalVLAN means that a frame has a VLAN tag that the network does not allow.
	RefusalVLAN = "VLAN"
	// RefusalForwarded means that a pod forwards or bridges the frame, which does not have a socket.
	RefusalForwarded = "Forwarded"
	// RefusalNeighborRate means that a link broadcasts more ARP or neighbor discovery than it may.
	RefusalNeighborRate = "NeighborRate"
	// RefusalBlocked means that the sender or the receiver of a frame is a blocked link.
	RefusalBlocked = "Blocked"
	// RefusalProtocol means that a frame is a message between switches or routers, such as in a spanning tree or VRRP,
	// has unreadable headers, or would be divided into too many segments.
	RefusalProtocol = "Protocol"
	// RefusalReceiver means that a frame is for an address that neither the NIC nor a link has.
	RefusalReceiver = "Receiver"
	// RefusalIsolation means that a frame comes from another of the NIC's links, and not both links have the mode
	// Bridge.
	RefusalIsolation = "Isolation"
	// RefusalMulticastRouter means that a frame has a message that only a multicast router sends, such as an IGMP or
	// MLD query.
	RefusalMulticastRouter = "MulticastRouter"
)

// Actions on refused frames. They are the values of the label action on the metric dra_shared_refused_frames_total.
const (
	// RefusedDropped means that the kernel dropped the frame.
	RefusedDropped = "dropped"
	// RefusedPassed means that the frame passed because the network only audits frames or an earlier release attached
	// the link.
	RefusedPassed = "passed"
)

// Kernel checks. They are the values of the label check on the metric dra_shared_kernel_check.
const (
	// KernelCheckNetnsCookie means that the kernel identifies a frame's sender by its network namespace's cookie, which
	// a kernel helper returns, and by the source MAC address.
	KernelCheckNetnsCookie = "NetnsCookie"
	// KernelCheckNetnsCookieOfSocket means that the kernel identifies a frame's sender by the same values. The program
	// reads the cookie from kernel memory, which requires CAP_PERFMON.
	KernelCheckNetnsCookieOfSocket = "NetnsCookieOfSocket"
	// KernelCheckMAC means that the kernel identifies a frame's sender by the source MAC address alone.
	KernelCheckMAC = "MAC"
	// KernelCheckForwardedByRoute means that the classifier recognizes the frames that the node
	// forwards by their route.
	KernelCheckForwardedByRoute = "ForwardedByRoute"
	// KernelCheckARPSender means that the classifier knows which network namespace ARP comes from.
	KernelCheckARPSender = "ARPSender"
	// KernelCheckSenderLists means that the classifier replaces the source address of a frame if a macvlan lists its
	// sender (mode source): such a link would receive other pods' frames, or keep them from all others.
	KernelCheckSenderLists = "SenderLists"
	// KernelCheckTCX means that the classifier runs before programs that other owners have attached to the NIC.
	KernelCheckTCX = "TCX"
)
