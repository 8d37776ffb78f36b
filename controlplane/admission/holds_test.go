// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"encoding/json"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

func TestHolds_Handle(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := scheduling.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	group := &scheduling.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "team", UID: "1"},
		Spec: scheduling.PodGroupSpec{ResourceClaims: []scheduling.PodGroupResourceClaim{
			{Name: "gpu", ResourceClaimName: ptr.To("gpu")}, {Name: "net", ResourceClaimTemplateName: ptr.To("net")},
		}},
	}
	h := &Holds{APIReader: fake.NewClientBuilder().WithScheme(scheme).WithObjects(group).Build()}
	entry := func(apiGroup, name string, uid types.UID) resourceapi.ResourceClaimConsumerReference {
		return resourceapi.ResourceClaimConsumerReference{APIGroup: apiGroup, Resource: "podgroups", Name: name, UID: uid}
	}
	pod := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "p", UID: "3"}
	raw := func(name string, entries ...resourceapi.ResourceClaimConsumerReference) runtime.RawExtension {
		claim := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
		claim.Status.ReservedFor = entries
		encoded, err := json.Marshal(claim)
		if err != nil {
			t.Fatal(err)
		}
		return runtime.RawExtension{Raw: encoded}
	}
	for _, tc := range []struct {
		name, claim   string
		before, after []resourceapi.ResourceClaimConsumerReference
		want          bool
	}{
		{name: "the PodGroup names the claim", claim: "gpu", want: true,
			after: []resourceapi.ResourceClaimConsumerReference{pod, entry(scheduling.GroupName, "team", "1")}},
		{name: "Kubernetes' entry for the PodGroup is removed", claim: "gpu", want: true,
			before: []resourceapi.ResourceClaimConsumerReference{entry("scheduling.k8s.io", "team", "2")}},
		{name: "the PodGroup names another claim", claim: "other",
			after: []resourceapi.ResourceClaimConsumerReference{entry(scheduling.GroupName, "team", "1")}},
		{name: "the PodGroup has another UID", claim: "gpu",
			after: []resourceapi.ResourceClaimConsumerReference{entry(scheduling.GroupName, "team", "2")}},
		{name: "the PodGroup does not exist", claim: "gpu",
			after: []resourceapi.ResourceClaimConsumerReference{entry(scheduling.GroupName, "none", "1")}},
		{name: "Kubernetes' entry is for a PodGroup of a stranger", claim: "gpu",
			before: []resourceapi.ResourceClaimConsumerReference{entry("scheduling.k8s.io", "none", "2")}},
		{name: "the entry is for a terminal pod", claim: "gpu",
			after: []resourceapi.ResourceClaimConsumerReference{{APIGroup: scheduling.GroupName, Resource: "pods", UID: "1"}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := h.Handle(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
				Namespace: "ns", Name: tc.claim, OldObject: raw(tc.claim, tc.before...), Object: raw(tc.claim, tc.after...),
			}})
			if got.Allowed != tc.want {
				t.Errorf("got allowed %t, %v, want %t", got.Allowed, got.Result, tc.want)
			}
			if !tc.want && !strings.Contains(got.Result.Message, "only for a PodGroup that names it") {
				t.Errorf("got message %q", got.Result.Message)
			}
		})
	}
}
