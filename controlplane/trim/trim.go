// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package trim keeps data that no part of the controller reads out of the cache: fields of objects,
// because a PodGroup may have thousands of pods, and claims of other drivers. The tests of the
// reconcilers read objects that it trimmed.
package trim

import (
	"unique"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// Pod returns a pod without the fields that no part of the controller reads.
func Pod(object any) (any, error) {
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
			PriorityClassName: pod.Spec.PriorityClassName, SchedulerName: unique.Make(pod.Spec.SchedulerName).Value(),
		},
		Status: corev1.PodStatus{Phase: pod.Status.Phase},
	}
	// Readers treat nil as the usual value, which does not take memory in thousands of pods.
	if ptr.Deref(pod.Spec.Priority, 0) != 0 {
		trimmed.Spec.Priority = pod.Spec.Priority
	}
	if ptr.Deref(pod.Spec.PreemptionPolicy, corev1.PreemptLowerPriority) != corev1.PreemptLowerPriority {
		trimmed.Spec.PreemptionPolicy = pod.Spec.PreemptionPolicy
	}
	if controller := metav1.GetControllerOf(pod); controller != nil && controller.Kind == "Job" {
		trimmed.OwnerReferences = []metav1.OwnerReference{*controller}
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

// PodWithLinks returns a pod without the fields that the publishers of links (package endpoints) do not read. They read
// all pods, whereas the cache with pods that Pod has reduced contains only the pods of PodGroups.
func PodWithLinks(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	trimmed := &corev1.Pod{
		TypeMeta: pod.TypeMeta,
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
			DeletionTimestamp: pod.DeletionTimestamp, Labels: pod.Labels,
		},
		Spec: corev1.PodSpec{
			NodeName: pod.Spec.NodeName, ResourceClaims: pod.Spec.ResourceClaims, Hostname: pod.Spec.Hostname,
			Subdomain: pod.Spec.Subdomain,
		},
		Status: corev1.PodStatus{
			Phase: pod.Status.Phase, ResourceClaimStatuses: pod.Status.ResourceClaimStatuses,
			ExtendedResourceClaimStatus: pod.Status.ExtendedResourceClaimStatus,
		},
	}
	if value, ok := pod.Annotations[network.NetworkStatusAnnotation]; ok {
		trimmed.Annotations = map[string]string{network.NetworkStatusAnnotation: value}
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			trimmed.Status.Conditions = append(trimmed.Status.Conditions, corev1.PodCondition{Type: c.Type, Status: c.Status})
		}
	}
	return trimmed, nil
}

// PodWithClaims returns a pod without the fields that watchers of the pods of single claims (package
// claimpods) do not read.
func PodWithClaims(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	return &corev1.Pod{
		TypeMeta: pod.TypeMeta,
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
			DeletionTimestamp: pod.DeletionTimestamp,
		},
		Spec:   corev1.PodSpec{NodeName: pod.Spec.NodeName, ResourceClaims: pod.Spec.ResourceClaims},
		Status: corev1.PodStatus{Phase: pod.Status.Phase, ResourceClaimStatuses: pod.Status.ResourceClaimStatuses},
	}, nil
}

// Node returns a Node without the fields that no part of the controller reads.
func Node(object any) (any, error) {
	node, ok := object.(*corev1.Node)
	if !ok {
		return object, nil
	}
	return &corev1.Node{
		TypeMeta: node.TypeMeta,
		ObjectMeta: metav1.ObjectMeta{
			Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion, DeletionTimestamp: node.DeletionTimestamp,
		},
		Spec: corev1.NodeSpec{Taints: node.Spec.Taints},
	}, nil
}

// Job returns a Job without the fields that no part of the controller reads.
func Job(object any) (any, error) {
	job, ok := object.(*batchv1.Job)
	if !ok {
		return object, nil
	}
	trimmed := &batchv1.Job{
		TypeMeta: job.TypeMeta,
		ObjectMeta: metav1.ObjectMeta{
			Namespace: job.Namespace, Name: job.Name, UID: job.UID, ResourceVersion: job.ResourceVersion,
			DeletionTimestamp: job.DeletionTimestamp,
		},
	}
	value, ok := job.Spec.Template.Annotations[scheduling.JobClaimsAnnotation]
	if !ok {
		return trimmed, nil
	}
	trimmed.Spec.Suspend, trimmed.Spec.ManagedBy = job.Spec.Suspend, job.Spec.ManagedBy
	trimmed.Spec.Template.Annotations = map[string]string{scheduling.JobClaimsAnnotation: value}
	trimmed.Spec.Template.Spec.ResourceClaims = job.Spec.Template.Spec.ResourceClaims
	trimmed.Status.Conditions = job.Status.Conditions
	return trimmed, nil
}

// StatefulSet returns a StatefulSet without the fields that no part of the controller reads.
func StatefulSet(object any) (any, error) {
	set, ok := object.(*appsv1.StatefulSet)
	if !ok {
		return object, nil
	}
	trimmed := &appsv1.StatefulSet{
		TypeMeta: set.TypeMeta,
		ObjectMeta: metav1.ObjectMeta{
			Namespace: set.Namespace, Name: set.Name, UID: set.UID, ResourceVersion: set.ResourceVersion,
			DeletionTimestamp: set.DeletionTimestamp, OwnerReferences: set.OwnerReferences,
		},
	}
	value, ok := set.Spec.Template.Annotations[scheduling.ReplicaClaimsAnnotation]
	if !ok {
		return trimmed, nil
	}
	trimmed.Spec.Replicas, trimmed.Spec.Ordinals = set.Spec.Replicas, set.Spec.Ordinals
	trimmed.Spec.Template.Annotations = map[string]string{scheduling.ReplicaClaimsAnnotation: value}
	trimmed.Spec.Template.Spec.ResourceClaims = set.Spec.Template.Spec.ResourceClaims
	return trimmed, nil
}
