package reservedfor

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/controlplane/report"
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
		// Without its resourceVersion: events that are alike are one series then.
		about := &corev1.ObjectReference{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}
		r.Events.Eventf(about, nil, corev1.EventTypeWarning, reason, "Hold", "%s", message)
	}
	rows := rowsOf(claim, r.Driver, c)
	if len(rows) == 0 {
		return nil
	}
	return report.Apply(ctx, r.Cluster, claim, report.FieldManagerHolders, rows)
}

// rowsOf are the entries that lack the condition. It is pure.
func rowsOf(claim *resourceapi.ResourceClaim, driver string, c metav1.Condition) (rows []resourceapi.AllocatedDeviceStatus) {
	if claim.Status.Allocation == nil {
		return nil
	}
	told := true
	for _, d := range claim.Status.Allocation.Devices.Results {
		if d.Driver != driver {
			continue
		}
		row := report.Row(d, nil, c)
		rows = append(rows, row)
		told = told && slices.ContainsFunc(claim.Status.Devices, func(s resourceapi.AllocatedDeviceStatus) bool {
			there := meta.FindStatusCondition(s.Conditions, c.Type)
			return s.Driver == row.Driver && s.Pool == row.Pool && s.Device == row.Device && ptr.Equal(s.ShareID, row.ShareID) &&
				there != nil && there.Status == c.Status && there.Reason == c.Reason && there.Message == c.Message
		})
	}
	if told {
		return nil
	}
	return rows
}
