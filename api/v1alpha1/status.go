// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Kinds of the objects in a ResourceClaim's status.devices[].data. Consumers must look at apiVersion and kind before
// they read other fields.
const (
	NetworkStatusKind        = "NetworkStatus"
	NetworkStatusSummaryKind = "NetworkStatusSummary"
	FabricStatusSummaryKind  = "FabricStatusSummary"
)

// CNIVersion is the version of the CNI specification that NetworkStatus follows.
const CNIVersion = "1.1.0"

// NetworkStatus is the data of a NIC share with one link. It is a CNI result ("ADD Success" in the CNI specification
// 1.1.0), extended by the bandwidth that the kernel enforces. All values except routes and dns are read back from the
// kernel.
//
// +kubebuilder:object:root=true
type NetworkStatus struct {
	metav1.TypeMeta `json:",inline"`

	// CNIVersion is the version of the CNI specification that the fields
	// interfaces, ips, routes, and dns follow.
	CNIVersion string `json:"cniVersion"`

	// Network is the name of the network in the DriverConfig.
	Network string `json:"network,omitempty"`

	// Pod is the pod's namespace and name, as namespace/name.
	Pod string `json:"pod,omitempty"`

	// NotReady reports whether the link cannot be used, for example because it is down or blocked. The claim's
	// condition Ready applies to all pods, and gives the reason.
	NotReady bool `json:"notReady,omitempty"`

	// Interfaces lists the link in the pod. It has one element.
	Interfaces []CNIInterface `json:"interfaces"`

	// IPs lists the addresses of the link, at most 16.
	IPs []CNIIP `json:"ips,omitempty"`

	// Routes lists the routes that the claim's parameters request.
	Routes []CNIRoute `json:"routes,omitempty"`

	// DNS lists the DNS servers of the AddressPools or lease that the link's addresses are from. The field is absent if
	// there are none.
	DNS *CNIDNS `json:"dns,omitempty"`

	// Bandwidth holds the rates that the kernel enforces for the share. The field is absent if the kernel does not
	// enforce any.
	Bandwidth *BandwidthStatus `json:"bandwidth,omitempty"`
}

// CNIInterface describes a share's link in a pod.
type CNIInterface struct {
	// Name is the name of the link in the pod.
	Name string `json:"name"`
	// MAC is the hardware address of the link, such as 02:00:00:00:00:01.
	MAC string `json:"mac"`
	// MTU is the maximum transmission unit of the link in bytes.
	MTU int32 `json:"mtu"`
}

// CNIIP is an address of a link.
type CNIIP struct {
	// Address is the address with its prefix length, such as 10.20.0.5/24.
	Address string `json:"address"`
	// Interface is the index of the link in interfaces.
	Interface int32 `json:"interface"`
}

// CNIRoute is a route through a link.
type CNIRoute struct {
	// Destination is the destination network, such as 10.30.0.0/16.
	Destination string `json:"dst"`
	// Gateway is the address of the next hop. The field is absent if the
	// destination is directly on the link.
	Gateway string `json:"gw,omitempty"`
	// Table is the number of the routing table. The field is absent for the main table.
	Table *int32 `json:"table,omitempty"`
}

// CNIDNS is the DNS configuration of a link.
type CNIDNS struct {
	// Nameservers lists the addresses of DNS servers, such as 10.20.0.2.
	Nameservers []string `json:"nameservers,omitempty"`
}

// BandwidthStatus holds the rates that the kernel enforces for a share in each direction, as the plugin reads them
// back from the share's classes.
type BandwidthStatus struct {
	// Send limits the traffic that the share's pods send.
	Send RateStatus `json:"send"`
	// Receive limits the traffic that the share's pods receive.
	Receive RateStatus `json:"receive"`
}

// RateStatus holds the rates that the kernel enforces in one direction, in bits per second.
type RateStatus struct {
	// Guaranteed is the rate that the share can always reach, in bits per second.
	Guaranteed uint64 `json:"guaranteed"`
	// Ceiling is the rate that the share never exceeds, in bits per second. It
	// equals guaranteed unless the parameters allow a burst.
	Ceiling uint64 `json:"ceiling"`
}

// NetworkStatusSummary is the data of a NIC share that several pods use. All pods' links share one grant.
//
// +kubebuilder:object:root=true
type NetworkStatusSummary struct {
	metav1.TypeMeta `json:",inline"`

	// Network is the name of the network in the DriverConfig.
	Network string `json:"network,omitempty"`

	// Pods is the number of pods on the node that have a link or failed to get one.
	Pods int32 `json:"pods"`

	// Attached is the number of links that are ready (see notReady of PodNetworkStatus).
	Attached int32 `json:"attached"`

	// Failed is the number of pods that failed to get a link.
	Failed int32 `json:"failed"`

	// First lists the first pods' links, ordered by pod name: as many as fit into the 10 KiB that a status can have.
	// This is enough for 110 pods, the default limit of a node, with an IPv4 address each, unless namespace and name
	// have more than 50 characters.
	First []PodNetworkStatus `json:"first"`

	// Truncated reports whether first omits links.
	Truncated bool `json:"truncated"`

	// Bandwidth holds the rates that the kernel enforces for all of the share's links together. The field is absent if
	// the kernel does not enforce any.
	Bandwidth *BandwidthStatus `json:"bandwidth,omitempty"`
}

// PodNetworkStatus is one pod's link in a NetworkStatusSummary.
type PodNetworkStatus struct {
	// Pod is the pod's namespace and name, as namespace/name.
	Pod string `json:"pod"`
	// Interface is the name of the link in the pod. It is absent if the
	// summary would otherwise omit links.
	Interface string `json:"interface,omitempty"`
	// MAC is the hardware address of the link. It is absent if the summary
	// would otherwise omit links.
	MAC string `json:"mac,omitempty"`
	// NotReady reports whether the link cannot be used, for example because it is down or blocked. The claim's
	// condition Ready applies to all pods, and gives the reason.
	NotReady bool `json:"notReady,omitempty"`
	// IPs lists the addresses of the link with their prefix lengths, at most 16.
	IPs []string `json:"ips,omitempty"`
}

// FabricStatusSummary is the data of a share of a fabric. The controller counts
// the pods that use the claim on all nodes.
//
// +kubebuilder:object:root=true
type FabricStatusSummary struct {
	metav1.TypeMeta `json:",inline"`

	// Pods is the number of pods that are bound to a node and are not terminal.
	Pods int32 `json:"pods"`

	// Running is the number of those pods that are running.
	Running int32 `json:"running"`

	// Nodes is the number of nodes that those pods are running on.
	Nodes int32 `json:"nodes"`
}
