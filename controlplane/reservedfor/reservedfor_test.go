// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reservedfor

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
)

// describe returns a change as "+added-removed", with "!" for a precondition.
func describe(c claims.Change) string {
	if c.Deallocate {
		return "deallocate"
	}
	text := ""
	for _, entry := range c.Add {
		text += "+" + string(entry.UID)
	}
	for _, uid := range c.Remove {
		text += "-" + string(uid)
	}
	if c.Precondition {
		text += "!"
	}
	return text
}

var (
	train = holderRef{workload.Reference{
		GroupResource: schema.GroupResource{Group: "batch", Resource: "jobs"}, Name: "train",
	}}
	podEntry      = resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "p", UID: "p"}
	terminalEntry = resourceapi.ResourceClaimConsumerReference{
		APIGroup: scheduling.GroupName, Resource: "pods", Name: "e", UID: "e",
	}
	foreignEntry = resourceapi.ResourceClaimConsumerReference{
		APIGroup: "apps", Resource: "deployments", Name: "train", UID: "d",
	}
)

// trainWith returns the owner that corresponds to the holder train with that UID.
func trainWith(uid types.UID) claims.Owner {
	return claims.Owner{
		GroupVersionKind: schema.GroupVersionKind{Group: "batch"}, Resource: "jobs", Name: "train", UID: uid,
	}
}

func claimWith(deleting bool, entries ...resourceapi.ResourceClaimConsumerReference) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{ReservedFor: entries}}
	if deleting {
		claim.DeletionTimestamp = ptr.To(metav1.Now())
	}
	return claim
}

func TestHoldChange(t *testing.T) {
	first := trainWith("1").Reference()
	for _, tc := range []struct {
		name  string
		claim *resourceapi.ResourceClaim
		uid   types.UID
		inUse bool
		want  string
	}{
		{"no pod is bound", claimWith(false, podEntry), "1", false, ""},
		{"a pod is bound", claimWith(false, podEntry), "1", true, "+1"},
		{"the holder has its entry", claimWith(false, first), "1", true, ""},
		{"the holder has its entry, and a pod is terminal", claimWith(false, first, terminalEntry), "1", true, ""},
		{"the claim is being deleted", claimWith(true, podEntry), "1", true, ""},
		{"an earlier object of that name has an entry", claimWith(false, first), "2", true, "+2-1!"},
	} {
		if got := describe(holdChange(tc.claim, train, trainWith(tc.uid), tc.inUse)); got != tc.want {
			t.Errorf("change for an existing holder when %s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestReleaseChange(t *testing.T) {
	first := trainWith("1").Reference()
	for _, tc := range []struct {
		name  string
		claim *resourceapi.ResourceClaim
		want  string
	}{
		{"pods use the claim", claimWith(false, podEntry, first), "-1!"},
		{"only the holder has an entry", claimWith(false, first), "deallocate"},
		{"the claim is being deleted: Kubernetes deallocates it", claimWith(true, first), "-1!"},
		{"the holder never had an entry", claimWith(false, podEntry), ""},
		{"the claim has no entries", claimWith(false), ""},
		{"the other entries are for terminal pods", claimWith(false, first, terminalEntry), "deallocate"},
		{"Kubernetes has removed the holder's entry", claimWith(false, terminalEntry), "deallocate"},
		{"Kubernetes has removed the holder's entry of a deleted claim", claimWith(true, terminalEntry), "-e!"},
		{"an object of another kind has the entry", claimWith(false, foreignEntry), ""},
	} {
		if got := describe(releaseChange(tc.claim, train)); got != tc.want {
			t.Errorf("change for a missing holder when %s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}
