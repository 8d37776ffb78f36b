// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reservedfor

import (
	"context"
	"encoding/json"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// report writes the condition Held to the status of each device of the driver that is
// allocated to the claim. To a claim without such devices, it writes HeldAnnotation. If that
// changes the condition to False, or its message, it also emits an event on the claim. The
// condition is True if the reason is HolderFound, otherwise False.
func (r *Reconciler) report(ctx context.Context, claim *resourceapi.ResourceClaim, reason, message string) error {
	condition := metav1.Condition{
		Type: v1alpha1.ConditionHeld, Status: metav1.ConditionTrue, Reason: reason, Message: message,
	}
	if reason != v1alpha1.ReasonHolderFound {
		condition.Status = metav1.ConditionFalse
	}
	entries, annotation := entriesFor(claim, r.Driver, condition), ""
	if len(entries) == 0 {
		annotation = reason + ": " + message
	}
	changed := !claimstatus.Contains(claim, entries)
	isNew := changed || annotation != claim.Annotations[scheduling.HeldAnnotation]
	if condition.Status == metav1.ConditionFalse && isNew {
		r.Events.Eventf(claimref.ForEvent(claim), nil, corev1.EventTypeWarning, reason,
			v1alpha1.EventActionHold, "%s", message)
	}
	if changed {
		if err := claimstatus.Apply(ctx, r.Cluster, claim, v1alpha1.FieldManagerHolders, entries); err != nil {
			return err
		}
	}
	return r.annotate(ctx, claim, annotation)
}

// withdraw removes what report has written.
func (r *Reconciler) withdraw(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	if r.hasCondition(claim) {
		if err := claimstatus.Apply(ctx, r.Cluster, claim, v1alpha1.FieldManagerHolders, nil); err != nil {
			return err
		}
	}
	return r.annotate(ctx, claim, "")
}

// hasCondition reports whether a device of the driver has the condition Held.
func (r *Reconciler) hasCondition(claim *resourceapi.ResourceClaim) bool {
	return slices.ContainsFunc(claim.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
		return d.Driver == r.Driver && meta.FindStatusCondition(d.Conditions, v1alpha1.ConditionHeld) != nil
	})
}

// annotate sets the claim's HeldAnnotation, or removes it if the value is empty.
func (r *Reconciler) annotate(ctx context.Context, claim *resourceapi.ResourceClaim, value string) error {
	if claim.Annotations[scheduling.HeldAnnotation] == value {
		return nil
	}
	annotation := map[string]any{scheduling.HeldAnnotation: value}
	if value == "" {
		annotation[scheduling.HeldAnnotation] = nil // a merge patch removes the key
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": claim.UID, "annotations": annotation}})
	if err != nil {
		return err
	}
	object := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: claim.Name}}
	return client.IgnoreNotFound(r.Client.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch)))
}

// entriesFor returns a status entry with the condition for each device of the
// driver that is allocated to the claim.
func entriesFor(
	claim *resourceapi.ResourceClaim, driver string, condition metav1.Condition,
) (entries []resourceapi.AllocatedDeviceStatus) {
	if claim.Status.Allocation == nil {
		return nil
	}
	for _, d := range claim.Status.Allocation.Devices.Results {
		if d.Driver == driver {
			entries = append(entries, claimstatus.NewEntry(d, nil, condition))
		}
	}
	return entries
}
