// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package endpoints

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

func TestIsReservedFor(t *testing.T) {
	type entry = resourceapi.ResourceClaimConsumerReference
	for name, tc := range map[string]struct {
		entry entry
		want  bool
	}{
		"the pod":                 {entry{Resource: "pods", Name: "p", UID: "1"}, true},
		"a former pod":            {entry{Resource: "pods", Name: "p", UID: "0"}, false},
		"a former pod, ended":     {entry{APIGroup: scheduling.GroupName, Resource: "pods", Name: "p", UID: "0"}, false},
		"a Job":                   {entry{APIGroup: "batch", Resource: "jobs", Name: "j", UID: "2"}, true},
		"an object of group \"\"": {entry{Resource: "replicationcontrollers", Name: "r", UID: "3"}, true},
	} {
		claim := &resourceapi.ResourceClaim{}
		claim.Status.ReservedFor = []entry{tc.entry}
		if got := isReservedFor(claim, "1"); got != tc.want {
			t.Errorf("%s: isReservedFor returned %t, want %t", name, got, tc.want)
		}
	}
}
