// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// Defaults of a Network and its Policy. Rates are in bits per second.
const (
	defaultShares    = 128
	defaultBandwidth = 100_000_000
	defaultMin       = 10_000_000
	defaultStep      = 10_000_000
)

// SetDefaultsDriverConfig fills in the fields that the administrator did not set.
func SetDefaultsDriverConfig(c *DriverConfig) {
	for i := range c.Networks {
		setDefaultsNetwork(&c.Networks[i])
	}
}

func setDefaultsNetwork(n *Network) {
	if n.Enforcement == "" {
		n.Enforcement = EnforcementShape
	}
	if n.Identity == "" {
		n.Identity = IdentityEnforce
	}
	if n.DuplicateAddressDetection == "" {
		n.DuplicateAddressDetection = DuplicateAddressReport
	}
	if n.Shaping == "" {
		n.Shaping = ShapingSingleQueue
	}
	if n.LinkDown == "" {
		n.LinkDown = TaintNoSchedule
	}
	if n.Shares == nil {
		n.Shares = ptr.To[int32](defaultShares)
	}
	if n.Allow.Modes == nil {
		n.Allow.Modes = []v1alpha1.Mode{v1alpha1.ModePrivate}
	}
	if n.Allow.Burst == nil {
		n.Allow.Burst = []v1alpha1.Burst{v1alpha1.BurstGuaranteed}
	}
	setDefaultsPolicy(&n.Policy)
}

func setDefaultsPolicy(p *Policy) {
	if p.Min == nil {
		p.Min = resource.NewQuantity(defaultMin, resource.DecimalSI)
	}
	if p.Step == nil {
		p.Step = resource.NewQuantity(defaultStep, resource.DecimalSI)
	}
	if p.Default == nil {
		p.Default = resource.NewQuantity(max(defaultBandwidth, p.Min.Value()), resource.DecimalSI)
	}
}
