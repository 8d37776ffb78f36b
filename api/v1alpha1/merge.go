// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"maps"
	"slices"
)

// MergeNetworkAttachments overrides the parameters base, such as a DeviceClass's, with over, such as a claim's. A
// field that over sets replaces the one in base; a list, even an empty one, replaces the whole list. Either argument
// may be nil. The result does not have defaults.
func MergeNetworkAttachments(base, over *NetworkAttachment) *NetworkAttachment {
	merged := &NetworkAttachment{TypeMeta: TypeMeta(NetworkAttachmentKind)}
	for _, a := range []*NetworkAttachment{base.DeepCopy(), over.DeepCopy()} {
		if a == nil {
			continue
		}
		if a.InterfaceName != "" {
			merged.InterfaceName = a.InterfaceName
		}
		if a.Mode != "" {
			merged.Mode = a.Mode
		}
		if a.MTU != nil {
			merged.MTU = a.MTU
		}
		if a.Addresses != nil || a.AddressPools != nil || a.DHCP != nil { // one of them replaces all
			merged.Addresses, merged.AddressPools, merged.DHCP = a.Addresses, a.AddressPools, a.DHCP
		}
		if a.Routes != nil {
			merged.Routes = a.Routes
		}
		if a.PolicyRules != nil {
			merged.PolicyRules = a.PolicyRules
		}
		if a.Neighbors != nil {
			merged.Neighbors = a.Neighbors
		}
		if a.Sysctls != nil {
			merged.Sysctls = a.Sysctls
		}
		if a.Bandwidth != nil && a.Bandwidth.Burst != "" {
			merged.Bandwidth = a.Bandwidth
		}
		if a.KeepAddresses != nil {
			merged.KeepAddresses = a.KeepAddresses
		}
		merged.AdminLink = merged.AdminLink || a.AdminLink
	}
	return merged
}

// MergeAcceleratorShares adds the parameters over, such as a claim's, to base, such as a DeviceClass's. If both set a
// variable, over's value wins. Either argument may be nil.
func MergeAcceleratorShares(base, over *AcceleratorShare) *AcceleratorShare {
	merged := &AcceleratorShare{TypeMeta: TypeMeta(AcceleratorShareKind)}
	for _, a := range []*AcceleratorShare{base, over} {
		if a == nil {
			continue
		}
		if len(a.Environment) > 0 && merged.Environment == nil {
			merged.Environment = map[string]string{}
		}
		maps.Copy(merged.Environment, a.Environment)
		for _, node := range a.DeviceNodes {
			if !slices.Contains(merged.DeviceNodes, node) {
				merged.DeviceNodes = append(merged.DeviceNodes, node)
			}
		}
	}
	return merged
}
