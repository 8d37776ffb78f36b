// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// Group is the API group of the opaque parameters and of the status data. It is
// also the name of the driver and the domain of its taints and annotations.
const Group = "dra-shared.dev"

// ContainerDir is the directory of the driver's files in containers.
const ContainerDir = "/var/run/" + Group

// DeviceClassName returns the name of the chart's DeviceClass for a driver's devices of a kind.
func DeviceClassName(kind, driver string) string { return kind + "." + driver }

// Prefix of environment variables. The driver sets only variables named after the prefix, the request, an underscore,
// and a variable below, in upper case and with the characters "-", "/", and "." replaced with underscores, such as
// DRA_SHARED_NIC_BANDWIDTH_BITS_PER_SECOND for the request nic. If a request has alternatives, its name is
// request/alternative.
const (
	// EnvironmentPrefix is reserved: parameters and configured edits cannot set variables with names that start with
	// it.
	EnvironmentPrefix = "DRA_SHARED_"
)

// Environment variables of a share. The constants are what follows DRA_SHARED_<REQUEST>_ in their names. For each
// other granted capacity, there is a variable with the capacity's name in upper case and a decimal number as its
// value.
const (
	// EnvironmentBandwidth is the granted bandwidth in bits per second.
	EnvironmentBandwidth = "BANDWIDTH_BITS_PER_SECOND"
	// EnvironmentMemory is the granted memory of an accelerator in bytes.
	EnvironmentMemory = "MEMORY_BYTES"
	// EnvironmentAdminAccess is "true" for a request with admin access, which is not granted anything.
	EnvironmentAdminAccess = "ADMIN_ACCESS"
	// EnvironmentFabric is the name of the fabric that the claim has a share of.
	EnvironmentFabric = "FABRIC"
	// EnvironmentMembership is the path of a file in the container that holds a
	// FabricMembership in JSON.
	EnvironmentMembership = "MEMBERSHIP"
)

// Device kinds. They are the values of the attribute kind.
const (
	// DeviceKindNIC is the kind of a NIC.
	DeviceKindNIC = "nic"
	// DeviceKindAccelerator is the kind of an accelerator.
	DeviceKindAccelerator = "accelerator"
	// DeviceKindFabric is the kind of a fabric.
	DeviceKindFabric = "fabric"
)

// Attributes of all devices. They are in ResourceSlices and in containers' device metadata. A CEL expression reads an
// attribute as device.attributes["dra-shared.dev"].kind. Devices on PCI also have the standard attributes pciBusID,
// pcieRoot, and numaNode of the domain resource.kubernetes.io.
const (
	// AttributeKind (string) is the device kind: nic, accelerator, or fabric.
	AttributeKind = "kind"
	// AttributeDriver (string) is the name of the device's kernel driver. A fabric does not have it.
	AttributeDriver = "driver"
)

// Attributes of NICs.
const (
	// AttributeNetwork (string) is the name of the network in the DriverConfig.
	AttributeNetwork = "network"
	// AttributeResourceName (string) is the network's resourceName in the DriverConfig, which Multus uses to find
	// claims' devices.
	AttributeResourceName = "k8s.cni.cncf.io/resourceName"
	// AttributeInterfaceName (string) is the NIC's name on the node or, in the device metadata, the link's name in the
	// pod.
	AttributeInterfaceName = "interfaceName"
	// AttributeMAC (string) is the NIC's hardware address.
	AttributeMAC = "mac"
	// AttributeMTU (int) is the NIC's maximum transmission unit in bytes.
	AttributeMTU = "mtu"
	// AttributeSpeedMbps (int) is the NIC's line rate in Mbit/s.
	AttributeSpeedMbps = "speedMbps"
	// AttributeSenderKey (string) is the key that the node's kernel uses to identify a frame's sender: NetnsCookie,
	// NetnsCookieOfSocket, or MAC. A NIC without enforcement does not have it.
	AttributeSenderKey = "senderKey"
	// AttributeQueue (string) is the kind of queue that a share's frames wait in: fq_codel, which divides a share's
	// bandwidth fairly between its flows, or bfifo, on kernels without it. A NIC without enforcement does not have it.
	AttributeQueue = "queue"
	// AttributeShaping (string) is the kind of queues that limit shares: htb, one HTB qdisc, or
	// htb-mq, one HTB qdisc for each transmit queue of the NIC. A NIC without enforcement does not
	// have it.
	AttributeShaping = "shaping"
	// AttributeTCX (bool) reports whether the kernel check TCX passed. A NIC without enforcement does
	// not have it.
	AttributeTCX = "tcx"
	// AttributeForwardedByRoute (bool) reports whether the kernel check ForwardedByRoute passed. A NIC
	// without enforcement does not have it.
	AttributeForwardedByRoute = "forwardedByRoute"
	// AttributeARPSender (bool) reports whether the kernel check ARPSender passed. A NIC without
	// enforcement does not have it.
	AttributeARPSender = "arpSender"
	// AttributeSenderLists (bool) reports whether the kernel check SenderLists passed. A NIC without
	// enforcement does not have it.
	AttributeSenderLists = "senderLists"
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
	// AttributeModel (string) is the model name, if the driver reports one.
	AttributeModel = "model"
	// AttributeDriverVersion (version) is the version of the kernel driver.
	AttributeDriverVersion = "driverVersion"
)

