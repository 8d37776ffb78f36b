// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package v1beta1 contains version v1beta1 of the API group
// scheduling.dra-shared.dev: PodGroup, a group of pods that share ResourceClaims.
//
// A PodGroup has the fields of the PodGroup of Kubernetes
// (scheduling.k8s.io/v1beta1, KEP-5729) that concern claims, with the same names and
// meanings. The same objects work on all clusters: in bridge mode, in which the
// cluster does not reserve claims for PodGroups, the controller reserves them; in
// native mode, in which Kubernetes does, the controller creates a Kubernetes PodGroup
// for each of the driver's.
//
// +kubebuilder:object:generate=true
// +groupName=scheduling.dra-shared.dev
package v1beta1
