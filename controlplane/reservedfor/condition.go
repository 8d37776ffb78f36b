package reservedfor

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dra-shared/dra-driver-shared/controlplane/report"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// ConditionHeld of a claim's device tells whether the object that the annotation
// names holds the claim.
const ConditionHeld = "Held"

// Reasons of ConditionHeld, and, but for the first, of events.
const (
	ReasonHolderFound     = "HolderFound"
	ReasonHolderUnknown   = "HolderUnknown"
	ReasonHolderForbidden = "HolderForbidden"
	ReasonHolderMissing   = "HolderMissing"
	ReasonHolderInvalid   = "HolderInvalid"
)

// tell says whether the claim is held: in a condition of each of the driver's
// devices that the claim has, and, where it is not, in an event.
func (r *Reconciler) tell(ctx context.Context, claim *resourceapi.ResourceClaim, reason, message string) error {
	c := metav1.Condition{Type: ConditionHeld, Status: metav1.ConditionTrue, Reason: reason, Message: message}
	if reason != ReasonHolderFound {
		c.Status = metav1.ConditionFalse
		r.Events.Eventf(claimref.ForEvent(claim), nil, corev1.EventTypeWarning, reason, "Hold", "%s", message)
	}
	entries := entriesFor(claim, r.Driver, c)
	if claimstatus.Contains(claim, entries) {
		return nil
	}
	return claimstatus.Apply(ctx, r.Cluster, claim, report.FieldManagerHolders, entries)
}

// entriesFor returns a status entry with the condition for each device of the
// driver that is allocated to the claim.
func entriesFor(claim *resourceapi.ResourceClaim, driver string, c metav1.Condition) (entries []resourceapi.AllocatedDeviceStatus) {
	if claim.Status.Allocation == nil {
		return nil
	}
	for _, d := range claim.Status.Allocation.Devices.Results {
		if d.Driver == driver {
			entries = append(entries, claimstatus.NewEntry(d, nil, c))
		}
	}
	return entries
}
