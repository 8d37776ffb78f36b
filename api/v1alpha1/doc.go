// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 contains version v1alpha1 of the API group dra-shared.dev:
//
//   - NetworkAttachment and AcceleratorShare, the opaque parameters that a
//     DeviceClass, a ResourceClaim, or a ResourceClaimTemplate may carry for a share,
//   - NetworkStatus, NetworkStatusSummary, and FabricStatusSummary, the data that the driver writes into a
//     ResourceClaim's status.devices[].data,
//   - FabricMembership, the file that a container with a share of a fabric reads,
//   - the types and reasons of conditions, and the names of environment variables,
//     attributes, capacities, taints, and annotations.
//
// Decode reads parameters strictly, the Merge functions combine a DeviceClass's with a claim's, the SetDefaults
// functions fill in defaults, and Validate and ValidateFor check the result. Admission and the node plugin call the
// same functions, so the plugin refuses exactly what admission refuses.
//
// +kubebuilder:object:generate=true
// +groupName=dra-shared.dev
package v1alpha1
