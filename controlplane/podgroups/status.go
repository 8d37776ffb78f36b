package podgroups

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

// report writes the status, if it is another than it was.
func (r *Reconciler) report(ctx context.Context, g *group) error {
	ready := metav1.Condition{Type: scheduling.ConditionClaimsReady, Status: metav1.ConditionTrue, Reason: "Generated",
		Message: strconv.Itoa(len(g.entries)) + " of " + strconv.Itoa(len(g.entries)) + " claims exist"}
	reserved := metav1.Condition{Type: scheduling.ConditionReserved, Status: metav1.ConditionTrue, Reason: "Held", Message: "the claims stay allocated as long as the PodGroup is there"}
	var statuses []scheduling.PodGroupResourceClaimStatus
	for _, e := range g.entries {
		if others := e.otherHolders(g.owner); len(others) > 0 && ready.Status == metav1.ConditionTrue {
			ready.Reason = ReasonClaimShared
			ready.Message = fmt.Sprintf("ResourceClaim %s is held by PodGroup %s too: both share its devices; name a ResourceClaimTemplate for one of their own", *e.ResourceClaimName, strings.Join(others, ", "))
		}
		if e.problem != nil {
			ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, "ClaimMissing", e.problem.Error()
		}
		first := e.shards[0]
		if first == nil {
			reserved.Status, reserved.Reason, reserved.Message = metav1.ConditionFalse, "NotAllocated", fmt.Sprintf("claim %s does not exist", e.Name)
			continue
		}
		statuses = append(statuses, scheduling.PodGroupResourceClaimStatus{Name: e.Name, ResourceClaimName: &first.Name})
		if message := g.deleted(e); message != "" {
			ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, ReasonClaimDeleted, message
			reserved.Status, reserved.Reason, reserved.Message = metav1.ConditionFalse, ReasonClaimDeleted, message
			continue
		}
		if reason, message := notHeld(first, g.owner); reason != "" {
			reserved.Status, reserved.Reason, reserved.Message = metav1.ConditionFalse, reason, message
		}
	}
	return r.setStatus(ctx, g, statuses, ready, reserved)
}

// ReasonClaimShared is of a PodGroup whose claim is another's too.
const ReasonClaimShared = "ClaimShared"

// ReasonClaimDeleted is of a PodGroup whose claim somebody deletes.
const ReasonClaimDeleted = "ClaimDeleted"

// deleted says what becomes of claims that were deleted, and of the pods that wait
// for them; nothing if none was.
func (g *group) deleted(e *entry) string {
	var going []string
	for _, claim := range e.shards {
		if claim.DeletionTimestamp != nil {
			going = append(going, claim.Name)
		}
	}
	if len(going) == 0 {
		return ""
	}
	then := "it is made anew then"
	if e.ResourceClaimName != nil {
		then = "create it anew then"
	}
	message := "claim " + listed(going) + " was deleted, and pods that come wait until it has gone; " + then
	var pods []string
	for n := range e.shards {
		for _, p := range g.users(e, n) {
			if p.Bound && !p.Terminal {
				pods = append(pods, p.Name)
			}
		}
	}
	if others := e.otherHolders(g.owner); len(others) > 0 {
		message += "; PodGroup " + strings.Join(others, ", ") + " holds it too"
	}
	if len(pods) > 0 {
		message += fmt.Sprintf("; delete the pods of the group that have it, %d: %s", len(pods), listed(pods))
	}
	return message
}

// otherHolders are the groups beside the owner that hold a claim which is there
// by name.
func (e *entry) otherHolders(owner claims.Owner) (names []string) {
	if e.ResourceClaimName == nil || e.shards[0] == nil {
		return nil
	}
	for _, c := range e.shards[0].Status.ReservedFor {
		if (isHolder(c) || claims.IsNativePodGroup(c)) && c.Name != owner.Name && !slices.Contains(names, c.Name) {
			names = append(names, c.Name)
		}
	}
	slices.Sort(names)
	return names
}

// notHeld says why a claim is not held for the group; nothing if it is.
func notHeld(claim *resourceapi.ResourceClaim, owner claims.Owner) (reason, message string) {
	n := len(claim.Status.ReservedFor)
	switch {
	case heldFor(claim, owner):
		return "", ""
	case n >= resourceapi.ResourceClaimReservedForMaxSize:
		return "NoRoom", fmt.Sprintf("claim %s is reserved for %d: there is no room for the group, which would hold it; delete pods that use it", claim.Name, n)
	}
	return "NotAllocated", fmt.Sprintf("claim %s is allocated and held when the first pod of the group gets a node", claim.Name)
}

// heldFor tells whether a claim is reserved for the group, by our entry or by
// Kubernetes' own.
func heldFor(claim *resourceapi.ResourceClaim, owner claims.Owner) bool {
	return slices.ContainsFunc(claim.Status.ReservedFor, func(c resourceapi.ResourceClaimConsumerReference) bool {
		return c.UID == owner.UID || claims.IsNativePodGroup(c) && c.Name == owner.Name
	})
}

func (r *Reconciler) setStatus(ctx context.Context, g *group, statuses []scheduling.PodGroupResourceClaimStatus, conditions ...metav1.Condition) error {
	before := g.DeepCopy()
	g.Status.ResourceClaimStatuses = statuses
	changed := !slices.EqualFunc(before.Status.ResourceClaimStatuses, statuses, func(a, b scheduling.PodGroupResourceClaimStatus) bool {
		return a.Name == b.Name && ptr.Equal(a.ResourceClaimName, b.ResourceClaimName)
	})
	for _, c := range conditions {
		c.ObservedGeneration = g.Generation
		if !meta.SetStatusCondition(&g.Status.Conditions, c) {
			continue
		}
		changed = true
		if c.Status == metav1.ConditionFalse && c.Reason != "NotAllocated" || c.Reason == ReasonClaimShared {
			r.Events.Eventf(g.PodGroup, nil, corev1.EventTypeWarning, c.Reason, "Claims", "%s", c.Message)
		}
	}
	if !changed {
		return nil
	}
	return ignoreBehind(r.Client.Status().Patch(ctx, g.PodGroup, client.MergeFrom(before)))
}
