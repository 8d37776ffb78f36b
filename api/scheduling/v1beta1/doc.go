// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package v1beta1 contains version v1beta1 of the API group
// scheduling.dra-shared.dev: PodGroup, a group of pods that share ResourceClaims.
//
// A PodGroup has the claim-related fields of the Kubernetes PodGroup (scheduling.k8s.io/v1beta1, KEP-5729), with the
// same names and meanings. The same objects work on all clusters. In bridge mode, where the cluster does not reserve
// claims for PodGroups, the controller reserves them. In native mode, where Kubernetes does, the controller creates a
// Kubernetes PodGroup for each of the driver's.
//
// +kubebuilder:object:generate=true
// +groupName=scheduling.dra-shared.dev
package v1beta1
