// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import "k8s.io/utils/ptr"

// defaultPriority is the priority of policy rules: before the kernel's rule for the main table, 32766.
const defaultPriority int32 = 32000

// SetDefaultsNetworkAttachment sets the fields that the claim and the DeviceClass do not set. It removes empty lists,
// which are meaningless after merging.
func SetDefaultsNetworkAttachment(a *NetworkAttachment) {
	if a.Mode == "" {
		a.Mode = ModePrivate
	}
	if a.Bandwidth == nil {
		a.Bandwidth = &Bandwidth{}
	}
	if a.Bandwidth.Burst == "" {
		a.Bandwidth.Burst = BurstGuaranteed
	}
	if len(a.Addresses) == 0 {
		a.Addresses = nil
	}
	if len(a.Routes) == 0 {
		a.Routes = nil
	}
	if len(a.PolicyRules) == 0 {
		a.PolicyRules = nil
	}
	for i := range a.PolicyRules {
		if a.PolicyRules[i].Priority == nil {
			a.PolicyRules[i].Priority = ptr.To(defaultPriority)
		}
	}
	if len(a.Neighbors) == 0 {
		a.Neighbors = nil
	}
	if len(a.Sysctls) == 0 {
		a.Sysctls = nil
	}
}
