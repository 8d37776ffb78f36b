// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package api contains the API types for users and administrators, with one package per API group and version:
//
//   - v1alpha1: the opaque parameters of claims, and the status of their devices,
//   - config/v1alpha1: the configuration of the driver,
//   - network/v1alpha1: address pools for pods' links,
//   - scheduling/v1beta1: groups of pods that share claims.
//
// The parameter and configuration packages also decode, default, and validate their types, so all programs agree on
// the valid values: the node plugin refuses exactly what admission refuses.
package api

import "github.com/dra-shared/dra-driver-shared/api/v1alpha1"

// DriverName is the default name of the driver. The driver publishes devices,
// registers with the kubelet, and finds its parameters in claims under this name.
const DriverName = v1alpha1.Group
