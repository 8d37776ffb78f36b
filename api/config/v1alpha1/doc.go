// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 contains version v1alpha1 of the API group config.dra-shared.dev: DriverConfig, which the cluster
// administrator writes into an annotation on the driver's pods.
//
// Load decodes a DriverConfig strictly, fills in defaults, and validates it.
//
// +kubebuilder:object:generate=true
// +groupName=config.dra-shared.dev
package v1alpha1
