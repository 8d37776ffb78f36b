// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

// ensureNativePodGroup creates, in native mode, the PodGroup of scheduling.k8s.io that corresponds
// to the group: it has the same name and refers to the same claims, all by name. If another object
// has the name, it sets the problem of all shared claims.
//
// It waits for the first pod, because the scheduler requires that the pods of a group
// have the group's priority, which is immutable.
func (r *Reconciler) ensureNativePodGroup(ctx context.Context, g *group) error {
	if r.Mode != mode.Native {
		return nil
	}
	var existing schedulingapi.PodGroup
	err := r.Client.Get(ctx, client.ObjectKeyFromObject(g.PodGroup), &existing)
	if err == nil {
		if problem := nameConflict(g, &existing); problem != nil {
			g.setProblem(problem)
		}
		return nil
	}
	if !apierrors.IsNotFound(err) {
		return err
	}
	if len(g.pods) == 0 {
		return nil
	}
	native := nativePodGroup(g)
	if err := controllerutil.SetControllerReference(g.PodGroup, native, r.Client.Scheme()); err != nil {
		return err
	}
	err = r.Client.Create(ctx, native)
	switch {
	case err == nil:
		klog.FromContext(ctx).V(2).Info("Created native PodGroup", "podGroup", klog.KObj(native))
		return nil
	case apierrors.IsAlreadyExists(err):
		return nil // the cache is stale; an event triggers the next reconcile
	case claims.IsRefused(err):
		g.setProblem(fmt.Errorf("create the PodGroup of scheduling.k8s.io: %w", err))
	}
	if apierrors.IsInvalid(err) || apierrors.IsForbidden(err) {
		return nil // reconciled again after problemRetryInterval
	}
	return err
}

// nameConflict returns an error if the native PodGroup was not created for the group.
func nameConflict(g *group, existing *schedulingapi.PodGroup) error {
	switch {
	case metav1.IsControlledBy(existing, g.PodGroup):
		return nil
	case existing.DeletionTimestamp != nil:
		return fmt.Errorf("the PodGroup of scheduling.k8s.io for an earlier PodGroup %s is being deleted; "+
			"its deletion completes when its pods have ended", g.Name)
	}
	return fmt.Errorf("PodGroup %s of scheduling.k8s.io exists and was not created for this PodGroup: "+
		"delete one of them", g.Name)
}

// nativePodGroup returns the PodGroup of scheduling.k8s.io for a group with pods. It has
// the priority class of the first pod; admission refuses pods with another priority.
func nativePodGroup(g *group) *schedulingapi.PodGroup {
	first := slices.MinFunc(g.pods, func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	native := &schedulingapi.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: g.Namespace, Name: g.Name},
		Spec: schedulingapi.PodGroupSpec{
			SchedulingPolicy:  schedulingapi.PodGroupSchedulingPolicy{Basic: &schedulingapi.BasicSchedulingPolicy{}},
			PriorityClassName: first.Spec.PriorityClassName,
		},
	}
	for _, s := range g.sharedClaims {
		name := s.ResourceClaimName
		if name == nil {
			name = ptr.To(claims.Name(g.owner, s.Name, 0))
		}
		native.Spec.ResourceClaims = append(native.Spec.ResourceClaims,
			schedulingapi.PodGroupResourceClaim{Name: s.Name, ResourceClaimName: name})
	}
	return native
}
