// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// updateStatus writes the status of a group that is not being deleted.
func (r *Reconciler) updateStatus(ctx context.Context, g *group) error {
	if g.awaitsClaim() {
		return r.setStatus(ctx, g, g.claimStatuses(), g.reserved())
	}
	return r.setStatus(ctx, g, g.claimStatuses(), g.claimsReady(), g.reserved())
}

// awaitsClaim reports whether a claim does not exist, and no user needs to change anything: the API server is
// overloaded, for example, and the controller tries again after a moment. The condition ClaimsReady is unchanged.
func (g *group) awaitsClaim() bool {
	return slices.ContainsFunc(g.sharedClaims, func(s *sharedClaim) bool {
		return s.shards[s.primary] == nil && s.problem == nil
	})
}

// claimStatuses returns the names of the claims that exist.
func (g *group) claimStatuses() []scheduling.PodGroupResourceClaimStatus {
	var statuses []scheduling.PodGroupResourceClaimStatus
	for _, s := range g.sharedClaims {
		if primary := s.shards[s.primary]; primary != nil {
			statuses = append(statuses,
				scheduling.PodGroupResourceClaimStatus{Name: s.Name, ResourceClaimName: &primary.Name})
		}
	}
	return statuses
}

// claimsReady returns the condition ClaimsReady. If several shared claims have a problem, it
// describes the last one.
func (g *group) claimsReady() metav1.Condition {
	ready := metav1.Condition{
		Type: scheduling.ConditionClaimsReady, Status: metav1.ConditionTrue, Reason: scheduling.ReasonGenerated,
		Message: fmt.Sprintf("all claims exist (%d)", len(g.sharedClaims)),
	}
	for _, s := range g.sharedClaims {
		others := s.otherHolders(g.owner)
		deleted := s.shards[s.primary] != nil && len(s.deletedClaims()) > 0
		switch {
		case deleted:
			setFalse(&ready, scheduling.ReasonClaimDeleted, g.deletionMessage(s))
		case s.problem != nil:
			setFalse(&ready, scheduling.ReasonClaimMissing, s.problem.Error())
		case len(others) > 0 && ready.Status == metav1.ConditionTrue:
			ready.Reason = scheduling.ReasonClaimShared
			ready.Message = fmt.Sprintf("ResourceClaim %s is also held by PodGroup %s: the groups share its devices; "+
				"use a ResourceClaimTemplate to give each group a claim of its own",
				*s.ResourceClaimName, strings.Join(others, ", "))
		}
	}
	return ready
}

// reserved returns the condition Reserved. If several claims are not held, it describes
// the last one.
func (g *group) reserved() metav1.Condition {
	reserved := metav1.Condition{
		Type: scheduling.ConditionReserved, Status: metav1.ConditionTrue, Reason: scheduling.ReasonHeld,
		Message: "the claims stay allocated as long as the PodGroup exists",
	}
	if g.releaseProblem != nil {
		reserved.Message += fmt.Sprintf("; the annotation %s has no effect: %v",
			scheduling.ReleaseAnnotation, g.releaseProblem)
	}
	for _, s := range g.sharedClaims {
		if reason, message := g.reasonNotReserved(s); reason != "" {
			setFalse(&reserved, reason, message)
		}
	}
	if g.gateProblem != nil {
		setFalse(&reserved, scheduling.ReasonWriteRefused, g.gateProblem.Error())
	}
	return reserved
}

// reasonNotReserved returns the reason why the claims of a shared claim are not held for the group, and a message. The
// reason is "" if they are held.
func (g *group) reasonNotReserved(s *sharedClaim) (reason, message string) {
	primary := s.shards[s.primary]
	switch {
	case g.released != "":
		return scheduling.ReasonReleased,
			"the claims were released: " + g.released + "; the scheduler allocates them again for the next pod of the group"
	case primary == nil:
		return scheduling.ReasonNotAllocated, fmt.Sprintf("claim %s does not exist", s.Name)
	case len(s.deletedClaims()) > 0:
		return scheduling.ReasonClaimDeleted, g.deletionMessage(s)
	case s.reserveProblem != nil:
		return scheduling.ReasonWriteRefused, s.reserveProblem.Error()
	case isHeldFor(primary, g.owner):
		return "", ""
	}
	if l := g.stalled(s); l != nil {
		return scheduling.ReasonUnschedulable, stalledMessage(s, l)
	}
	reason, message = notHeld(primary)
	if pods := g.podsWithoutClaims(); len(pods) > 0 && reason == scheduling.ReasonNotAllocated {
		return scheduling.ReasonNotShared, notSharedMessage(pods)
	}
	return reason, message
}

func setFalse(c *metav1.Condition, reason, message string) {
	c.Status, c.Reason = metav1.ConditionFalse, reason
	c.Message = claimstatus.Truncate(message, claimstatus.MaxMessageLength) // it may have the text of a webhook
}

