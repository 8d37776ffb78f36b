// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/attach"
)

// A container that references the claim runs although nothing is attached: the runtime does
// not run hooks.
func TestPodsWithoutHook(t *testing.T) {
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	pod := func(change func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u"}}
		p.Spec.NodeName, p.Spec.RuntimeClassName = "n1", ptr.To("gvisor")
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "nic", ResourceClaimName: ptr.To("claim")}}
		p.Spec.Containers = []corev1.Container{
			{Name: "other"},
			{Name: "work", Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "nic"}}}},
		}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "other", State: running}, {Name: "work", State: running}}
		change(p)
		return p
	}
	extended := func(request string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.ResourceClaims, p.Spec.Containers[1].Resources.Claims = nil, nil
			p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{
				ResourceClaimName: "claim",
				RequestMappings:   []corev1.ContainerExtendedResourceRequest{{ContainerName: "other", RequestName: request}},
			}
		}
	}
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		want   []podWithoutHook
	}{
		"running": {
			func(*corev1.Pod) {},
			[]podWithoutHook{{attach.Pod{UID: "u", Namespace: "ns", Name: "p"}, "work", "gvisor"}},
		},
		"waiting":        {func(p *corev1.Pod) { p.Status.ContainerStatuses[1].State = corev1.ContainerState{} }, nil},
		"not referenced": {func(p *corev1.Pod) { p.Spec.Containers[1].Resources.Claims = nil }, nil},
		"on other node":  {func(p *corev1.Pod) { p.Spec.NodeName = "n2" }, nil},
		"being deleted":  {func(p *corev1.Pod) { p.DeletionTimestamp = ptr.To(metav1.Now()) }, nil},
		"other claim":    {func(p *corev1.Pod) { p.Spec.ResourceClaims[0].ResourceClaimName = ptr.To("other") }, nil},
		"other requests": {func(p *corev1.Pod) { p.Spec.Containers[1].Resources.Claims[0].Request = "other" }, nil},
		"extended resource": {
			extended("nic"), []podWithoutHook{{attach.Pod{UID: "u", Namespace: "ns", Name: "p"}, "other", "gvisor"}},
		},
		"other extended resource": {extended("other"), nil},
	} {
		got := podsWithoutHook([]*corev1.Pod{pod(c.change)}, "claim", "nic", "n1")
		if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(podWithoutHook{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
