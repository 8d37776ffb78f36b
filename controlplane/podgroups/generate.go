// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"context"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

// syncShards makes the shards of the group's claims those that the group needs.
func (r *Reconciler) syncShards(ctx context.Context, g *group) error {
	var errs error
	for _, s := range g.sharedClaims {
		if s.ResourceClaimName == nil {
			errs = errors.Join(errs, r.createNeeded(ctx, g, s), r.deleteUnneeded(ctx, g, s))
		}
	}
	return errs
}

// createNeeded creates the needed shards that do not exist. A shard that is needed again while it is being deleted
// is created again when the deletion has completed.
func (r *Reconciler) createNeeded(ctx context.Context, g *group, s *sharedClaim) error {
	var errs error
	for _, n := range s.neededShards {
		if s.shards[n] == nil {
			errs = errors.Join(errs, r.generateShard(ctx, g, s, n))
		}
	}
	return errs
}

// deleteUnneeded deletes and releases shards that pods no longer refer to, and shards of devices that the primary shard
// no longer has.
func (r *Reconciler) deleteUnneeded(ctx context.Context, g *group, s *sharedClaim) error {
	var errs error
	for n, claim := range s.shards {
		needed := slices.Contains(s.neededShards, n)
		switch {
		case n == 0 && !needed && claim.Status.Allocation == nil:
			errs = errors.Join(errs, r.writer().DeleteUnchanged(ctx, claim)) // it must not be allocated meanwhile
		case !needed || r.isPinnedElsewhere(g, s, n):
			errs = errors.Join(errs, r.writer().Delete(ctx, claim),
				r.writer().Apply(ctx, claim, claims.ReleaseChange(claim, g.UID, false, g.waitingUsers(s, n)...)))
			delete(s.shards, n)
		}
	}
	return errs
}

// generateShard creates the claim for shard n. It sets the problem of the shared claim if the
// user must change something first. It also returns the error if an attempt may soon succeed, such as when a
// webhook runs again.
func (r *Reconciler) generateShard(ctx context.Context, g *group, s *sharedClaim, n int) error {
	if s.template == nil {
		s.problem = fmt.Errorf("resourceClaims[%q].resourceClaimTemplateName: "+
			"ResourceClaimTemplate %s does not exist in namespace %s: create it",
			s.Name, *s.ResourceClaimTemplateName, g.Namespace)
		return nil
	}
	claim, err := r.claimForShard(g, s, n)
	if err != nil {
		s.problem = fmt.Errorf("resourceClaims[%q] has more pods than one claim can be reserved for: %w", s.Name, err)
		return nil
	}
	if claim == nil {
		return nil
	}
	err = r.writer().Create(ctx, claim)
	var nameTaken *claims.NameTakenError
	switch {
	case err == nil:
		s.shards[n] = claim
		return nil
	case errors.As(err, &nameTaken), apierrors.IsInvalid(err), apierrors.IsForbidden(err):
		s.problem = fmt.Errorf("resourceClaims[%q]: %w", s.Name, err)
		return nil
	case claims.IsRefused(err):
		s.problem = fmt.Errorf("resourceClaims[%q]: create ResourceClaim %s: %w", s.Name, claim.Name, err)
	}
	return err
}

// claimForShard returns the claim to create for shard n. It returns nil if the claim cannot be
// created yet: the devices of the primary shard, which the other shards use, are unknown or about
// to be deallocated, or an earlier primary shard still exists. An event triggers the next reconcile
// when that changes.
func (r *Reconciler) claimForShard(g *group, s *sharedClaim, n int) (*resourceapi.ResourceClaim, error) {
	primary := s.shards[s.primary]
	switch {
	case n == s.primary && n > 0 && s.shards[0] != nil:
		return nil, nil
	case n == s.primary:
		return claims.Generate(g.owner, s.Name, n, s.template), nil
	case primary == nil || primary.Status.Allocation == nil || primary.DeletionTimestamp != nil:
		return nil, nil
	}
	return claims.GenerateShard(g.owner, s.Name, n, s.template, primary, r.Driver)
}

// isPinnedElsewhere reports whether shard n selects devices that are not allocated to the
// primary shard, and no pod runs with it. Either the scheduler has deallocated the primary
// shard, because its devices could not be used, and chosen others; or shard n is the primary one now.
func (r *Reconciler) isPinnedElsewhere(g *group, s *sharedClaim, n int) bool {
	shard := s.shards[n]
	if s.template == nil || shard.DeletionTimestamp != nil || g.hasBoundUsers(s, n) {
		return false
	}
	if n == s.primary {
		return n > 0 && !claims.HasPrimaryAnnotation(shard)
	}
	current, err := r.claimForShard(g, s, n)
	return err == nil && current != nil && !equality.Semantic.DeepEqual(current.Spec, shard.Spec)
}

// waitingUsers returns the UIDs of the pods that wait for a node if shard n may be reserved for them.
func (g *group) waitingUsers(s *sharedClaim, n int) []types.UID {
	var waiting []types.UID
	for _, p := range g.users(s, n) {
		if p.Waits() {
			waiting = append(waiting, p.UID)
		}
	}
	return waiting
}

func (r *Reconciler) writer() claims.ClaimWriter {
	return claims.ClaimWriter{Client: r.Client, APIReader: r.APIReader}
}
