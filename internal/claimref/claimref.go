// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package claimref resolves references to ResourceClaims in pods' spec.resourceClaims, and builds references to them
// for events' related objects. It also recognizes references to pods in claims' status.reservedFor.
package claimref

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// ForEvent returns a reference to the claim for use in events. The reference has no
// resourceVersion: the recorder merges repeated events into one series only if
// their references are equal, and the claim's status changes all the time.
func ForEvent(claim *resourceapi.ResourceClaim) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim",
		Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
	}
}

// Name returns the claim name in the pod's spec.resourceClaims entry of that name. It returns "" if the pod does not
// have the entry, or if the entry refers to a template.
func Name(pod *corev1.Pod, entry string) string {
	for _, c := range pod.Spec.ResourceClaims {
		if c.Name == entry {
			return ptr.Deref(c.ResourceClaimName, "")
		}
	}
	return ""
}

// Names returns the names of all claims in the pod's spec, except claims that Kubernetes generates from templates.
func Names(pod *corev1.Pod) []string {
	var names []string
	for _, c := range pod.Spec.ResourceClaims {
		if c.ResourceClaimName != nil {
			names = append(names, *c.ResourceClaimName)
		}
	}
	return names
}

// AllNames returns the names of all claims of the pod, each once: the claims that its spec names, and the
// claims that Kubernetes generated from templates and for extended resources (KEP-5004).
func AllNames(pod *corev1.Pod) []string {
	names := Names(pod)
	for _, s := range pod.Status.ResourceClaimStatuses {
		if s.ResourceClaimName != nil {
			names = append(names, *s.ResourceClaimName)
		}
	}
	if s := pod.Status.ExtendedResourceClaimStatus; s != nil {
		names = append(names, s.ResourceClaimName)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// MayHave reports whether the pod names claims, or has one for extended resources.
func MayHave(pod *corev1.Pod) bool {
	return len(pod.Spec.ResourceClaims) > 0 || pod.Status.ExtendedResourceClaimStatus != nil
}

// Entries returns the names of the pod's spec.resourceClaims entries that refer to the claim: by its name, or by the
// template that Kubernetes generated it from.
func Entries(pod *corev1.Pod, claim string) []string {
	var entries []string
	add := func(entry string, name *string) {
		if name != nil && *name == claim && !slices.Contains(entries, entry) {
			entries = append(entries, entry)
		}
	}
	for _, c := range pod.Spec.ResourceClaims {
		add(c.Name, c.ResourceClaimName)
	}
	for _, s := range pod.Status.ResourceClaimStatuses {
		add(s.Name, s.ResourceClaimName)
	}
	return entries
}

// IsPodEntry reports whether the entry of a claim's status.reservedFor is for a pod.
func IsPodEntry(entry resourceapi.ResourceClaimConsumerReference) bool {
	return entry.APIGroup == "" && entry.Resource == "pods"
}
