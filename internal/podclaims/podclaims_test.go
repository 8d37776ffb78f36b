package podclaims

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

func TestNames(t *testing.T) {
	pod := &corev1.Pod{Spec: corev1.PodSpec{ResourceClaims: []corev1.PodResourceClaim{
		{Name: "a", ResourceClaimName: ptr.To("first")},
		{Name: "b", ResourceClaimTemplateName: ptr.To("template")},
		{Name: "c", ResourceClaimName: ptr.To("second")},
	}}}
	if got := Names(pod); !slices.Equal(got, []string{"first", "second"}) {
		t.Errorf("Names = %q, want first and second", got)
	}
}

func TestIsTerminal(t *testing.T) {
	for phase, want := range map[corev1.PodPhase]bool{
		"": false, corev1.PodPending: false, corev1.PodRunning: false, corev1.PodUnknown: false,
		corev1.PodSucceeded: true, corev1.PodFailed: true,
	} {
		if got := IsTerminal(&corev1.Pod{Status: corev1.PodStatus{Phase: phase}}); got != want {
			t.Errorf("phase %q: IsTerminal = %t, want %t", phase, got, want)
		}
	}
}
