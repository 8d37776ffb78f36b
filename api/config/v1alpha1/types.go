// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"net/netip"
	"path"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// DriverConfig selects the devices that the driver publishes, and sets the rules for
// sharing them.
//
// +kubebuilder:object:root=true
type DriverConfig struct {
	metav1.TypeMeta `json:",inline"`

	// Networks lists the networks with NICs that the driver shares. The first network that matches a NIC applies.
	Networks []Network `json:"networks,omitempty"`

	// Accelerators lists the accelerators that the driver shares. The first entry that matches a device applies.
	Accelerators []Accelerator `json:"accelerators,omitempty"`

	// Fabrics lists devices that span several nodes.
	Fabrics []Fabric `json:"fabrics,omitempty"`
}

// Network is a set of NICs on the same network, and the rules for sharing them.
type Network struct {
	// Name is the name of the network, a DNS label. It is published as the NICs' attribute network.
	Name string `json:"name"`

	// Interfaces lists names of NICs, or patterns of names with the wildcards "*", "?", and "[a-z]". The driver does
	// not touch NICs that no entry matches. A pattern does not match an uplink, which is a NIC that one of the node's
	// default routes uses or has used since the node booted, directly or through a VLAN, a bridge, or a bond: to share
	// it, list its exact name. The plugin forgets an uplink that has not existed for an hour.
	Interfaces []string `json:"interfaces"`

	// ResourceName is published as the NICs' attribute k8s.cni.cncf.io/resourceName, which Multus uses to find claims'
	// devices. It is a DNS subdomain, a slash, and a name, such as example.com/storage. By default, the NICs do not
	// have the attribute.
	ResourceName string `json:"resourceName,omitempty"`

	// Bandwidth is the line rate of the NICs in bits per second, a whole number of at least 8. The default is the speed
	// that the link reports: for a bond, the sum of the members that can currently send; for a VLAN, the speed of the
	// NIC below it. The field is required for links that do not report a speed.
	Bandwidth *resource.Quantity `json:"bandwidth,omitempty"`

	// Reserve is the part of the line rate that is not granted to shares, in bits
	// per second, less than bandwidth. The node itself, ARP and neighbor discovery,
	// and frames without a known sender use it. The default is 1 % of the line rate.
	Reserve *resource.Quantity `json:"reserve,omitempty"`

	// Forwarded is the part of the line rate that is guaranteed to frames that the node forwards through the NIC, such
	// as from pods in the cluster network, in bits per second. It is not granted to shares. Forwarded frames can also
	// use idle bandwidth, unless the node recognizes them only by their address (see docs/user/enforcement.md).
	// Together with reserve, it must be less than bandwidth. The default is 10 % of the line rate for an uplink, and
	// otherwise 0: forwarded frames then count as frames without a known sender.
	Forwarded *resource.Quantity `json:"forwarded,omitempty"`

	// Multicast limits arriving multicast and broadcast frames, except ARP and neighbor discovery, in bits per second:
	// the shares and the node together receive no more. The default is an eighth of reserve.
	Multicast *resource.Quantity `json:"multicast,omitempty"`

	// Overhead is how many bytes the network carries with each frame in addition to its Ethernet header and payload, at
	// most 256: 24 on Ethernet (preamble, checksum, gap). With it, bandwidth is the rate on the wire, so a flood of
	// small frames cannot use more of the wire than was granted. The default is 0: only the header and the payload
	// count.
	Overhead int32 `json:"overhead,omitempty"`

	// Identity selects what happens to frames that do not carry the sending link's identity: its MAC address and its IP
	// addresses (see docs/user/security.md). The default is Enforce. The field has no effect with enforcement None.
	Identity Identity `json:"identity,omitempty"`

	// DuplicateAddressDetection selects what happens if another host on the network has a link's address (see
	// docs/user/addresses.md). The default is Report.
	DuplicateAddressDetection DuplicateAddressDetection `json:"duplicateAddressDetection,omitempty"`

	// DHCP lists the IP families that a claim leases an address in if it does not set addresses, addressPools, or dhcp:
	// IPv4. allow.dhcp must have them. By default, such a claim gets addresses from the network's default AddressPools,
	// or none.
	DHCP []v1alpha1.IPFamily `json:"dhcp,omitempty"`

	// Allow limits what claims can request in a NetworkAttachment, and what pods can
	// send.
	Allow Allow `json:"allow,omitempty"`

	// Policy sets the amounts of bandwidth that claims can request.
	Policy Policy `json:"policy,omitempty"`

	// Shares is the number of shares that one NIC can be divided into, from 1 to
	// 3000. The default is 128.
	Shares *int32 `json:"shares,omitempty"`

	// Enforcement selects how the granted bandwidth is enforced. The default is
	// Shape.
	Enforcement Enforcement `json:"enforcement,omitempty"`

	// Shaping selects the queues that limit shares. The default is SingleQueue. It has no effect with
	// enforcement None.
	Shaping Shaping `json:"shaping,omitempty"`

	// LinkDown is the effect of the taint dra-shared.dev/link-down on a NIC without
	// a carrier. The default is NoSchedule.
	LinkDown TaintEffect `json:"linkDown,omitempty"`

	// TakeOver makes the driver replace a root qdisc that it does not manage. Without it, the driver does not use a NIC
	// with such a qdisc. The default is false.
	TakeOver bool `json:"takeOver,omitempty"`

	// TrustMAC counts frames that no socket on the node sent, such as forwarded or bridged frames or a virtual
	// machine's, toward the share with their source address. Any pod on the NIC can then send as another. The default
	// is false.
	TrustMAC bool `json:"trustMAC,omitempty"`
}

