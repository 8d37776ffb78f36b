// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package claimref

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestForEvent_hasNoResourceVersion(t *testing.T) {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "claim", UID: "uid", ResourceVersion: "7"}}
	want := corev1.ObjectReference{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim",
		Namespace: "ns", Name: "claim", UID: "uid"}
	if got := *ForEvent(claim); got != want {
		t.Errorf("event reference of the claim: got %+v, want %+v", got, want)
	}
}

func TestPodReferences(t *testing.T) {
	pod := &corev1.Pod{
		Spec: corev1.PodSpec{ResourceClaims: []corev1.PodResourceClaim{
			{Name: "net", ResourceClaimName: ptr.To("shared")},
			{Name: "gpu", ResourceClaimTemplateName: ptr.To("template")},
			{Name: "again", ResourceClaimName: ptr.To("shared")},
		}},
		Status: corev1.PodStatus{ResourceClaimStatuses: []corev1.PodResourceClaimStatus{
			{Name: "gpu", ResourceClaimName: ptr.To("generated")},
			{Name: "net", ResourceClaimName: ptr.To("shared")},
			{Name: "skipped"},
		}, ExtendedResourceClaimStatus: &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "extended"}},
	}
	for entry, want := range map[string]string{"net": "shared", "gpu": "", "other": ""} {
		if got := Name(pod, entry); got != want {
			t.Errorf("claim name of the pod's entry %q: got %q, want %q", entry, got, want)
		}
	}
	if got, want := Names(pod), []string{"shared", "shared"}; !slices.Equal(got, want) {
		t.Errorf("claim names in the pod's spec: got %q, want %q", got, want)
	}
	if got, want := AllNames(pod), []string{"extended", "generated", "shared"}; !slices.Equal(got, want) {
		t.Errorf("names of all claims of the pod: got %q, want %q", got, want)
	}
	for claim, want := range map[string][]string{"shared": {"net", "again"}, "generated": {"gpu"}, "other": nil} {
		if got := Entries(pod, claim); !slices.Equal(got, want) {
			t.Errorf("entries of the pod for claim %q: got %q, want %q", claim, got, want)
		}
	}
}
