// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"strings"
	"testing"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

func TestCheckRuleSources(t *testing.T) {
	table := []v1alpha1.PolicyRule{{Source: "10.20.0.0/16", Table: 100}, {Table: 100}}
	for name, tc := range map[string]struct {
		claim v1alpha1.NetworkAttachment
		want  string
	}{
		"an address":  {v1alpha1.NetworkAttachment{PolicyRules: table, Addresses: []string{"10.20.0.5/16"}}, ""},
		"a pool":      {v1alpha1.NetworkAttachment{PolicyRules: table, AddressPools: []string{"office"}}, ""},
		"no rule":     {v1alpha1.NetworkAttachment{}, ""},
		"with source": {v1alpha1.NetworkAttachment{PolicyRules: table[:1]}, ""},
		"no address": {v1alpha1.NetworkAttachment{PolicyRules: table},
			"policyRules[1].source: Required value: the link gets no address"},
	} {
		err := checkRuleSources(&tc.claim)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tc.want)) {
			t.Errorf("%s: got error %v, want %q", name, err, tc.want)
		}
	}
}
