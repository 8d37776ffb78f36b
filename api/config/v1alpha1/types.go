// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"net/netip"
	"path"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// DriverConfig selects the devices that the driver publishes, and sets the rules for
// sharing them.
//
// +kubebuilder:object:root=true
type DriverConfig struct {
	metav1.TypeMeta `json:",inline"`

	// Networks lists groups of NICs. The first network that matches a NIC applies.
	Networks []Network `json:"networks,omitempty"`

	// Accelerators lists groups of accelerators. The first group that matches a
	// device applies.
	Accelerators []Accelerator `json:"accelerators,omitempty"`

	// Fabrics lists devices that span several nodes.
	Fabrics []Fabric `json:"fabrics,omitempty"`
}

// Network is a group of NICs that are connected to the same network, and the rules
// for sharing them.
type Network struct {
	// Name is the name of the network, a DNS label. It is published as the attribute
	// network of the NICs.
	Name string `json:"name"`

	// Interfaces lists names of NICs, or patterns of names with the wildcards "*",
	// "?", and "[a-z]". The driver does not touch NICs that no entry matches. A
	// pattern does not match the NIC with the default route of the node: to share
	// it, list its exact name.
	Interfaces []string `json:"interfaces"`

	// Bandwidth is the line rate of the NICs in bits per second, a whole number of
	// at least 8. The default is the speed that the link reports. The field is
	// required for links that report no speed.
	Bandwidth *resource.Quantity `json:"bandwidth,omitempty"`

	// Reserve is the part of the line rate that is not granted to shares, in bits
	// per second, less than bandwidth. The node itself, ARP and neighbor discovery,
	// and frames without a known sender use it. The default is 1 % of the line rate.
	Reserve *resource.Quantity `json:"reserve,omitempty"`

	// Allow limits what claims can request in a NetworkAttachment.
	Allow Allow `json:"allow,omitempty"`

	// Policy sets the amounts of bandwidth that claims can request.
	Policy Policy `json:"policy,omitempty"`

	// Shares is the number of shares that one NIC can be divided into, from 1 to
	// 3000. The default is 128.
	Shares *int32 `json:"shares,omitempty"`

	// Enforcement selects how the granted bandwidth is enforced. The default is
	// Shape.
	Enforcement Enforcement `json:"enforcement,omitempty"`

	// LinkDown is the effect of the taint dra-shared.dev/link-down on a NIC without
	// a carrier. The default is NoSchedule.
	LinkDown TaintEffect `json:"linkDown,omitempty"`

	// TakeOver makes the driver replace a root qdisc that it does not manage. Without
	// it, the driver does not use a NIC that has such a qdisc. The default is false.
	TakeOver bool `json:"takeOver,omitempty"`

	// TrustMAC counts frames that no socket on the node sent, such as forwarded or
	// bridged frames or those of a virtual machine, toward the share that has their
	// source address. Any pod on the NIC can then send as another. The default is
	// false.
	TrustMAC bool `json:"trustMAC,omitempty"`
}

// Allow limits what claims can request on a network.
type Allow struct {
	// Modes lists the allowed modes. The default is Private.
	Modes []params.Mode `json:"modes,omitempty"`

	// Subnets lists the networks from which claims can request addresses, such as
	// 10.20.0.0/16. By default, claims cannot request addresses.
	Subnets []string `json:"subnets,omitempty"`

	// Burst lists the allowed values of bandwidth.burst. The default is Guaranteed.
	Burst []params.Burst `json:"burst,omitempty"`
}

// Policy sets the amounts of bandwidth that claims can request, in bits per second
// (KEP-5075, CapacityRequestPolicy). The scheduler rounds a request up to min plus a
// multiple of step. On a NIC that is too slow for the policy, the driver lowers the
// amounts.
type Policy struct {
	// Default is the amount for a claim that requests no bandwidth: min plus a
	// multiple of step. The default is 100M, or min if that is larger.
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
	// EnforcementNone leaves the queues of the NIC unchanged. Grants limit only what
	// the scheduler allocates.
	EnforcementNone Enforcement = "None"
)

// TaintEffect is the effect of a taint on a device (resource.k8s.io/v1,
// DeviceTaintEffect).
type TaintEffect string

// Values of TaintEffect.
const (
	// TaintNone means that the device has no taint.
	TaintNone TaintEffect = "None"
	// TaintNoSchedule prevents the scheduler from allocating the device.
	TaintNoSchedule TaintEffect = "NoSchedule"
	// TaintNoExecute also evicts the pods that use the device and do not tolerate
	// the taint.
	TaintNoExecute TaintEffect = "NoExecute"
)

// NetworkOf returns the network of a NIC, or nil if none matches it.
func (c *DriverConfig) NetworkOf(nic string, hasDefaultRoute bool) *Network {
	for i := range c.Networks {
		if c.Networks[i].matches(nic, hasDefaultRoute) {
			return &c.Networks[i]
		}
	}
	return nil
}

// matches reports whether the network contains a NIC.
func (n *Network) matches(nic string, hasDefaultRoute bool) bool {
	return slices.ContainsFunc(n.Interfaces, func(pattern string) bool {
		if pattern == nic {
			return true
		}
		match, err := path.Match(pattern, nic)
		return err == nil && match && !hasDefaultRoute
	})
}

// Allowed returns what claims can request on a NIC of the network. mtu is the MTU of
// the NIC in bytes.
func (n *Network) Allowed(mtu int32) params.AllowedNetwork {
	allowed := params.AllowedNetwork{Network: n.Name, Modes: n.Allow.Modes, Bursts: n.Allow.Burst, MTU: mtu}
	for _, text := range n.Allow.Subnets {
		if subnet, err := netip.ParsePrefix(text); err == nil { // Validate refuses other texts
			allowed.Subnets = append(allowed.Subnets, subnet.Masked())
		}
	}
	return allowed
}
