// Package podclaims answers questions about pods that use ResourceClaims.
package podclaims

import (
	corev1 "k8s.io/api/core/v1"
)

// Names returns the names of the ResourceClaims that the pod's spec refers to by
// name. It omits claims that Kubernetes generates for the pod from a template.
func Names(pod *corev1.Pod) (names []string) {
	for _, c := range pod.Spec.ResourceClaims {
		if c.ResourceClaimName != nil {
			names = append(names, *c.ResourceClaimName)
		}
	}
	return names
}

// IsTerminal reports whether the pod's containers have stopped for good.
func IsTerminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}
