package podgroups

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

func TestWhoMayRunWithADeletedClaim(t *testing.T) {
	deleted := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	pod := func(change func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(deleted.Add(-time.Hour))}}
		change(p)
		return p
	}
	unschedulable := pod(func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
	})
	for _, tc := range []struct {
		name  string
		pod   *corev1.Pod
		after time.Duration
		want  bool
	}{
		{"it has a node", pod(func(p *corev1.Pod) { p.Spec.NodeName = "n1" }), time.Hour, true},
		{"it waits behind the gate", pod(func(p *corev1.Pod) {
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: scheduling.ReservedGate}}
		}), 0, false},
		{"it came later", pod(func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(deleted.Add(time.Second)) }), time.Second, false},
		{"it came in the same second", pod(func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(deleted) }), time.Second, true},
		{"nothing fitted it, perhaps before", unschedulable, time.Second, true},
		{"nothing fits it", unschedulable, settling, false},
		{"nobody has said anything of it", pod(func(*corev1.Pod) {}), settling, true},
		{"nobody has said anything of it for long", pod(func(*corev1.Pod) {}), settled, false},
	} {
		if got := mayRun(tc.pod, deleted, deleted.Add(tc.after)); got != tc.want {
			t.Errorf("%s: %t", tc.name, got)
		}
	}
}
