// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

func TestMayRun(t *testing.T) {
	deleted := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	pod := func(change func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(deleted.Add(-time.Hour))}}
		change(p)
		return p
	}
	createdAt := func(created time.Time) *corev1.Pod {
		return pod(func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(created) })
	}
	pending := pod(func(*corev1.Pod) {})
	bound := pod(func(p *corev1.Pod) { p.Spec.NodeName = "n1" })
	gated := pod(func(p *corev1.Pod) {
		p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: scheduling.ReservedGate}}
	})
	rejected := pod(func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
		}}
	})
	for _, tc := range []struct {
		name  string
		pod   *corev1.Pod
		after time.Duration // since the controller saw the deletion of the claim
		want  bool
	}{
		{"bound", bound, time.Hour, true},
		{"behind the gate", gated, 0, false},
		{"created after the deletion", createdAt(deleted.Add(time.Second)), time.Second, false},
		{"created in the second of the deletion", createdAt(deleted), time.Second, true},
		{"rejected, perhaps before the deletion", rejected, time.Second, true},
		{"rejected, after the minimum grace period", rejected, minGracePeriod, false},
		{"not scheduled, after the minimum grace period", pending, minGracePeriod, true},
		{"not scheduled, after the maximum grace period", pending, maxGracePeriod, false},
	} {
		if got := mayRun(tc.pod, deleted, tc.after); got != tc.want {
			t.Errorf("mayRun for a pod that is %s: got %t, want %t", tc.name, got, tc.want)
		}
	}
}
