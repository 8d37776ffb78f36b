// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// keepAdmitted restores in an update of a pod the changes that admission made when the
// pod was created, and returns warnings for the user. A user who applies the pod's
// manifest again sends the original references to templates, and the API server
// would refuse the change of the pod's claims.
func keepAdmitted(old, pod *corev1.Pod) (warnings []string) {
	if uid, joined := old.Labels[scheduling.GroupUIDLabel]; joined {
		warnings = keepPodGroup(old, pod, uid)
		keepClaims(old, pod)
	}
	keepReferences(old, pod)
	return warnings
}

// keepPodGroup restores the PodGroup with that UID.
func keepPodGroup(old, pod *corev1.Pod, uid string) (warnings []string) {
	pod.Labels, pod.Annotations = notNil(pod.Labels), notNil(pod.Annotations)
	pod.Labels[scheduling.GroupUIDLabel] = uid
	if name, ok := old.Annotations[scheduling.GroupAnnotation]; ok {
		updated, annotated := pod.Annotations[scheduling.GroupAnnotation]
		// The manifest of a user who names the PodGroup in the field does not have the annotation.
		namesByField := !annotated && pod.Spec.SchedulingGroup != nil
		if updated != name && !namesByField {
			warnings = append(warnings, fmt.Sprintf(
				"the pod stays in PodGroup %s: the PodGroup of a pod cannot change after its creation", name))
		}
		pod.Annotations[scheduling.GroupAnnotation] = name
	}
	pod.Spec.SchedulingGroup = old.Spec.SchedulingGroup // it cannot change, and admission may have set or removed it
	return warnings
}

// keepClaims restores the claims that replaced references to templates.
func keepClaims(old, pod *corev1.Pod) {
	for i := range pod.Spec.ResourceClaims {
		c := &pod.Spec.ResourceClaims[i]
		for _, o := range old.Spec.ResourceClaims {
			if c.Name == o.Name && o.ResourceClaimName != nil && c.ResourceClaimTemplateName != nil {
				*c = o
			}
		}
	}
}

// keepReferences restores the references of containers that have fewer now.
func keepReferences(old, pod *corev1.Pod) {
	previous := containersByName(&old.Spec)
	for name, c := range containersByName(&pod.Spec) {
		if o, ok := previous[name]; ok && len(c.Resources.Claims) < len(o.Resources.Claims) {
			c.Resources.Claims = slices.Clone(o.Resources.Claims)
		}
	}
}
