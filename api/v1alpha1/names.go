package v1alpha1

// Group is the API group of the opaque parameters and of the status data. It is
// also the name of the driver and the domain of its taints and annotations.
const Group = "dra-shared.dev"

// EnvironmentPrefix starts the names of all environment variables that the
// driver sets in containers. Parameters and configured edits must not use it.
//
// The name of each variable continues with the name of the request and an
// underscore, in upper case and with the characters "-", "/", and "." replaced
// by underscores, such as DRA_SHARED_NIC_BANDWIDTH_BITS_PER_SECOND for the
// request nic. A request with alternatives is named request/alternative.
const EnvironmentPrefix = "DRA_SHARED_"

// Environment variables of a share: what follows DRA_SHARED_<REQUEST>_. Besides
// these there is one variable per granted capacity, named after the capacity in
// upper case, whose value is a decimal number.
const (
	// EnvironmentBandwidth is the granted bandwidth in bits per second.
	EnvironmentBandwidth = "BANDWIDTH_BITS_PER_SECOND"
	// EnvironmentMemory is the granted memory of an accelerator in bytes.
	EnvironmentMemory = "MEMORY_BYTES"
	// EnvironmentAdminAccess is "true" for a request with admin access, which is
	// granted nothing.
	EnvironmentAdminAccess = "ADMIN_ACCESS"
	// EnvironmentFabric is the name of the fabric of which the claim has a share.
	EnvironmentFabric = "FABRIC"
	// EnvironmentMembership is the path of a file in the container that holds a
	// FabricMembership in JSON.
	EnvironmentMembership = "MEMBERSHIP"
)

// Values of AttributeKind.
const (
	DeviceKindNIC         = "nic"
	DeviceKindAccelerator = "accelerator"
	DeviceKindFabric      = "fabric"
)

// Attributes of devices of every kind, in ResourceSlices and in the device
// metadata of containers. They have no domain: in CEL, write
// device.attributes["dra-shared.dev"].kind. Devices on PCI also have the standard
// attributes resource.kubernetes.io/pciBusID, pcieRoot, and numaNode.
const (
	// AttributeKind (string) is the device kind: nic, accelerator, or fabric.
	AttributeKind = "kind"
	// AttributeDriver (string) is the name of the kernel driver of the device. A
	// fabric does not have it.
	AttributeDriver = "driver"
)

// Attributes of NICs.
const (
	// AttributeNetwork (string) is the name of the network in the DriverConfig.
	AttributeNetwork = "network"
	// AttributeInterfaceName (string) is the name of the NIC on the node, and in
	// the device metadata the name of the link in the pod.
	AttributeInterfaceName = "interfaceName"
	// AttributeMAC (string) is the hardware address of the NIC.
	AttributeMAC = "mac"
	// AttributeMTU (int) is the maximum transmission unit of the NIC in bytes.
	AttributeMTU = "mtu"
	// AttributeSpeedMbps (int) is the line rate of the NIC in Mbit/s.
	AttributeSpeedMbps = "speedMbps"
)

// Attributes of accelerators.
const (
	// AttributeAccelerator (string) is the name of the accelerator group in the
	// DriverConfig.
	AttributeAccelerator = "accelerator"
	// AttributeVendor (string) is the PCI vendor ID, such as 10de.
	AttributeVendor = "vendor"
	// AttributeDevice (string) is the PCI device ID, such as 2335.
	AttributeDevice = "device"
	// AttributeModel (string) is the name of the model, if its driver reports one.
	AttributeModel = "model"
	// AttributeDriverVersion (version) is the version of the kernel driver.
	AttributeDriverVersion = "driverVersion"
)

// Attributes of fabrics, besides those that the DriverConfig sets.
const (
	// AttributeFabric (string) is the name of the fabric in the DriverConfig.
	AttributeFabric = "fabric"
)

// AttributeGrantedPrefix starts the names of the attributes that report the grant
// of a share in the device metadata of containers, such as grantedBandwidth (int).
// A grant that is not a whole number is a string.
const AttributeGrantedPrefix = "granted"

// Capacities of devices. Accelerators and fabrics have the further capacities
// that the DriverConfig names.
const (
	// CapacityBandwidth is the bandwidth of a NIC that can be granted, in bits
	// per second.
	CapacityBandwidth = "bandwidth"
	// CapacityShares is the number of shares that a NIC can be divided into. Each
	// claim consumes one.
	CapacityShares = "shares"
	// CapacityMemory is the memory of an accelerator in bytes.
	CapacityMemory = "memory"
	// CapacityGroups is the number of groups of pods that a fabric can serve.
	// Each group consumes one.
	CapacityGroups = "groups"
)

// Keys of the taints of devices.
const (
	// TaintAbsent (NoSchedule) marks a device that is missing from the node while
	// claims hold shares of it.
	TaintAbsent = Group + "/absent"
	// TaintLinkDown marks a NIC that has no carrier, or regained it only seconds
	// ago. The field linkDown of the network sets the effect.
	TaintLinkDown = Group + "/link-down"
	// TaintSharesHeld (NoSchedule) marks an accelerator that became exclusive
	// while claims hold shares of it.
	TaintSharesHeld = Group + "/shares-held"
)

// ClaimReferencesAnnotation on a pod selects the containers that get the pod's
// claims of the driver. Its values are All and Explicit; the default is All.
const ClaimReferencesAnnotation = Group + "/claim-references"

// Values of ClaimReferencesAnnotation.
const (
	// ClaimReferencesAll makes admission add the claims to the containers that do
	// not reference them: a NIC to all containers, any other device only if no
	// container references it.
	ClaimReferencesAll = "All"
	// ClaimReferencesExplicit leaves the containers as the pod's author wrote
	// them.
	ClaimReferencesExplicit = "Explicit"
)

// Field managers of status.devices of a ResourceClaim. Server-side apply keeps
// their entries apart.
const (
	// FieldManagerPlugin writes the status of devices on a node.
	FieldManagerPlugin = "dra-shared-plugin"
	// FieldManagerController writes the status of fabrics.
	FieldManagerController = "dra-shared-controller"
	// FieldManagerHolders writes the condition Held.
	FieldManagerHolders = "dra-shared-controller-holders"
)
