// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/dra-shared/dra-driver-shared/api"
)

func reservedClaim(annotation, driver string, entries ...resourceapi.ResourceClaimConsumerReference) runtime.Object {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "net", Annotations: map[string]string{annotation: "x"},
	}}
	claim.Status.ReservedFor = entries
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Driver: driver}},
	}}
	return claim
}

func waitingPod(gate string) runtime.Object {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "worker", Labels: map[string]string{"scheduling.dra-shared.dev/pod-group-uid": "uid"},
		},
		Spec: corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: gate}}},
	}
}

func TestCheckUninstall(t *testing.T) {
	var (
		pod      = resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "a"}
		job      = resourceapi.ResourceClaimConsumerReference{APIGroup: "batch", Resource: "jobs", Name: "train"}
		terminal = resourceapi.ResourceClaimConsumerReference{
			APIGroup: "scheduling.dra-shared.dev", Resource: "pods", Name: "a",
		}
		native = resourceapi.ResourceClaimConsumerReference{
			APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g",
		}
	)
	const (
		generated = "scheduling.dra-shared.dev/claim"
		annotated = "scheduling.dra-shared.dev/reserved-for"
		other     = "gpu.example.com"
		held      = "the controller holds claims for other objects: ns/net for jobs.batch train (1 in total): delete these"
	)
	for _, tc := range []struct {
		name   string
		object runtime.Object
		want   string // "" if the chart can be removed
	}{
		{"a share of the driver", reservedClaim("", api.DriverName, pod), "claims hold shares: ns/net (1 in total)"},
		{"a device of another driver", reservedClaim("", other, pod), ""},
		{"a Job with a generated claim", reservedClaim(generated, other, pod, job), held},
		{"a Job that an annotation names", reservedClaim(annotated, other, job), held},
		{"a Job that holds the claim of another controller", reservedClaim("", other, job), ""},
		{"a terminal pod in a claim that a PodGroup held", reservedClaim("", other, terminal),
			"ns/net for pods.scheduling.dra-shared.dev a (1 in total)"},
		{"a PodGroup of Kubernetes", reservedClaim(generated, other, native), ""},
		{"a generated claim of a pod", reservedClaim(generated, other, pod), ""},
		{"a pod behind the gate", waitingPod("scheduling.dra-shared.dev/reserved"),
			"pods wait for the controller to remove the scheduling gate scheduling.dra-shared.dev/reserved: " +
				"ns/worker (1 in total): delete them first"},
		{"a pod behind another gate", waitingPod("kueue.x-k8s.io/admission"), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := checkUninstall(t.Context(), fake.NewClientset(tc.object), api.DriverName)
			switch {
			case tc.want == "" && err != nil:
				t.Errorf("got error %v, want none", err)
			case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("got error %v, want %q", err, tc.want)
			}
		})
	}
}
