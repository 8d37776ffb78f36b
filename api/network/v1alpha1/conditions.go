// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// Types of conditions. They appear in status.conditions of an AddressPool.
const (
	// ConditionReady reports whether nodes can take addresses from the pool.
	ConditionReady = "Ready"
	// ConditionShort reports whether the pool has too few unassigned addresses for
	// another block. Nodes then return the addresses that they do not use.
	ConditionShort = "Short"
)

// Reasons of the conditions.
const (
	// ReasonValid (Ready True) means that the pool is valid.
	ReasonValid = "Valid"
	// ReasonInvalid (Ready False) means that a field of the pool is invalid.
	ReasonInvalid = "Invalid"
	// ReasonOverlaps (Ready False) means that an older pool of the network has some
	// of the addresses.
	ReasonOverlaps = "Overlaps"
	// ReasonAvailable (Short False) means that the pool has a block for another node.
	ReasonAvailable = "Available"
	// ReasonAssigned (Short True) means that nodes have almost all addresses.
	ReasonAssigned = "Assigned"
)

// Annotations of AddressBlocks.
const (
	// NodeLostAnnotation is the time, in RFC 3339, at which the controller saw that the node
	// of the block is lost: it does not exist, or has the taint
	// node.kubernetes.io/out-of-service.
	NodeLostAnnotation = GroupName + "/node-lost"
	// UncheckedAnnotation means that the plugin does not know yet whether another block has
	// the addresses. It sets the annotation if pods of the node used them before it created
	// the block, and removes it.
	UncheckedAnnotation = GroupName + "/unchecked"
)

// Annotations of Services. Such a Service has no selector, and the controller writes its EndpointSlices
// with the addresses of pods on a network (controller.endpointSlices of the chart).
const (
	// ServiceNetworkAnnotation is the name of the network in the DriverConfig.
	ServiceNetworkAnnotation = GroupName + "/network"
	// ServiceSelectorAnnotation is a label selector for the pods, such as app=web.
	ServiceSelectorAnnotation = GroupName + "/selector"
)

// Reasons of the events of Services with the annotations above.
const (
	// EventReasonInvalidService (Warning) means that the Service has no EndpointSlices, because a
	// field or an annotation of it is invalid.
	EventReasonInvalidService = "InvalidNetworkService"
	// EventReasonIncompleteEndpoints (Warning) means that the EndpointSlices omit pods, because the
	// status of a claim lists only some of the pods that use it.
	EventReasonIncompleteEndpoints = "IncompleteEndpoints"
	// EventReasonUnknownNetwork (Warning) means that the configuration of the driver has no network of the name
	// that the Service has, so that the Service has no endpoints.
	EventReasonUnknownNetwork = "UnknownNetwork"
	// EventActionPublish is the action of events about the EndpointSlices of a Service.
	EventActionPublish = "PublishEndpoints"
)

// Annotations of pods.
const (
	// NetworkStatusAnnotation is the annotation in which Multus lists the networks of a pod, and
	// the controller the links (controller.networkStatus of the chart). See the Kubernetes Network
	// Custom Resource Definition De-facto Standard, version 1.3, section 5.
	NetworkStatusAnnotation = "k8s.v1.cni.cncf.io/network-status"
)