// Attributes of fabrics. The DriverConfig can add others.
const (
	// AttributeFabric (string) is the name of the fabric in the DriverConfig.
	AttributeFabric = "fabric"
)

// Attributes of grants. They are only in containers' device metadata.
const (
	// AttributeGrantedPrefix is the prefix of the attributes that report a share's grant, such as grantedBandwidth
	// (int). A grant that is not a whole number is a string.
	AttributeGrantedPrefix = "granted"
)

// Attributes of links. They are only in containers' device metadata.
const (
	// AttributeNameservers (list of strings) lists the DNS servers of the AddressPools or lease that the link's
	// addresses are from.
	AttributeNameservers = "nameservers"
)

// Capacities of devices. Accelerators and fabrics also have the capacities that the DriverConfig names.
const (
	// CapacityBandwidth is a NIC's grantable bandwidth, in bits per second.
	CapacityBandwidth = "bandwidth"
	// CapacityShares is the number of shares that a NIC can be divided into. Each
	// claim consumes one.
	CapacityShares = "shares"
	// CapacityMemory is the memory of an accelerator in bytes.
	CapacityMemory = "memory"
	// CapacityGroups is the number of pod groups that a fabric can serve. Each group consumes one.
	CapacityGroups = "groups"
)

// CapacityUnit returns a capacity's unit in metrics: "bit_per_second", "byte", or "integer" if the project does not
// define its unit.
func CapacityUnit(name string) string {
	switch name {
	case CapacityBandwidth:
		return "bit_per_second"
	case CapacityMemory:
		return "byte"
	default:
		return "integer"
	}
}

// Taints of devices.
const (
	// TaintAbsent (NoSchedule) marks a device that is missing from the node while
	// claims hold shares of it.
	TaintAbsent = Group + "/absent"
	// TaintUnusable (NoSchedule) marks a device that the plugin currently cannot
	// share while claims hold shares of it.
	TaintUnusable = Group + "/unusable"
	// TaintLinkDown marks a NIC that does not have a carrier, or regained it only seconds ago. The network's field
	// linkDown sets the effect.
	TaintLinkDown = Group + "/link-down"
	// TaintSharesHeld (NoSchedule) marks an accelerator that became exclusive
	// while claims hold shares of it.
	TaintSharesHeld = Group + "/shares-held"
)

// Annotations of pods.
const (
	// ClaimReferencesAnnotation selects the containers that get the pod's claims for the driver's devices. Its values
	// are All and Explicit; the default is All.
	ClaimReferencesAnnotation = Group + "/claim-references"
)

// Values of the annotation dra-shared.dev/claim-references.
const (
	// ClaimReferencesAll makes admission add the claims to the containers that do
	// not reference them: a NIC to all containers, any other device only if no
	// container references it.
	ClaimReferencesAll = "All"
	// ClaimReferencesExplicit makes admission leave the containers unchanged.
	ClaimReferencesExplicit = "Explicit"
)

// Field managers. They own elements of a ResourceClaim's status.devices through server-side apply.
const (
	// FieldManagerPlugin writes the status of devices on a node.
	FieldManagerPlugin = "dra-shared-plugin"
	// FieldManagerController writes the status of fabrics.
	FieldManagerController = "dra-shared-controller"
	// FieldManagerHolders writes the condition Held.
	FieldManagerHolders = "dra-shared-controller-holders"
)

// Managers of objects. They are values of the labels endpointslice.kubernetes.io/managed-by and
// app.kubernetes.io/managed-by.
const (
	// ManagedByController marks the controller's EndpointSlices, and the PodGroups that it creates as a dry run.
	ManagedByController = "controller.dra-shared.dev"
)
