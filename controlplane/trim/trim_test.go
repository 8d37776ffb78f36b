// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// Admission compares these fields of the pods of a PodGroup.
func TestPod_keepsSchedulingFields(t *testing.T) {
	usual := corev1.PodSpec{
		SchedulerName: "default-scheduler", Priority: ptr.To[int32](0),
		PreemptionPolicy: ptr.To(corev1.PreemptLowerPriority),
	}
	other := corev1.PodSpec{
		SchedulerName: "gang", PriorityClassName: "high", Priority: ptr.To[int32](1000),
		PreemptionPolicy: ptr.To(corev1.PreemptNever),
	}
	for _, tc := range []struct{ spec, want corev1.PodSpec }{
		{usual, corev1.PodSpec{SchedulerName: "default-scheduler"}},
		{other, other},
	} {
		got, err := Pod(&corev1.Pod{Spec: tc.spec})
		if trimmed, ok := got.(*corev1.Pod); err != nil || !ok || cmp.Diff(tc.want, trimmed.Spec) != "" {
			t.Errorf("got %+v, %v, want the spec %+v", got, err, tc.want)
		}
	}
}
