// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

func TestGroup_reserved(t *testing.T) {
	owner := Owner(&scheduling.PodGroup{ObjectMeta: metav1.ObjectMeta{Name: "g", UID: "g"}})
	native := resourceapi.ResourceClaimConsumerReference{
		APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g", UID: "n",
	}
	full := make([]resourceapi.ResourceClaimConsumerReference, resourceapi.ResourceClaimReservedForMaxSize)
	for _, tc := range []struct {
		name            string
		entries         []resourceapi.ResourceClaimConsumerReference
		reason, message string
	}{
		{"without entries", nil,
			"NotAllocated", "claim net is allocated and held when the first pod of the group is bound"},
		{"with the group's entry", []resourceapi.ResourceClaimConsumerReference{owner.Reference()},
			"Held", "the claims stay"},
		{"with Kubernetes' entry", []resourceapi.ResourceClaimConsumerReference{native}, "Held", "the claims stay"},
		{"that is full", full,
			"NoRoom", "claim net is reserved for 256 consumers, which leaves no room for the group"},
	} {
		claim := &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Name: "net"},
			Status:     resourceapi.ResourceClaimStatus{ReservedFor: tc.entries},
		}
		g := groupWith()
		g.owner, g.sharedClaims[0].shards[0] = owner, claim
		if got := g.reserved(); got.Reason != tc.reason || !strings.HasPrefix(got.Message, tc.message) {
			t.Errorf("condition Reserved for a claim %s: got %s: %s, want %s: %s...",
				tc.name, got.Reason, got.Message, tc.reason, tc.message)
		}
	}
}

// Admission only warns if a pod's claim name differs from the PodGroup's entry, and a Deployment ignores the warning.
func TestGroup_reserved_podsWithoutClaims(t *testing.T) {
	bound := func(name, claim string) *corev1.Pod {
		pod := testPod(name, claim)
		bind(pod)
		return pod
	}
	terminal := bound("t", "other")
	succeed(terminal)
	for _, tc := range []struct {
		name string
		pods []*corev1.Pod
		want string // "" if the group waits for its first pod
	}{
		{"without pods", nil, ""},
		{"with a pod that waits for a node", []*corev1.Pod{testPod("a", "other")}, ""},
		{"with a terminal pod", []*corev1.Pod{terminal}, ""},
		{"with a bound pod that uses the claim", []*corev1.Pod{bound("a", "net")}, ""},
		{"with bound pods that use another claim", []*corev1.Pod{bound("a", "other"), bound("b", "net"), bound("c", "x")},
			"2 pods of the group run without its claims (a, c)"},
	} {
		g := groupWith(tc.pods...)
		g.sharedClaims[0].shards[0] = testClaim("net")
		reason := scheduling.ReasonNotShared
		if tc.want == "" {
			reason, tc.want = scheduling.ReasonNotAllocated, "claim net is allocated and held when"
		}
		got := g.reserved()
		if got.Reason != reason || !strings.HasPrefix(got.Message, tc.want) || needsEvent(got) != (reason == "NotShared") {
			t.Errorf("condition Reserved of a group %s: got %s: %s, want %s: %s...",
				tc.name, got.Reason, got.Message, reason, tc.want)
		}
	}
}