// deletionMessage describes which of the shards are being deleted, what happens
// next, and which pods the user must delete for it.
func (g *group) deletionMessage(s *sharedClaim) string {
	next := "the controller then generates a new one"
	if s.ResourceClaimName != nil {
		next = "then create it again"
	}
	message := fmt.Sprintf("claim %s was deleted, and new pods wait until the deletion completes; %s",
		abbreviate(s.deletedClaims()), next)
	if others := s.otherHolders(g.owner); len(others) > 0 {
		message += "; it is also held by PodGroup " + strings.Join(others, ", ")
	}
	var pods []string
	for n := range s.shards {
		for _, p := range g.users(s, n) {
			if p.Bound && !p.Terminal {
				pods = append(pods, p.Name)
			}
		}
	}
	if len(pods) > 0 {
		message += fmt.Sprintf("; delete the pods that run with it (%d): %s", len(pods), abbreviate(pods))
	}
	return message
}

// otherHolders returns the sorted names of the other PodGroups that hold a claim that the PodGroup refers to by name.
func (s *sharedClaim) otherHolders(owner claims.Owner) []string {
	if s.ResourceClaimName == nil || s.shards[0] == nil {
		return nil
	}
	var names []string
	for _, c := range s.shards[0].Status.ReservedFor {
		isPodGroup := claims.IsPodGroupEntry(c) || claims.IsNativePodGroup(c)
		if isPodGroup && c.Name != owner.Name && !slices.Contains(names, c.Name) {
			names = append(names, c.Name)
		}
	}
	slices.Sort(names)
	return names
}

// isHeldFor reports whether the claim is reserved for the group, by the controller's entry or by Kubernetes' own.
func isHeldFor(claim *resourceapi.ResourceClaim, owner claims.Owner) bool {
	return slices.ContainsFunc(claim.Status.ReservedFor, func(e resourceapi.ResourceClaimConsumerReference) bool {
		return e.UID == owner.UID || claims.IsNativePodGroup(e) && e.Name == owner.Name
	})
}

// notHeld returns the reason why a claim is not held for the group, and a message.
func notHeld(claim *resourceapi.ResourceClaim) (reason, message string) {
	entries := len(claim.Status.ReservedFor)
	if entries >= resourceapi.ResourceClaimReservedForMaxSize {
		return scheduling.ReasonNoRoom, fmt.Sprintf("claim %s is reserved for %d consumers, which leaves no room "+
			"for the group to hold it: delete pods that use it", claim.Name, entries)
	}
	return scheduling.ReasonNotAllocated, fmt.Sprintf("claim %s is allocated and held when the first pod of the group "+
		"is bound to a node", claim.Name)
}

// podsWithoutClaims returns the names of the pods of the group that are on a node and do not use any of its claims.
func (g *group) podsWithoutClaims() []string {
	var shared []string
	for _, s := range g.sharedClaims {
		for _, claim := range s.shards {
			shared = append(shared, claim.Name)
		}
	}
	var names []string
	for _, pod := range g.pods {
		uses := slices.ContainsFunc(claimref.Names(pod), func(name string) bool { return slices.Contains(shared, name) })
		if !uses && pod.Spec.NodeName != "" && !podstatus.IsTerminal(pod) {
			names = append(names, pod.Name)
		}
	}
	return names
}

func notSharedMessage(pods []string) string {
	return fmt.Sprintf("%d pods of the group run without its claims (%s): an element of their spec.resourceClaims must "+
		"have the name and the template or claim of an element of spec.resourceClaims of the PodGroup; change the pod "+
		"template, and create the pods again", len(pods), abbreviate(pods))
}

// setStatus writes the status if it has changed, and emits an event for each changed
// condition that needs attention.
func (r *Reconciler) setStatus(
	ctx context.Context, g *group, statuses []scheduling.PodGroupResourceClaimStatus, conditions ...metav1.Condition,
) error {
	before := g.DeepCopy()
	g.Status.ResourceClaimStatuses = statuses
	changed := !slices.EqualFunc(before.Status.ResourceClaimStatuses, statuses, isSameClaim)
	for _, c := range conditions {
		c.ObservedGeneration = g.Generation
		if !meta.SetStatusCondition(&g.Status.Conditions, c) {
			continue
		}
		changed = true
		if needsEvent(c) {
			r.Events.Eventf(g.PodGroup, nil, corev1.EventTypeWarning, c.Reason,
				scheduling.EventActionClaims, "%s", c.Message)
		}
	}
	if !changed {
		return nil
	}
	return ignoreStaleCache(r.Client.Status().Patch(ctx, g.PodGroup, client.MergeFrom(before)))
}

func isSameClaim(a, b scheduling.PodGroupResourceClaimStatus) bool {
	return a.Name == b.Name && ptr.Equal(a.ResourceClaimName, b.ResourceClaimName)
}

// needsEvent reports whether the user should look at the condition. NotAllocated and
// Released are the usual states of a group without running pods.
func needsEvent(c metav1.Condition) bool {
	if c.Status == metav1.ConditionFalse {
		return c.Reason != scheduling.ReasonNotAllocated && c.Reason != scheduling.ReasonReleased
	}
	return c.Reason == scheduling.ReasonClaimShared
}
