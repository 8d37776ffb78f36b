// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// Types of conditions. They appear in status.conditions of an AddressPool.
const (
	// ConditionReady reports whether nodes can take addresses from the pool.
	ConditionReady = "Ready"
	// ConditionShort reports whether the pool has too few unassigned addresses for another block. Nodes then return
	// unused addresses.
	ConditionShort = "Short"
)

// Reasons of the conditions.
const (
	// ReasonValid (Ready True) means that the pool is valid.
	ReasonValid = "Valid"
	// ReasonInvalid (Ready False) means that a field of the pool is invalid.
	ReasonInvalid = "Invalid"
	// ReasonOverlaps (Ready False) means that an older pool on the network has some of the addresses.
	ReasonOverlaps = "Overlaps"
	// ReasonAvailable (Short False) means that the pool has a block for another node.
	ReasonAvailable = "Available"
	// ReasonAssigned (Short True) means that nodes have almost all addresses.
	ReasonAssigned = "Assigned"
)

// Annotations of AddressBlocks.
const (
	// NodeLostAnnotation is the time, in RFC 3339, when the controller saw that the block's node is lost: it does not
	// exist, or has the taint node.kubernetes.io/out-of-service.
	NodeLostAnnotation = GroupName + "/node-lost"
	// UncheckedAnnotation means that the plugin does not know yet whether another block has the addresses. It sets the
	// annotation if the node's pods used them before it created the block, and removes it once it knows.
	UncheckedAnnotation = GroupName + "/unchecked"
)

// Annotations of Services. Such a Service does not have a selector, and the controller writes its EndpointSlices with
// pods' addresses on a network (chart value controller.endpointSlices).
const (
	// ServiceNetworkAnnotation is the name of the network in the DriverConfig.
	ServiceNetworkAnnotation = GroupName + "/network"
	// ServiceSelectorAnnotation is a label selector for the pods, such as app=web.
	ServiceSelectorAnnotation = GroupName + "/selector"
)

// Reasons of the events of Services with the annotations above.
const (
	// EventReasonInvalidService (Warning) means that the Service has no EndpointSlices because one of its fields or
	// annotations is invalid.
	EventReasonInvalidService = "InvalidNetworkService"
	// EventReasonIncompleteEndpoints (Warning) means that the EndpointSlices omit pods because a claim's status lists
	// only some of the pods that use it.
	EventReasonIncompleteEndpoints = "IncompleteEndpoints"
	// EventReasonUnknownNetwork (Warning) means that the Service has no endpoints because the network that it names is
	// not in the driver's configuration.
	EventReasonUnknownNetwork = "UnknownNetwork"
	// EventActionPublish is the action of events about a Service's EndpointSlices.
	EventActionPublish = "PublishEndpoints"
)

// Annotations of pods.
const (
	// NetworkStatusAnnotation is the annotation where Multus lists a pod's networks, and the controller lists its links
	// (chart value controller.networkStatus). See the Kubernetes Network Custom Resource Definition De-facto Standard,
	// version 1.3, section 5.
	NetworkStatusAnnotation = "k8s.v1.cni.cncf.io/network-status"
)
