// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// NetworkAttachment describes the link that a pod gets for a share of a NIC. All fields are optional. A field that a
// claim does not set is taken from the DeviceClass. A list that a claim sets, even if empty, replaces the
// DeviceClass's. A field that neither sets has a default.
//
// +kubebuilder:object:root=true
type NetworkAttachment struct {
	metav1.TypeMeta `json:",inline"`

	// InterfaceName is the name of the link in the pod: 1 to 15 letters, digits,
	// and the characters ".", "_", and "-". The names lo, eth0, all, and default
	// are reserved. The default is the first unused name of net1, net2, and so on
	// when the pod starts.
	InterfaceName string `json:"interfaceName,omitempty"`

	// Mode selects whether the shares of one NIC can reach each other. The network
	// must allow the mode. The default is Private.
	Mode Mode `json:"mode,omitempty"`

	// MTU is the maximum transmission unit of the link in bytes: at least 68, at least 1280 with an IPv6 address, and
	// at most the NIC's MTU, which is the default.
	MTU *int32 `json:"mtu,omitempty"`

	// Addresses lists the link's addresses with their prefix lengths, such as 10.20.0.5/24 or fd00::5/64, at most 16.
	// The network must allow them. A claim with addresses serves only one pod at a time.
	Addresses []string `json:"addresses,omitempty"`

	// AddressPools lists the names of the AddressPools that each pod gets its own address from, at most one for each IP
	// family. If neither this field nor addresses is set, the network's default pools apply, if any; an empty list
	// means no pool address. A claim cannot have both pools and addresses, even for different IP families. If the claim
	// sets addresses, addressPools, or dhcp, the DeviceClass's values for the others do not apply.
	AddressPools []string `json:"addressPools,omitempty"`

	// DHCP lists the IP families that each pod leases an address in from one of the network's DHCP servers: IPv4. The
	// network must allow it. If this field, addresses, and addressPools are all unset, the network's field dhcp
	// applies; an empty list means no leased address. The field cannot be combined with addressPools, or with addresses
	// of the same family. If the claim sets one of the three fields, the DeviceClass's values for the others do not
	// apply.
	DHCP []IPFamily `json:"dhcp,omitempty"`

	// KeepAddresses makes each pod of a StatefulSet keep the addresses that it has from
	// AddressPools, even when it is created again or moves to another node, until the
	// StatefulSet is deleted. Other pods are refused. A pod with several such links on one
	// network needs an interfaceName for each. The default is false.
	KeepAddresses *bool `json:"keepAddresses,omitempty"`

	// Routes lists the routes through the link, at most 32.
	Routes []Route `json:"routes,omitempty"`

	// PolicyRules lists rules of the pod's routing policy, at most 16, such as one that uses a separate table to route
	// what the pod sends from the link's addresses.
	PolicyRules []PolicyRule `json:"policyRules,omitempty"`

	// Neighbors lists permanent entries of the link's neighbor table, at most 64.
	Neighbors []Neighbor `json:"neighbors,omitempty"`

	// Sysctls sets kernel parameters for the link, at most 16, such as net.ipv4.conf.IFNAME.arp_ignore. IFNAME stands
	// for the link's name. The network must allow them.
	Sysctls map[string]string `json:"sysctls,omitempty"`

	// Bandwidth selects how the kernel enforces the granted bandwidth.
	Bandwidth *Bandwidth `json:"bandwidth,omitempty"`

	// AdminLink makes the plugin attach a link for a request with adminAccess. Without it, the pod sees the NIC's
	// attributes but does not get a link. The link does not have a grant: its frames share the bandwidth that the
	// network reserves for frames without a known sender. The field is forbidden for requests without adminAccess.
	AdminLink bool `json:"adminLink,omitempty"`
}

// IPFamily is an IP family.
type IPFamily string

// IP families.
const (
	// IPv4 is the family of IPv4 addresses.
	IPv4 IPFamily = "IPv4"
)

// Mode selects whether the shares of one NIC can reach each other.
type Mode string