// Allow limits what claims can request on a network, and what pods can send. Links that were attached before a change
// also get the new rules.
type Allow struct {
	// Modes lists the allowed modes. The default is Private.
	Modes []v1alpha1.Mode `json:"modes,omitempty"`

	// Subnets lists the subnets that claims can request addresses from, such as 10.20.0.0/16. By default, claims cannot
	// request addresses. A link without requested addresses may use any address in the subnets that no other link has;
	// without subnets, any address that no other link has.
	Subnets []string `json:"subnets,omitempty"`

	// Addresses lists additional addresses and networks, such as 10.20.0.9, that every link may send from, for example
	// virtual addresses that pods take over from each other. With addresses or macs, links may also send VRRP, HSRP,
	// and GLBP.
	Addresses []string `json:"addresses,omitempty"`

	// MACs lists additional MAC addresses that every link may send from and receive at, such as for VRRP, a bond, or a
	// virtual machine in a pod.
	MACs []string `json:"macs,omitempty"`

	// VLANs lists the IDs of the VLANs, from 1 to 4094, that pods may tag their frames with.
	VLANs []int32 `json:"vlans,omitempty"`

	// Forwarding permits pods to forward frames that they have not sent themselves, such as from a virtual machine or
	// another network. The frames need the link's MAC address, or one of macs. They count as frames without a known
	// sender. Links may then also send the routing protocols OSPF, EIGRP, and RIP. The default is false.
	Forwarding bool `json:"forwarding,omitempty"`

	// RouterAdvertisements lets links configure addresses and routes from the network's router advertisements, and send
	// from the addresses derived from their MAC address (EUI-64). The default is false: only the node receives them.
	RouterAdvertisements bool `json:"routerAdvertisements,omitempty"`

	// Node lets the node and the links with the mode Bridge reach each other through the NIC. Modes must contain
	// Bridge, and the network needs enforcement. All links receive the node's broadcasts. The default is false.
	Node bool `json:"node,omitempty"`

	// Burst lists the allowed values of bandwidth.burst. The default is Guaranteed.
	Burst []v1alpha1.Burst `json:"burst,omitempty"`

	// DHCP lists the IP families that claims can lease addresses in from the network's DHCP servers: IPv4. With
	// subnets, only addresses in them are accepted. The field requires plugin.dhcp in the chart (see
	// docs/user/addresses.md). By default, claims cannot lease addresses.
	DHCP []v1alpha1.IPFamily `json:"dhcp,omitempty"`

	// Sysctls lists the link kernel parameters that claims can set, such as net.ipv4.conf.IFNAME.arp_ignore, where
	// IFNAME stands for the link's name. By default, claims cannot set any.
	Sysctls []string `json:"sysctls,omitempty"`
}

// Policy sets the amounts of bandwidth that claims can request, in bits per second
// (KEP-5075, CapacityRequestPolicy). The scheduler rounds a request up to min plus a
// multiple of step. On a NIC that is too slow for the policy, the driver lowers the
// amounts.
type Policy struct {
	// Default is the amount for a claim that does not request bandwidth: min plus a multiple of step. The default is
	// 100M, or min if that is larger.
	Default *resource.Quantity `json:"default,omitempty"`

	// Min is the smallest amount. The default is 10M.
	Min *resource.Quantity `json:"min,omitempty"`

	// Step is the difference between amounts. The default is 10M.
	Step *resource.Quantity `json:"step,omitempty"`
}

