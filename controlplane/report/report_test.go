package report

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestPodsAreAddedUpAcrossNodes(t *testing.T) {
	pod := func(node string, phase corev1.PodPhase) corev1.Pod {
		return corev1.Pod{Spec: corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{Phase: phase}}
	}
	s := summarize([]corev1.Pod{pod("n1", corev1.PodRunning), pod("n1", corev1.PodRunning), pod("n2", corev1.PodRunning), pod("n3", corev1.PodPending),
		pod("", corev1.PodPending), pod("n4", corev1.PodSucceeded)})
	if s.Pods != 4 || s.Running != 3 || s.Nodes != 2 {
		t.Errorf("%+v", s)
	}
}

func TestOnlyWhatSpansNodesIsReported(t *testing.T) {
	claim := &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{
			{Driver: "d", Pool: "n1", Device: "nic0"},
			{Driver: "other", Pool: "fabric/a", Device: "a"},
			{Driver: "d", Pool: "fabric/a", Device: "a", AdminAccess: ptr.To(true)},
			{Driver: "d", Pool: "fabric/a", Device: "a"},
		}}}}}
	rows, err := rowsOf(claim, Summary{Pods: 2, Running: 1, Nodes: 1}, "d")
	if err != nil || len(rows) != 1 || rows[0].Conditions[0].Status != metav1.ConditionTrue || rows[0].Conditions[0].Message != "1 of 2 pods are running, on 1 nodes" {
		t.Errorf("%+v, %v", rows, err)
	}
	if rows, _ := rowsOf(claim, Summary{Pods: 2}, "d"); rows[0].Conditions[0].Status != metav1.ConditionFalse {
		t.Errorf("%+v", rows)
	}
}
