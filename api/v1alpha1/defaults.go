// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// SetDefaultsNetworkAttachment fills in the fields that neither the claim nor the
// DeviceClass sets. Empty lists become absent: after merging, they have no meaning.
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
}