// Enforcement selects how the granted bandwidth is enforced.
type Enforcement string

// Values of Enforcement.
const (
	// EnforcementShape queues traffic that exceeds the grant, in both directions.
	EnforcementShape Enforcement = "Shape"
	// EnforcementNone leaves the NIC's queues unchanged. Grants limit only what the scheduler allocates.
	EnforcementNone Enforcement = "None"
)

// Shaping selects the queues that limit shares.
type Shaping string

// Values of Shaping.
const (
	// ShapingSingleQueue sends all of a NIC's frames through one queue, where shares can borrow idle bandwidth.
	ShapingSingleQueue Shaping = "SingleQueue"
	// ShapingMultiQueue sends each share's frames through one of the NIC's transmit queues, if it has several and the
	// kernel supports it (see docs/user/enforcement.md). Shares on different queues then do not wait for the same lock.
	// Shares cannot borrow, and the node's own and forwarded frames together get no more than reserve and forwarded. A
	// NIC with shares changes only after its last share is released.
	ShapingMultiQueue Shaping = "MultiQueue"
)

// Identity selects what happens to frames that do not carry their sender's identity.
type Identity string

// Values of Identity.
const (
	// IdentityEnforce drops and counts the frames.
	IdentityEnforce Identity = "Enforce"
	// IdentityAudit counts the frames.
	IdentityAudit Identity = "Audit"
	// IdentityOff does not check frames.
	IdentityOff Identity = "Off"
)

// DuplicateAddressDetection selects what happens if another host on the network has a link's address.
type DuplicateAddressDetection string

// Values of DuplicateAddressDetection.
const (
	// DuplicateAddressReport reports the other host in the claim's status. Pods start without waiting for answers from
	// the network.
	DuplicateAddressReport DuplicateAddressDetection = "Report"
	// DuplicateAddressRefuse asks the network before a link gets an address, which delays the pod by 200 ms. A pod gets
	// another address from its pool; a static address is refused.
	DuplicateAddressRefuse DuplicateAddressDetection = "Refuse"
	// DuplicateAddressOff does not ask the network.
	DuplicateAddressOff DuplicateAddressDetection = "Off"
)

// TaintEffect is the effect of a taint on a device (resource.k8s.io/v1,
// DeviceTaintEffect).
type TaintEffect string

// Values of TaintEffect.
const (
	// TaintNone means that the device does not have a taint.
	TaintNone TaintEffect = "None"
	// TaintNoSchedule prevents the scheduler from allocating the device.
	TaintNoSchedule TaintEffect = "NoSchedule"
	// TaintNoExecute has the effect of TaintNoSchedule, and evicts the pods that use the
	// device and do not tolerate the taint.
	TaintNoExecute TaintEffect = "NoExecute"
)

// NetworkNames returns the names of the networks.
func (c *DriverConfig) NetworkNames() (names []string) {
	for i := range c.Networks {
		names = append(names, c.Networks[i].Name)
	}
	return names
}

// ShapesNetworks reports whether the driver enforces any network's grants.
func (c *DriverConfig) ShapesNetworks() bool {
	return slices.ContainsFunc(c.Networks, func(n Network) bool { return n.Enforcement != EnforcementNone })
}

// NetworkOf returns the network of a NIC, or nil if none matches it. Patterns do not
// match an uplink.
func (c *DriverConfig) NetworkOf(nic string, uplink bool) *Network {
	for i := range c.Networks {
		if c.Networks[i].matches(nic, uplink) {
			return &c.Networks[i]
		}
	}
	return nil
}

// matches reports whether the network contains a NIC.
func (n *Network) matches(nic string, uplink bool) bool {
	return slices.ContainsFunc(n.Interfaces, func(pattern string) bool {
		if pattern == nic {
			return true
		}
		match, err := path.Match(pattern, nic)
		return err == nil && match && !uplink
	})
}

// Allowed returns what claims can request on a NIC of the network. mtu is the NIC's MTU in bytes.
func (n *Network) Allowed(mtu int32) v1alpha1.AllowedNetwork {
	allowed := v1alpha1.AllowedNetwork{
		Network: n.Name, Modes: n.Allow.Modes, Bursts: n.Allow.Burst, MTU: mtu,
		Sysctls: n.Allow.Sysctls, DHCP: n.Allow.DHCP,
	}
	for _, text := range n.Allow.Subnets {
		if subnet, err := netip.ParsePrefix(text); err == nil { // Validate refuses other texts
			allowed.Subnets = append(allowed.Subnets, subnet.Masked())
		}
	}
	return allowed
}
