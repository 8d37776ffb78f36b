// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"context"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
)

// reserve updates status.reservedFor of the group's claims. It sets the reserveProblem of a claim if the API server
// refuses that.
func (r *Reconciler) reserve(ctx context.Context, g *group) error {
	var errs error
	for _, s := range g.sharedClaims {
		for n, claim := range s.shards {
			change, err := r.claimChange(ctx, g, s, n)
			written := r.writer().Apply(ctx, claim, change)
			if claims.IsRefused(written) {
				s.reserveProblem = fmt.Errorf("the API server refuses a change of the reservations of ResourceClaim %s: %w; "+
					"change the webhook or the policy that the error names", claim.Name, written)
			}
			errs = errors.Join(errs, err, written)
		}
	}
	return errs
}

// claimChange returns the next change of the entries of shard n.
func (r *Reconciler) claimChange(ctx context.Context, g *group, s *sharedClaim, n int) (claims.Change, error) {
	claim := s.shards[n]
	if claim.DeletionTimestamp != nil {
		return r.deletedClaimChange(ctx, g, s, n)
	}
	users := g.users(s, n)
	isPrimary := n == s.primary
	if isPrimary && g.mustReallocatePrimary(s) {
		return claims.ReleaseChange(claim, g.UID, true), nil
	}
	change := claims.ReservationChange(claim, g.owner, users, claims.ReservationOptions{
		Native: r.Mode == mode.Native, Pinned: isPrimary && g.hasBoundShards(s),
	})
	full := len(claim.Status.ReservedFor) >= resourceapi.ResourceClaimReservedForMaxSize
	if !change.Empty() && !full {
		return change, nil
	}
	// The removal of stale entries makes room for others, so it comes first.
	stale, err := r.staleEntriesChange(ctx, g, s, claim, users)
	if !stale.Empty() {
		return stale, err
	}
	return change, err
}

// staleEntriesChange returns the change that maintains the claim's stale entries. The
// users are the group's pods that use the claim.
func (r *Reconciler) staleEntriesChange(
	ctx context.Context, g *group, s *sharedClaim, claim *resourceapi.ResourceClaim, users []claims.PodState,
) (claims.Change, error) {
	lookup := claims.PodLookup{APIReader: r.APIReader, ClusterLeavesStaleEntries: r.ClusterLeavesStaleEntries}
	// In native mode, the cluster handles terminal pods.
	holds := r.Mode == mode.Bridge && claims.IsReservedFor(claim, g.owner.UID)
	if claim.Status.Allocation == nil || !holds && len(lookup.EntriesToCheck(claim)) == 0 {
		return claims.Change{}, nil
	}
	maxTerminal := claims.MaxTerminalPods
	switch {
	case s.ResourceClaimName != nil:
		// Pods outside the group may use the claim too.
		others, err := lookup.PodsUsing(ctx, claim)
		if err != nil {
			return claims.Change{}, err
		}
		users = append(users, others...)
	default:
		isFabric, err := claims.RequestsFabric(&claim.Spec, r.Driver, r.deviceClass(ctx))
		if err != nil {
			return claims.Change{}, err
		}
		if isFabric {
			maxTerminal = claims.MaxPods // new pods get new shards
		}
	}
	deleted, err := lookup.DeletedPods(ctx, claim, users)
	if err != nil {
		return claims.Change{}, err
	}
	if !holds {
		users = nil // no entries are added
	}
	return claims.StaleEntriesChange(claim, users, deleted, maxTerminal), nil
}

// deviceClass returns a function that returns a DeviceClass, or nil if it does not exist.
func (r *Reconciler) deviceClass(ctx context.Context) func(string) (*resourceapi.DeviceClass, error) {
	return func(name string) (*resourceapi.DeviceClass, error) {
		var class resourceapi.DeviceClass
		err := r.Client.Get(ctx, types.NamespacedName{Name: name}, &class)
		if apierrors.IsNotFound(err) {
			return nil, nil
		}
		return &class, err
	}
}

// users returns the group's pods that use shard n.
func (g *group) users(s *sharedClaim, n int) []claims.PodState {
	name := g.claimName(s, n)
	var users []claims.PodState
	for _, pod := range g.pods {
		if claimref.Name(pod, s.Name) != name {
			continue
		}
		users = append(users, claims.PodStateOf(pod))
	}
	return users
}

// mustReallocatePrimary reports whether the scheduler does not find a node for the shards' pods, and the primary shard
// does not have pods: the scheduler deallocates only claims of pods that it schedules.
func (g *group) mustReallocatePrimary(s *sharedClaim) bool {
	var waiting []claims.PodState
	for n := range s.shards {
		switch {
		case g.hasBoundUsers(s, n):
			return false
		case n != s.primary:
			waiting = append(waiting, g.users(s, n)...)
		case slices.ContainsFunc(g.users(s, n), func(p claims.PodState) bool { return !p.Terminal }):
			return false
		}
	}
	return claims.IsStuck(waiting)
}

// hasBoundShards reports whether a pod that is bound uses a shard other than the primary one. Such a pod uses the
// devices of the primary shard.
func (g *group) hasBoundShards(s *sharedClaim) bool {
	for n := range s.shards {
		if n != s.primary && g.hasBoundUsers(s, n) {
			return true
		}
	}
	return false
}

// hasBoundUsers reports whether a pod that is bound uses shard n.
func (g *group) hasBoundUsers(s *sharedClaim, n int) bool {
	return slices.ContainsFunc(g.users(s, n), claims.PodState.IsRunning)
}

func (g *group) claimName(s *sharedClaim, shard int) string {
	if s.ResourceClaimName != nil {
		return *s.ResourceClaimName
	}
	return claims.Name(g.owner, s.Name, shard)
}
