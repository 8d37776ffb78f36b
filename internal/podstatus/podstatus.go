// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package podstatus interprets the status of pods.
package podstatus

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// IsTerminal reports whether all containers of the pod have ended and the kubelet
// never starts them again.
func IsTerminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// IsUnschedulable reports whether the scheduler tried to place the pod and did not find a node for it.
func IsUnschedulable(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse &&
			c.Reason == corev1.PodReasonUnschedulable
	})
}
