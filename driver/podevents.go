// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// maxNote is the length in bytes that event messages are truncated to, so that they and the names before them fit
// into the API's limit of 1024.
const maxNote = 512

// recordEvents records an event on a share's pods whenever a condition of the share differs from the condition in the
// API server: the pod's owner may be able to act. The kubelet reports why a container did not start.
func recordEvents(
	recorder events.EventRecorder,
	claim *resourceapi.ResourceClaim,
	states []shareState,
	entries []resourceapi.AllocatedDeviceStatus,
) {
	for i, entry := range entries {
		before := claimstatus.CurrentConditions(claim, entry)
		for _, c := range entry.Conditions {
			if e, ok := eventFor(meta.FindStatusCondition(before, c.Type), c); ok {
				recordEvent(recorder, claim, states[i], e)
			}
		}
	}
}

// podEvent is an event about a share, without its pods.
type podEvent struct {
	kind, reason, message string
}

// eventFor returns the event for a condition's transition, if it needs one. The reasons Prepared and AttachFailed
// need none: Prepared is part of a start, and reportAttach records each failed attempt.
func eventFor(old *metav1.Condition, c metav1.Condition) (podEvent, bool) {
	starting := func(reason string) bool {
		return reason == v1alpha1.ReasonPrepared || reason == v1alpha1.ReasonAttachFailed
	}
	switch {
	case old != nil && old.Status == c.Status && old.Reason == c.Reason:
		return podEvent{}, false
	case c.Status == metav1.ConditionFalse && !starting(c.Reason):
		return podEvent{corev1.EventTypeWarning, c.Reason, c.Message}, true
	case c.Status == metav1.ConditionTrue && old != nil && !starting(old.Reason):
		return podEvent{corev1.EventTypeNormal, v1alpha1.EventReasonRecovered, c.Type + ": " + c.Message}, true
	default:
		return podEvent{}, false
	}
}

func recordEvent(recorder events.EventRecorder, claim *resourceapi.ResourceClaim, s shareState, e podEvent) {
	pods := slices.Clone(s.unreferenced)
	for _, p := range s.hookNotRun {
		pods = append(pods, p.Pod)
	}
	for _, a := range s.attachments {
		pods = append(pods, a.Pod)
	}
	if s.attacher == nil {
		pods = podConsumers(claim)
	}
	about := claimref.ForEvent(claim)
	for _, pod := range pods {
		recorder.Eventf(podReference(pod), about, e.kind, e.reason, v1alpha1.EventActionShare,
			"claim %s, device %s: %s", claim.Name, s.Device, claimstatus.Truncate(e.message, maxNote))
	}
}

func podReference(pod attach.Pod) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: "v1",
		Kind:       "Pod",
		Namespace:  pod.Namespace,
		Name:       pod.Name,
		UID:        types.UID(pod.UID),
	}
}
