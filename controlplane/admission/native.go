// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"cmp"
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// scheduledAs is what the pods of a PodGroup of Kubernetes must have in common: if one of them differs, the scheduler
// does not schedule any of them (validatePodGroup of Kubernetes' scheduler).
type scheduledAs struct {
	scheduler     string // "": any, there is no pod yet
	priority      int32
	priorityClass string
	preemption    corev1.PreemptionPolicy // "": any
	policyClass   string                  // the priority class of the preemption policy
}

// checkScheduling denies, in native mode, a pod that would make the scheduler stop scheduling the PodGroup's pods. The
// API server has resolved the priority class of the pod before it calls webhooks.
func (p *Pods) checkScheduling(ctx context.Context, pod *corev1.Pod, group *scheduling.PodGroup) error {
	if p.Mode != mode.Native {
		return nil
	}
	want, err := p.scheduledAs(ctx, group)
	if err != nil || want == nil {
		return err
	}
	got := schedulingOf(pod)
	switch {
	case got.priority != want.priority:
		return denied(reasonPriorityDiffers,
			"spec.priorityClassName: %q has priority %d, but the pods of PodGroup %q have priority %d, "+
				"from the class %q of its first pod: use this class, or another PodGroup",
			got.priorityClass, got.priority, group.Name, want.priority, want.priorityClass)
	case want.scheduler != "" && got.scheduler != want.scheduler:
		return denied(reasonSchedulerDiffers,
			"spec.schedulerName: %q differs from %q, that of the pods of PodGroup %q, which Kubernetes schedules together: "+
				"use this scheduler, or another PodGroup", got.scheduler, want.scheduler, group.Name)
	case want.preemption != "" && got.preemption != want.preemption:
		return denied(reasonPriorityDiffers,
			"spec.preemptionPolicy: %q, from the priority class %q, differs from %q, from the class %q of the pods of "+
				"PodGroup %q: use this class, or another PodGroup",
			got.preemption, got.priorityClass, want.preemption, want.policyClass, group.Name)
	}
	return nil
}

// scheduledAs returns the properties that the PodGroup's pods must have, or nil as long as the PodGroup does not have
// pods or a PodGroup of Kubernetes. The PodGroup of Kubernetes has the priority of the group. It has a preemption
// policy only in clusters with the feature gate PodGroupPreemptionPolicy.
func (p *Pods) scheduledAs(ctx context.Context, group *scheduling.PodGroup) (*scheduledAs, error) {
	other, err := p.activePod(ctx, group)
	if err != nil {
		return nil, err
	}
	want := &scheduledAs{}
	if other != nil {
		want = schedulingOf(other)
	}
	var native schedulingapi.PodGroup
	if err := p.Client.Get(ctx, client.ObjectKeyFromObject(group), &native); err != nil {
		if other == nil {
			want = nil
		}
		return want, client.IgnoreNotFound(err)
	}
	want.priority, want.priorityClass = ptr.Deref(native.Spec.Priority, 0), native.Spec.PriorityClassName
	if policy := native.Spec.PreemptionPolicy; policy != nil {
		want.preemption, want.policyClass = corev1.PreemptionPolicy(*policy), native.Spec.PriorityClassName
	}
	return want, nil
}

// maxExamined limits the pods that activePod searches: a group may have 10,000 pods, and admission compares each with
// another.
const maxExamined = 64

// activePod returns one of the first pods of the PodGroup that has not ended and is not being deleted, or nil.
func (p *Pods) activePod(ctx context.Context, group *scheduling.PodGroup) (*corev1.Pod, error) {
	var pods corev1.PodList
	err := p.Client.List(ctx, &pods, client.InNamespace(group.Namespace), client.Limit(maxExamined),
		client.MatchingLabels{scheduling.GroupUIDLabel: string(group.UID)}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("list the pods of PodGroup %q: %w", group.Name, err)
	}
	for i := range pods.Items {
		if pod := &pods.Items[i]; pod.DeletionTimestamp == nil && !podstatus.IsTerminal(pod) {
			return pod, nil
		}
	}
	return nil, nil
}

// schedulingOf returns the properties of the pod that the other pods of its PodGroup must have,
// too.
func schedulingOf(pod *corev1.Pod) *scheduledAs {
	return &scheduledAs{
		scheduler: cmp.Or(pod.Spec.SchedulerName, corev1.DefaultSchedulerName),
		priority:  ptr.Deref(pod.Spec.Priority, 0), priorityClass: pod.Spec.PriorityClassName,
		preemption:  ptr.Deref(pod.Spec.PreemptionPolicy, corev1.PreemptLowerPriority),
		policyClass: pod.Spec.PriorityClassName,
	}
}
