// Package v1alpha1 is the API group config.dra-shared.dev/v1alpha1: what the
// administrator of a cluster writes into the driver's ConfigMap.
package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"

	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// Identification of the kind in this package.
const (
	APIVersion = "config.dra-shared.dev/v1alpha1"
	Kind       = "DriverConfig"
)

// DriverConfig says which devices of the nodes are shared, and how.
type DriverConfig struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`

	// Networks group NICs that are plugged into the same network. A NIC
	// belongs to the first network that names it.
	Networks []Network `json:"networks,omitempty"`

	// Accelerators group devices that are shared by their device nodes.
	Accelerators []Accelerator `json:"accelerators,omitempty"`

	// Fabrics are devices that span nodes.
	Fabrics []Fabric `json:"fabrics,omitempty"`
}

// Network is a group of NICs and the rules for sharing them.
type Network struct {
	// Name of the network, a DNS label; published as the attribute "network".
	Name string `json:"name"`

	// Interfaces are the NICs' names or patterns of names (*, ?, [a-z]).
	// Only what is named here is touched. The NIC with the default route is
	// left alone unless it is named without a pattern.
	Interfaces []string `json:"interfaces"`

	// Bandwidth is the line rate in bits per second, where it is not what
	// the link reports. Links that report none need it.
	Bandwidth *resource.Quantity `json:"bandwidth,omitempty"`

	// Reserve is kept from the line rate, in bits per second: for the node
	// itself, ARP and neighbour discovery, and for what cannot be
	// identified. Default: 1 % of the line rate.
	Reserve *resource.Quantity `json:"reserve,omitempty"`

	// Allow is what claims may ask for.
	Allow Allow `json:"allow,omitempty"`

	// Policy is how bandwidth is requested.
	Policy Policy `json:"policy,omitempty"`

	// Shares is how many shares a NIC can be divided into at the most.
	// Default: 128; at most 3000.
	Shares *int32 `json:"shares,omitempty"`

	// Enforcement of the granted bandwidth. Default: Shape.
	Enforcement Enforcement `json:"enforcement,omitempty"`

	// LinkDown is the effect of the taint on a NIC that has no link. Default:
	// NoSchedule.
	LinkDown TaintEffect `json:"linkDown,omitempty"`

	// TakeOver replaces a root qdisc that somebody else configured.
	TakeOver bool `json:"takeOver,omitempty"`

	// TrustMAC counts frames that were not sent by a socket (forwarded,
	// bridged, a virtual machine's) as the share's whose address they bear.
	// Any pod on the NIC can then send as another.
	TrustMAC bool `json:"trustMAC,omitempty"`
}

// Allow is what claims may ask for.
type Allow struct {
	// Modes; default: Private.
	Modes []params.Mode `json:"modes,omitempty"`
	// Subnets that addresses may be from, in CIDR notation; default: none.
	Subnets []string `json:"subnets,omitempty"`
	// Burst; default: Guaranteed.
	Burst []params.Burst `json:"burst,omitempty"`
}

// Policy is how bandwidth is requested, in bits per second (KEP-5075,
// CapacityRequestPolicy). A request is rounded up to min plus a multiple of
// step. What does not fit a slow link is lowered there.
type Policy struct {
	// Default is what a claim gets that asks for none; default: 100M.
	Default *resource.Quantity `json:"default,omitempty"`
	// Min is the smallest grant; default: 10M.
	Min *resource.Quantity `json:"min,omitempty"`
	// Step; default: 10M.
	Step *resource.Quantity `json:"step,omitempty"`
}

// Enforcement of the granted bandwidth.
type Enforcement string

// Enforcements.
const (
	// EnforcementShape queues what exceeds the grant, in both directions.
	EnforcementShape Enforcement = "Shape"
	// EnforcementNone leaves the NIC's queues alone; grants are bookkeeping.
	EnforcementNone Enforcement = "None"
)

// TaintEffect is what a taint on a device does (resource.k8s.io/v1,
// DeviceTaintEffect).
type TaintEffect string

// Taint effects.
const (
	// TaintNone: no taint.
	TaintNone TaintEffect = "None"
	// TaintNoSchedule: no new claim gets the device.
	TaintNoSchedule TaintEffect = "NoSchedule"
	// TaintNoExecute: pods that have it and do not tolerate that are evicted.
	TaintNoExecute TaintEffect = "NoExecute"
)
