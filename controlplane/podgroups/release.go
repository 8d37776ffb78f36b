// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"context"
	"errors"
	"fmt"
	"time"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
	"github.com/dra-shared/dra-driver-shared/internal/requeue"
)

// applyRelease releases the claims of a PodGroup without pods if its annotation release asks for it. The claims stay,
// and the scheduler allocates them for the next pod. It sets g.released if the claims are released, and
// g.releaseProblem if it cannot determine that. It returns the time until it must be called again; 0 if an event
// triggers the next reconcile.
func (r *Reconciler) applyRelease(ctx context.Context, g *group) (wait time.Duration, err error) {
	var policy scheduling.Release
	policy, g.releaseProblem = r.releasePolicy(g)
	if policy.IsOnDeletion() {
		r.Unused.Reset(g.UID) // the annotation may change
		return 0, nil
	}
	var state workload.State
	var name string
	if policy.DependsOnWorkload() {
		name = g.Annotations[scheduling.WorkloadAnnotation]
		if state, wait, g.releaseProblem, err = r.workloadOf(ctx, g.Namespace, name); err != nil {
			return 0, err
		}
	}
	due, untilUnused := workload.ReleaseDue(policy, state, g.UID, len(activeNames(g.pods)) > 0, r.Unused)
	if !due {
		return requeue.Soonest(wait, untilUnused), nil
	}
	g.released = "no pod uses the claims, and " + policy.Describe(name)
	return 0, r.releaseAll(ctx, g)
}

// releasePolicy returns the policy of the annotation release. If the annotation does not have an effect, it returns the
// default and the problem.
func (r *Reconciler) releasePolicy(g *group) (policy scheduling.Release, problem error) {
	value, ok := g.Annotations[scheduling.ReleaseAnnotation]
	if !ok {
		return scheduling.Release{}, nil
	}
	policy, err := scheduling.ParseRelease(value)
	switch {
	case err != nil:
		return scheduling.Release{}, fmt.Errorf("%q %w", value, err) // admission denies it
	case r.Mode == mode.Native && !policy.IsOnDeletion():
		return scheduling.Release{},
			errors.New("in native mode, Kubernetes releases the claims when the PodGroup is deleted")
	}
	return policy, nil
}

// workloadOf returns the state of a PodGroup's workload. A workload that does not exist is complete: it does not create
// more pods. If the state cannot be determined, it returns the problem and the time until the next attempt; 0 if only a
// change of the PodGroup helps.
func (r *Reconciler) workloadOf(
	ctx context.Context, namespace, name string,
) (state workload.State, wait time.Duration, problem, err error) {
	ref, invalid := workload.Parse(name)
	if invalid != nil { // admission denies it
		return state, 0, fmt.Errorf("annotation %s: %q %w", scheduling.WorkloadAnnotation, name, invalid), nil
	}
	state, err = r.Lookup.Find(ctx, namespace, ref)
	var unverifiable *workload.UnverifiableError
	switch {
	case errors.Is(err, workload.ErrMissing):
		return workload.State{Complete: true}, 0, nil, nil
	case errors.As(err, &unverifiable), errors.Is(err, workload.ErrCannotHold):
		return state, workload.RetryInterval, err, nil
	}
	return state, 0, nil, err
}

// releaseAll releases the primary shards of all claims, and deletes the others, which no pod needs. It creates missing
// primary shards, so the next pod finds its claims.
func (r *Reconciler) releaseAll(ctx context.Context, g *group) error {
	errs := r.syncShards(ctx, g)
	for _, s := range g.sharedClaims {
		primary := s.shards[s.primary]
		if primary == nil {
			continue
		}
		errs = errors.Join(errs, r.writer().Apply(ctx, primary, claims.ReleaseChange(primary, g.UID, true)))
	}
	return errs
}
