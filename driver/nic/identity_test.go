// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"testing"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

func TestDevice_identity(t *testing.T) {
	for name, tc := range map[string]struct {
		identity    config.Identity
		enforcement config.Enforcement
		link        netdev.LinkState
		want        string
	}{
		"enforced": {
			config.IdentityEnforce, config.EnforcementShape, netdev.LinkState{}, v1alpha1.ReasonIdentityEnforced,
		},
		"audited": {
			config.IdentityAudit, config.EnforcementShape, netdev.LinkState{}, v1alpha1.ReasonIdentityAudited,
		},
		"off": {
			config.IdentityOff, config.EnforcementShape, netdev.LinkState{}, v1alpha1.ReasonIdentityOff,
		},
		"without enforcement": {
			config.IdentityEnforce, config.EnforcementNone, netdev.LinkState{}, v1alpha1.ReasonEnforcementNone,
		},
		"attached earlier": {
			config.IdentityEnforce, config.EnforcementShape, netdev.LinkState{Audited: true}, v1alpha1.ReasonAttachedEarlier,
		},
		"an old kernel": {
			config.IdentityEnforce, config.EnforcementShape, netdev.LinkState{Unchecked: true},
			v1alpha1.ReasonIdentityUnsupported,
		},
		"blocked": {
			config.IdentityEnforce, config.EnforcementShape, netdev.LinkState{Blocked: "changed"}, v1alpha1.ReasonLinkBlocked,
		},
		"changed, and only audited": {
			config.IdentityAudit, config.EnforcementShape, netdev.LinkState{Blocked: "changed"}, v1alpha1.ReasonIdentityAudited,
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := &device{network: &config.Network{Name: "storage", Identity: tc.identity, Enforcement: tc.enforcement}}
			c := d.identityCondition(tc.link)
			if c.Reason != tc.want || (c.Status == "True") != (tc.want == v1alpha1.ReasonIdentityEnforced) || c.Message == "" {
				t.Errorf("condition %+v, want reason %s", c, tc.want)
			}
		})
	}
}

func TestIdentityPolicy_reachesNodeIfNetworkAllows(t *testing.T) {
	for _, allowed := range []bool{false, true} {
		if got := identityPolicy(&config.Network{Allow: config.Allow{Node: allowed}}).ReachesNode; got != allowed {
			t.Errorf("allow.node %t: got %t", allowed, got)
		}
	}
}
