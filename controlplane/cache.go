// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// cacheOptions limits the cache to pods of PodGroups, and to the fields of them
// that the controller reads: a PodGroup may have thousands of pods.
func cacheOptions() (cache.Options, error) {
	inPodGroup, err := labels.NewRequirement(scheduling.GroupUIDLabel, selection.Exists, nil)
	if err != nil {
		return cache.Options{}, err
	}
	return cache.Options{
		DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}: {Label: labels.NewSelector().Add(*inPodGroup), Transform: trimPod},
		},
	}, nil
}

// trimPod returns a pod without the fields that no part of the controller reads.
func trimPod(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	trimmed := &corev1.Pod{
		TypeMeta: pod.TypeMeta,
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
			CreationTimestamp: pod.CreationTimestamp, DeletionTimestamp: pod.DeletionTimestamp,
			Labels:      map[string]string{scheduling.GroupUIDLabel: pod.Labels[scheduling.GroupUIDLabel]},
			Annotations: map[string]string{},
		},
		Spec: corev1.PodSpec{
			NodeName: pod.Spec.NodeName, ResourceClaims: pod.Spec.ResourceClaims, SchedulingGates: pod.Spec.SchedulingGates,
		},
		Status: corev1.PodStatus{Phase: pod.Status.Phase},
	}
	for _, name := range []string{scheduling.GroupAnnotation, scheduling.AdmittedAnnotation} {
		if value, ok := pod.Annotations[name]; ok {
			trimmed.Annotations[name] = value
		}
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			trimmed.Status.Conditions = append(trimmed.Status.Conditions, c)
		}
	}
	return trimmed, nil
}
