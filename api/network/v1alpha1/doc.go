// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 contains version v1alpha1 of the API group network.dra-shared.dev: AddressPool, the addresses that
// pods' links on a network can have, and AddressBlock, the part of a pool that a node assigns.
//
// Administrators write AddressPools. The node plugins create, shrink, and delete their own node's AddressBlocks. An
// AddressBlock's name contains its network and first address, so two nodes cannot have a block that starts with the
// same address; package ipam describes how other overlaps are prevented.
//
// +kubebuilder:object:generate=true
// +groupName=network.dra-shared.dev
package v1alpha1
