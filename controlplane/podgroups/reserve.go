package podgroups

import (
	"context"
	"errors"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// reserve keeps the claims reserved for whom they should be.
func (r *Reconciler) reserve(ctx context.Context, g *group) (err error) {
	writer := claims.ClaimWriter{Client: r.Client}
	for _, e := range g.entries {
		for n, claim := range e.shards {
			change, problem := r.change(ctx, g, e, n, claim)
			err = errors.Join(err, problem, writer.Apply(ctx, claim, change))
		}
	}
	return err
}

func (r *Reconciler) change(ctx context.Context, g *group, e *entry, n int, claim *resourceapi.ResourceClaim) (claims.Change, error) {
	if claim.DeletionTimestamp != nil {
		return r.giveUp(ctx, g, e, n, claim)
	}
	users := g.users(e, n)
	change := claims.ReservationChange(claim, g.owner, users, r.Mode == mode.Native)
	if !change.Empty() && len(claim.Status.ReservedFor) < resourceapi.ResourceClaimReservedForMaxSize {
		return change, nil
	}
	first, err := r.leftovers(ctx, g, e, claim, users)
	if !first.Empty() {
		return first, err // it may make room for the other
	}
	return change, err
}

// leftovers are changes for pods that use the claim no more.
func (r *Reconciler) leftovers(ctx context.Context, g *group, e *entry, claim *resourceapi.ResourceClaim, users []claims.Pod) (c claims.Change, err error) {
	lookup := claims.PodLookup{APIReader: r.APIReader, ClusterLeavesStaleEntries: r.ClusterLeavesStaleEntries}
	// In native mode the cluster takes care of those that have ended.
	holds := r.Mode == mode.Bridge && claims.IsReservedFor(claim, g.owner.UID)
	if claim.Status.Allocation == nil || !holds && len(lookup.EntriesToCheck(claim)) == 0 {
		return c, nil
	}
	atMost := claims.MaxTerminalPods
	if e.ResourceClaimName != nil { // also pods that are not of the group use it
		more, err := lookup.PodsUsing(ctx, claim)
		if err != nil {
			return c, err
		}
		users = append(users, more...)
	} else if claims.RequestsFabric(&claim.Spec, r.Driver) {
		atMost = claims.MaxPods // those that come get further claims
	}
	gone, err := lookup.DeletedPods(ctx, claim, users)
	if err != nil {
		return c, err
	}
	if !holds {
		users = nil
	}
	return claims.StaleEntriesChange(claim, users, gone, atMost), nil
}

// users are the group's pods that use a shard, the oldest first.
func (g *group) users(e *entry, shard int) (users []claims.Pod) {
	name := g.claimName(e, shard)
	for _, pod := range g.pods {
		if claimref.Name(pod, e.Name) != name {
			continue
		}
		users = append(users, claims.Pod{Name: pod.Name, UID: pod.UID, Bound: pod.Spec.NodeName != "", Terminal: podstatus.IsTerminal(pod), Terminating: pod.DeletionTimestamp != nil,
			Gated: gated(pod), Unschedulable: podstatus.IsUnschedulable(pod)})
	}
	return users
}

func (g *group) claimName(e *entry, shard int) string {
	if e.ResourceClaimName != nil {
		return *e.ResourceClaimName
	}
	return claims.Name(g.owner, e.Name, shard)
}
