// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 contains version v1alpha1 of the API group network.dra-shared.dev:
// AddressPool, the addresses that the links of pods on a network can have, and
// AddressBlock, the part of a pool that a node assigns.
//
// Administrators write AddressPools. The node plugins create, shrink, and delete the
// AddressBlocks of their own node. The name of an AddressBlock contains its network and
// its first address, so that two nodes cannot have a block that starts with the same
// address; package ipam describes how blocks that overlap otherwise are prevented.
//
// +kubebuilder:object:generate=true
// +groupName=network.dra-shared.dev
package v1alpha1
