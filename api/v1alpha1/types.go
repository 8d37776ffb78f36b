// Package v1alpha1 is the API group dra-shared.dev/v1alpha1: the opaque
// parameters that a DeviceClass, a ResourceClaim or a ResourceClaimTemplate may
// carry for a share.
package v1alpha1

// Identification of the kinds in this package.
const (
	APIVersion            = "dra-shared.dev/v1alpha1"
	NetworkAttachmentKind = "NetworkAttachment"
	AcceleratorShareKind  = "AcceleratorShare"
)

// NetworkAttachment says how a share of a NIC appears in a pod. Every field is
// optional. A field that a claim leaves out is taken from the DeviceClass;
// what both leave out has a default.
type NetworkAttachment struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`

	// InterfaceName is the link's name in the pod, at most 15 characters.
	// Default: the lowest free net<N>, N >= 1, when the pod starts.
	InterfaceName string `json:"interfaceName,omitempty"`

	// Mode says whether shares of one NIC reach each other. Default: Private.
	Mode Mode `json:"mode,omitempty"`

	// MTU in bytes, at most the NIC's. Default: the NIC's.
	MTU *int32 `json:"mtu,omitempty"`

	// Addresses in CIDR notation (10.20.0.5/24, fd00::5/64), at most 16. A
	// claim with an address serves one pod.
	Addresses []string `json:"addresses,omitempty"`

	// Routes through the link, at most 32.
	Routes []Route `json:"routes,omitempty"`

	// Bandwidth says what the granted bandwidth means.
	Bandwidth *Bandwidth `json:"bandwidth,omitempty"`

	// AdminLink gives a request with adminAccess a link. Without it such a
	// request sees the NICs' attributes and touches nothing. The link is
	// granted nothing: its frames share what is reserved on the NIC for those
	// that cannot be identified. Other requests have a link anyway.
	AdminLink bool `json:"adminLink,omitempty"`
}

func (*NetworkAttachment) kind() string { return NetworkAttachmentKind }

// Mode of a share of a NIC.
type Mode string

// Modes.
const (
	// ModePrivate isolates the shares of a NIC from each other.
	ModePrivate Mode = "Private"
	// ModeBridge lets them reach each other. What they send each other never
	// passes the wire; each receiver's grant still applies, the sender's does not.
	ModeBridge Mode = "Bridge"
)

// Route is a route through the link.
type Route struct {
	// Destination in CIDR notation.
	Destination string `json:"destination"`
	// Gateway is an address on a network of one of the addresses. Without
	// it the destination is on the link.
	Gateway string `json:"gateway,omitempty"`
}

// Bandwidth says what the granted bandwidth means.
type Bandwidth struct {
	// Burst says what happens beyond the grant. Default: Guaranteed.
	Burst Burst `json:"burst,omitempty"`
}

// Burst says what happens beyond the grant.
type Burst string

// Bursts.
const (
	// BurstGuaranteed makes the grant floor and ceiling.
	BurstGuaranteed Burst = "Guaranteed"
	// BurstLine makes the grant a floor; what is idle on the NIC may be borrowed.
	BurstLine Burst = "Line"
)

// FabricMembership is what a container with a share of a fabric reads at the
// path in DRA_SHARED_<REQUEST>_MEMBERSHIP: which fabric it is on, as which
// node, and by which share. All containers of one claim, on whatever node, have
// the same share.
type FabricMembership struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`

	// Fabric is its name, and Attributes are what is published of it.
	Fabric     string            `json:"fabric"`
	Attributes map[string]string `json:"attributes,omitempty"`

	// Node is the name of the node that the container runs on.
	Node string `json:"node"`

	// Request of the claim, and the share's ID: empty if the whole fabric is
	// the claim's.
	Request string `json:"request"`
	ShareID string `json:"shareID,omitempty"`

	// Granted capacities, as decimal numbers (memory: bytes).
	Granted map[string]string `json:"granted,omitempty"`
}

// FabricMembershipKind is the kind of a FabricMembership.
const FabricMembershipKind = "FabricMembership"