// Modes of a share of a NIC.
const (
	// ModePrivate isolates the shares of a NIC from each other.
	ModePrivate Mode = "Private"
	// ModeBridge lets the shares of a NIC reach each other. Unicast frames between them do not pass the wire. They
	// count toward the sender's and the receiver's grants.
	ModeBridge Mode = "Bridge"
)

// Route is a route through a share's link.
type Route struct {
	// Destination is the destination network, such as 10.30.0.0/16.
	Destination string `json:"destination"`

	// Gateway is the address of the next hop: a link-local address, or an address in the subnet of one of the link's
	// addresses. Without a gateway, the destination is directly on the link.
	Gateway string `json:"gateway,omitempty"`

	// Table is the number of the routing table, from 1 to 2147483647 except 253 to 255. The
	// default is the main table.
	Table *int32 `json:"table,omitempty"`
}

// PolicyRule routes the packets that it matches using a routing table. Without source and destination, it matches
// packets from each address of the link.
type PolicyRule struct {
	// Source is the source addresses' network, such as 10.20.0.0/16.
	Source string `json:"source,omitempty"`

	// Destination is the destination addresses' network.
	Destination string `json:"destination,omitempty"`

	// Table is the number of the routing table, from 1 to 2147483647 except 253 to 255.
	Table int32 `json:"table"`

	// Priority orders the pod's rules, from 1 to 32765, the lowest first. The default is 32000.
	Priority *int32 `json:"priority,omitempty"`
}

// Neighbor is the MAC address of another host on the network.
type Neighbor struct {
	// Address is the host's IP address.
	Address string `json:"address"`

	// MAC is the host's MAC address, such as 02:00:00:00:00:07.
	MAC string `json:"mac"`
}

// Bandwidth selects how the kernel enforces the granted bandwidth.
type Bandwidth struct {
	// Burst selects what happens to traffic beyond the grant. The network must
	// allow the value. The default is Guaranteed.
	Burst Burst `json:"burst,omitempty"`
}

// Burst selects what happens to traffic beyond the grant.
type Burst string

// Values of Burst.
const (
	// BurstGuaranteed makes the grant both the guaranteed rate and the ceiling.
	BurstGuaranteed Burst = "Guaranteed"
	// BurstLine makes the grant the guaranteed rate. The share may also use the NIC's idle bandwidth.
	BurstLine Burst = "Line"
)

// AcceleratorShare describes what containers with a share of an accelerator get in addition to the device itself. All
// fields are optional. A claim's values are added to the DeviceClass's.
//
// +kubebuilder:object:root=true
type AcceleratorShare struct {
	metav1.TypeMeta `json:",inline"`

	// Environment holds the containers' environment variables, at most 32. A name is a C identifier that does not start
	// with DRA_SHARED_ and that the DriverConfig does not set. A value has at most 4096 bytes. If both the DeviceClass
	// and the claim set a variable, the claim's value wins.
	Environment map[string]string `json:"environment,omitempty"`

	// DeviceNodes lists the paths of additional device nodes below /dev, at most 16. The DriverConfig must allow them.
	DeviceNodes []string `json:"deviceNodes,omitempty"`
}

// FabricMembership names the fabric that a container can use, and the share that the container belongs to. The plugin
// mounts it, as JSON, at the path in the environment variable DRA_SHARED_<REQUEST>_MEMBERSHIP. All containers of a
// claim have the same share, on all nodes.
//
// +kubebuilder:object:root=true
type FabricMembership struct {
	metav1.TypeMeta `json:",inline"`

	// Fabric is the name of the fabric.
	Fabric string `json:"fabric"`

	// Attributes holds the attributes that the DriverConfig gives the fabric.
	Attributes map[string]string `json:"attributes,omitempty"`

	// Node is the name of the node that the container runs on.
	Node string `json:"node"`

	// Request is the name of the request in the claim.
	Request string `json:"request"`

	// ShareID is the ID of the share. It is absent if the claim has the whole
	// fabric.
	ShareID string `json:"shareID,omitempty"`

	// Granted holds the granted amount of each capacity as a decimal number;
	// memory is in bytes.
	Granted map[string]string `json:"granted,omitempty"`
}
