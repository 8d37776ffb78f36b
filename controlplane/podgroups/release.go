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

// applyRelease releases the claims of a PodGroup without pods if its annotation release
// asks for it. The claims stay, and the scheduler allocates them for the next pod. It sets
// g.released if the claims are released, and g.releaseProblem if it cannot determine
// that. It returns the time after which it must be called again; 0 if an event triggers
// the next reconcile.
func (r *Reconciler) applyRelease(ctx context.Context, g *group) (wait time.Duration, err error) {
	policy := r.releasePolicy(g)
	if policy.IsOnDeletion() {
		r.Unused.Reset(g.UID) // the annotation may change
		return 0, nil
	}
	state, name, wait, err := r.workloadOf(ctx, g, policy)
	if err != nil {
		return 0, err
	}
	due, untilUnused := workload.ReleaseDue(policy, state, g.UID, len(activeNames(g.pods)) > 0, r.Unused)
	if !due {
		return requeue.Soonest(wait, untilUnused), nil
	}
	g.released = "no pod uses the claims, and " + policy.Describe(name)
	return 0, r.releaseAll(ctx, g)
}

// releasePolicy returns the policy of the annotation release. If the annotation has no
// effect, it sets g.releaseProblem and returns the default.
func (r *Reconciler) releasePolicy(g *group) scheduling.Release {
	value, ok := g.Annotations[scheduling.ReleaseAnnotation]
	if !ok {
		return scheduling.Release{}
	}
	policy, err := scheduling.ParseRelease(value)
	switch {
	case err != nil:
		g.releaseProblem = fmt.Errorf("%q %w", value, err) // admission denies it
		return scheduling.Release{}
	case r.Mode == mode.Native && !policy.IsOnDeletion():
		g.releaseProblem = errors.New("in native mode, Kubernetes releases the claims when the PodGroup is deleted")
		return scheduling.Release{}
	}
	return policy
}

// workloadOf returns the state and the name of the PodGroup's workload. A workload that
// does not exist is complete: it creates no more pods. If the state cannot be determined,
// it returns the time until the next attempt.
func (r *Reconciler) workloadOf(
	ctx context.Context, g *group, policy scheduling.Release,
) (state workload.State, name string, wait time.Duration, err error) {
	if !policy.DependsOnWorkload() {
		return state, "", 0, nil
	}
	name = g.Annotations[scheduling.WorkloadAnnotation]
	ref, problem := workload.Parse(name)
	if problem != nil { // admission denies it
		g.releaseProblem = fmt.Errorf("annotation %s: %q %w", scheduling.WorkloadAnnotation, name, problem)
		return state, name, 0, nil
	}
	state, err = r.Finder.Find(ctx, g.Namespace, ref)
	var unverifiable *workload.UnverifiableError
	switch {
	case errors.Is(err, workload.ErrMissing):
		return workload.State{Complete: true}, name, 0, nil
	case errors.As(err, &unverifiable), errors.Is(err, workload.ErrRefused):
		g.releaseProblem = err
		return state, name, workloadRetryInterval, nil
	}
	return state, name, 0, err
}

// workloadRetryInterval is the time between two attempts to find a workload. No event
// announces that an administrator grants a permission or installs an API.
const workloadRetryInterval = time.Minute

// releaseAll releases the primary shards of all claims, and deletes the others, which
// no pod needs.
func (r *Reconciler) releaseAll(ctx context.Context, g *group) error {
	errs := r.generateClaims(ctx, g)
	for _, s := range g.sharedClaims {
		primary := s.shards[s.primary]
		if primary == nil {
			continue
		}
		errs = errors.Join(errs, r.writer().Apply(ctx, primary, claims.ReleaseChange(primary, g.UID, true)))
	}
	return errs
}
