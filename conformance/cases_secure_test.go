// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"testing"

	rbac "k8s.io/api/rbac/v1"
)

func TestCheckRule(t *testing.T) {
	for _, test := range []struct {
		name, driver, group, resource, verb string
		permitted                           bool
	}{
		{"slices", "nic.example.com", "resource.k8s.io", "resourceslices", "create", true},
		{"slices of another group", "nic.example.com", "example.org", "resourceslices", "create", false},
		{"read nodes", "nic.example.com", "", "nodes", "get", true},
		{"write nodes", "nic.example.com", "", "nodes", "update", false},
		{"read secrets", "nic.example.com", "", "secrets", "get", false},
		{"read logs", "nic.example.com", "", "pods/log", "get", false},
		{"the group of the driver's name", "nic.example.com", "nic.example.com", "pools", "update", true},
		{"a group below the driver's name", "nic.example.com", "v2.nic.example.com", "pools", "update", true},
		{"a group next to the driver's name", "nic.example.com", "net.example.com", "pools", "update", true},
		{"a group that ends like the domain", "nic.example.com", "badexample.com", "pools", "update", false},
		{"a top-level domain", "dra.net", "other.net", "pools", "update", false},
		{"a group of Kubernetes", "example.k8s.io", "rbac.k8s.io", "roles", "update", false},
		{"a wildcard", "nic.example.com", "nic.example.com", "*", "get", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := checkRule(test.driver, rbac.PolicyRule{
				APIGroups: []string{test.group}, Resources: []string{test.resource}, Verbs: []string{test.verb},
			})
			if (err == nil) != test.permitted {
				t.Errorf("got error %v, want permitted %v", err, test.permitted)
			}
		})
	}
}
