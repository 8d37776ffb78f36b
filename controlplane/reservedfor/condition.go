// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reservedfor

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// report writes the condition Held to the status of each device of the driver that is
// allocated to the claim. If that changes the condition to False, or its message, and if no
// device is allocated, it also emits an event on the claim. The condition is True if the
// reason is HolderFound, otherwise False.
func (r *Reconciler) report(ctx context.Context, claim *resourceapi.ResourceClaim, reason, message string) error {
	condition := metav1.Condition{
		Type: v1alpha1.ConditionHeld, Status: metav1.ConditionTrue, Reason: reason, Message: message,
	}
	if reason != v1alpha1.ReasonHolderFound {
		condition.Status = metav1.ConditionFalse
	}
	entries := entriesFor(claim, r.Driver, condition)
	known := claimstatus.Contains(claim, entries)
	if condition.Status == metav1.ConditionFalse && (!known || len(entries) == 0) {
		r.Events.Eventf(claimref.ForEvent(claim), nil, corev1.EventTypeWarning, reason,
			v1alpha1.EventActionHold, "%s", message)
	}
	if known {
		return nil
	}
	return claimstatus.Apply(ctx, r.Cluster, claim, v1alpha1.FieldManagerHolders, entries)
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
