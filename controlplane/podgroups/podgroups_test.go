// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

func TestSharedClaim_chooseShards(t *testing.T) {
	allocated := resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}}
	claim := func(primary string, status resourceapi.ResourceClaimStatus) *resourceapi.ResourceClaim {
		c := &resourceapi.ResourceClaim{Status: status}
		if primary != "" {
			c.Annotations = map[string]string{scheduling.PrimaryAnnotation: primary}
		}
		return c
	}
	pending := resourceapi.ResourceClaimStatus{}
	type shards = map[int]*resourceapi.ResourceClaim
	for name, tc := range map[string]struct {
		shards  shards
		used    []int
		primary int
		needed  []int
	}{
		"no pods":                            {nil, nil, 0, []int{0}},
		"no pods, and a claim of earlier":    {shards{1: claim("true", pending)}, nil, 0, []int{0}},
		"pods of shard 0":                    {shards{0: claim("", pending)}, []int{0}, 0, []int{0}},
		"pods of both":                       {shards{0: claim("", pending)}, []int{0, 1}, 0, []int{0, 1}},
		"only pods of shard 2":               {shards{0: claim("", pending)}, []int{2, 3}, 2, []int{2, 3}},
		"only pods of shard 1, no claim":     {nil, []int{1}, 1, []int{1}},
		"only pods of shard 1, allocated":    {shards{0: claim("", allocated)}, []int{1}, 0, []int{0, 1}},
		"pods of shard 0 came later":         {shards{1: claim("true", allocated)}, []int{0, 1}, 1, []int{0, 1}},
		"pods of the primary shard ended":    {shards{1: claim("true", allocated)}, []int{0}, 1, []int{0, 1}},
		"the primary shard waits for a node": {shards{1: claim("true", pending)}, []int{0, 1}, 1, []int{0, 1}},
		"the primary shard was deallocated": {
			shards{0: claim("", pending), 1: claim("true", pending)}, []int{0}, 0, []int{0},
		},
		"another value of the annotation": {shards{1: claim("false", allocated)}, []int{0, 1}, 0, []int{0, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &sharedClaim{shards: tc.shards}
			s.chooseShards(tc.used)
			if s.primary != tc.primary || !slices.Equal(s.neededShards, tc.needed) {
				t.Errorf("got primary shard %d and needed shards %v, want %d and %v",
					s.primary, s.neededShards, tc.primary, tc.needed)
			}
		})
	}
}
