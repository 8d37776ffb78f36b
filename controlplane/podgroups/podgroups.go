// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package podgroups reconciles PodGroups: it generates their claims, reserves the claims for the group and its pods,
// releases them when the group is deleted, and reports the result in the conditions of the PodGroup. It does the same
// for Jobs of pods with shared claims (jobs.go), and for replicas (replicas.go); listedclaims.go has the code that both
// need.
//
// The controller does not keep state outside of the API. Each step is one write, which depends only on the objects that
// the controller has read. So after a crash between any two steps, the next reconcile continues where the last one
// ended.
package podgroups

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/controlplane/retry"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
	"github.com/dra-shared/dra-driver-shared/internal/requeue"
)

// problemRetryInterval is the time between two attempts to solve a problem if no event announces its end, such as an
// exceeded quota, or another owner's claim with the name of the group's claim.
const problemRetryInterval = retry.MaxInterval

// Reconciler reconciles PodGroups.
type Reconciler struct {
	// Client reads from a cache and writes to the API server.
	Client client.Client
	// APIReader reads from the API server.
	APIReader client.Reader
	Mode      mode.Mode
	// Driver is the name of the driver. Several shards can use its fabrics.
	Driver string
	Events events.EventRecorder
	// ClusterLeavesStaleEntries is the result of claims.ClusterLeavesStaleEntries.
	ClusterLeavesStaleEntries bool
	// Lookup finds the workloads of PodGroups. SetupWithManager sets its StartWatch.
	Lookup *workload.Lookup
	// Unused measures how long a PodGroup has been without pods.
	Unused *workload.Timer

	ungated ungatedCache
	// deletions has the claims that are being deleted, and rejections the pods that the scheduler does not find a node
	// for.
	deletions, rejections firstSeen
}

// Owner returns the PodGroup as the owner of its claims.
func Owner(g *scheduling.PodGroup) claims.Owner {
	return claims.Owner{
		GroupVersionKind: scheduling.GroupVersion.WithKind(scheduling.Kind), Resource: scheduling.Resource,
		Namespace: g.Namespace, Name: g.Name, UID: g.UID,
	}
}

// sharedClaim is an element of a PodGroup's spec.resourceClaims with the objects behind it.
type sharedClaim struct {
	scheduling.PodGroupResourceClaim
	// template is nil if it does not exist, or if the element refers to a claim by name.
	template *resourceapi.ResourceClaimTemplate
	// shards has the existing claims by their shard number. A claim that the element
	// refers to by name is shard 0.
	shards map[int]*resourceapi.ResourceClaim
	// primary is the number of the shard that accounts for the devices of all shards. The others select
	// these devices.
	primary int
	// neededShards are the sorted numbers of the primary shard and of those that pods refer to.
	neededShards []int
	// problem is the reason why a claim cannot be generated or found, and the remedy.
	problem error
	// reserveProblem is the reason why the API server refuses a change of the reservations of a claim.
	reserveProblem error
}

// group is a PodGroup, or a Job or a replica in the form of one, with its pods and shared claims.
type group struct {
	*scheduling.PodGroup
	owner        claims.Owner
	pods         []*corev1.Pod
	sharedClaims []*sharedClaim
	// leadership has the leaders by the names of their claims. ungatePods sets it.
	leadership map[string]*leadership
	// released is the reason why the claims have been released; it is empty if they have not.
	released string
	// releaseProblem is the reason why the annotation release does not have an effect.
	releaseProblem error
	// gateProblem is the reason why the API server refuses to remove the scheduling gate of a pod.
	gateProblem error
}

// setProblem sets the problem of all shared claims.
func (g *group) setProblem(problem error) {
	for _, s := range g.sharedClaims {
		s.problem = problem
	}
}

// Reconcile reconciles the PodGroup of that name. It also releases claims that are
// still held for deleted PodGroups of the same name.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var pg scheduling.PodGroup
	err := r.Client.Get(ctx, req.NamespacedName, &pg)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	if err := r.releasePredecessors(ctx, req.NamespacedName, pg.UID); err != nil || pg.UID == "" {
		return ctrl.Result{}, err
	}
	g, err := r.read(ctx, &pg)
	if err != nil {
		return ctrl.Result{}, err
	}
	if pg.DeletionTimestamp != nil {
		r.Unused.Reset(pg.UID)
		return ctrl.Result{}, r.finalize(ctx, g)
	}
	if err := r.addFinalizer(ctx, &pg); err != nil {
		return ctrl.Result{}, ignoreStaleCache(r.reportFinalizer(ctx, g, err))
	}
	wait, err := r.applyRelease(ctx, g)
	if err == nil && g.released == "" {
		err = r.serve(ctx, g)
	}
	if err := errors.Join(err, r.updateStatus(ctx, g)); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: requeue.Soonest(wait, g.retryInterval())}, nil
}

// retryInterval returns the time until the group must be reconciled again because no event announces the change that it
// awaits; 0 if events suffice.
func (g *group) retryInterval() time.Duration {
	switch {
	case g.hasDeletedClaim():
		return minGracePeriod
	case slices.ContainsFunc(g.sharedClaims, func(s *sharedClaim) bool { return s.problem != nil }):
		return problemRetryInterval
	case slices.ContainsFunc(g.sharedClaims, func(s *sharedClaim) bool { return g.stalled(s) != nil }):
		return leaderInterval
	}
	return 0
}

// addFinalizer adds the controller's finalizer to a PodGroup with claims, unless it has it. This precedes the first
// claim, so every claim is released in the end.
func (r *Reconciler) addFinalizer(ctx context.Context, pg *scheduling.PodGroup) error {
	before := pg.DeepCopy()
	if len(pg.Spec.ResourceClaims) == 0 || !controllerutil.AddFinalizer(pg, scheduling.Finalizer) {
		return nil
	}
	return r.Client.Patch(ctx, pg, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// reportFinalizer reports that the API server has refused the finalizer. It returns the cause.
func (r *Reconciler) reportFinalizer(ctx context.Context, g *group, cause error) error {
	if !claims.IsRefused(cause) {
		return cause
	}
	g.setProblem(fmt.Errorf("add the finalizer %s to the PodGroup: %w", scheduling.Finalizer, cause))
	return errors.Join(cause, r.updateStatus(ctx, g))
}

// serve performs the steps that the group's pods need to run.
func (r *Reconciler) serve(ctx context.Context, g *group) error {
	return errors.Join(r.syncShards(ctx, g), r.ensureNativePodGroup(ctx, g), r.reserve(ctx, g), r.ungatePods(ctx, g))
}

// read reads the pods and the claims of the PodGroup from the cache.
func (r *Reconciler) read(ctx context.Context, pg *scheduling.PodGroup) (*group, error) {
	pods, err := listPods(ctx, r.Client, pg, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, err
	}
	owned, err := r.ownedClaims(ctx, pg.Namespace, pg.UID)
	if err != nil {
		return nil, err
	}
	g := &group{PodGroup: pg, owner: Owner(pg), pods: pods}
	for _, c := range pg.Spec.ResourceClaims {
		var s *sharedClaim
		if c.ResourceClaimName != nil {
			s, err = r.readNamedClaim(ctx, g, c)
		} else {
			s, err = r.readGeneratedClaim(ctx, g, c, owned)
		}
		if err != nil {
			return nil, err
		}
		g.sharedClaims = append(g.sharedClaims, s)
	}
	return g, nil
}

// listPods lists the pods of the PodGroup.
func listPods(
	ctx context.Context, reader client.Reader, pg *scheduling.PodGroup, options ...client.ListOption,
) ([]*corev1.Pod, error) {
	options = append(options, client.InNamespace(pg.Namespace),
		client.MatchingLabels{scheduling.GroupUIDLabel: string(pg.UID)})
	var list corev1.PodList
	if err := reader.List(ctx, &list, options...); err != nil {
		return nil, err
	}
	var pods []*corev1.Pod
	for i := range list.Items {
		pods = append(pods, &list.Items[i])
	}
	return pods, nil
}

// readNamedClaim reads a shared claim that the PodGroup refers to by name.
func (r *Reconciler) readNamedClaim(
	ctx context.Context, g *group, c scheduling.PodGroupResourceClaim,
) (*sharedClaim, error) {
	s := &sharedClaim{
		PodGroupResourceClaim: c, shards: map[int]*resourceapi.ResourceClaim{}, neededShards: []int{0},
	}
	var claim resourceapi.ResourceClaim
	name := types.NamespacedName{Namespace: g.Namespace, Name: *c.ResourceClaimName}
	err := r.Client.Get(ctx, name, &claim)
	if apierrors.IsNotFound(err) { // the cache does not have claims of other drivers: see trim.IsForeign
		err = r.APIReader.Get(ctx, name, &claim)
	}
	switch {
	case err == nil:
		s.shards[0] = &claim
	case apierrors.IsNotFound(err):
		s.problem = fmt.Errorf("resourceClaims[%q].resourceClaimName: "+
			"ResourceClaim %s does not exist in namespace %s: create it", c.Name, *c.ResourceClaimName, g.Namespace)
	default:
		return nil, err
	}
	return s, nil
}

// ownedClaims returns the claims that were generated for the object with that UID.
func (r *Reconciler) ownedClaims(
	ctx context.Context, namespace string, uid types.UID,
) ([]*resourceapi.ResourceClaim, error) {
	var list resourceapi.ResourceClaimList
	if err := r.Client.List(ctx, &list, client.InNamespace(namespace),
		client.MatchingFields{indexOwner: string(uid)}); err != nil {
		return nil, err
	}
	var owned []*resourceapi.ResourceClaim
	for i := range list.Items {
		owned = append(owned, &list.Items[i])
	}
	return owned, nil
}

// readGeneratedClaim reads a shared claim with shards that are generated from a template. They are among the owned
// claims.
func (r *Reconciler) readGeneratedClaim(
	ctx context.Context, g *group, c scheduling.PodGroupResourceClaim, owned []*resourceapi.ResourceClaim,
) (*sharedClaim, error) {
	s := &sharedClaim{
		PodGroupResourceClaim: c, shards: map[int]*resourceapi.ResourceClaim{},
	}
	for _, claim := range owned {
		if n, ok := claims.ShardNumber(g.owner, c.Name, claim.Name); ok {
			s.shards[n] = claim
		}
	}
	s.chooseShards(g.usedShards(c.Name))
	if c.ResourceClaimTemplateName == nil {
		return s, nil // a Job's claim may have a spec instead, which the caller adds
	}
	var template resourceapi.ResourceClaimTemplate
	err := r.Client.Get(ctx, types.NamespacedName{Namespace: g.Namespace, Name: *c.ResourceClaimTemplateName}, &template)
	if err == nil {
		s.template = &template
	}
	return s, client.IgnoreNotFound(err)
}

// usedShards returns, in order, the numbers of the named claim's shards that non-terminal pods use.
func (g *group) usedShards(name string) []int {
	var used []int
	for _, pod := range g.pods {
		n, ok := claims.ShardNumber(g.owner, name, claimref.Name(pod, name))
		if ok && !slices.Contains(used, n) && !podstatus.IsTerminal(pod) {
			used = append(used, n)
		}
	}
	slices.Sort(used)
	return used
}

// chooseShards chooses the primary shard and the needed ones, by the sorted numbers of the shards that pods use.
//
// The primary shard is allocated for one of its pods. If shard 0 does not have pods and is not allocated, because its
// pods have ended or were deleted, another shard is primary until it is released.
func (s *sharedClaim) chooseShards(used []int) {
	isUsed := func(n int) bool { return slices.Contains(used, n) }
	s.primary = 0
	if first := s.shards[0]; len(used) > 0 && !isUsed(0) && (first == nil || first.Status.Allocation == nil) {
		s.primary = used[0]
	}
	for n, claim := range s.shards {
		if claims.HasPrimaryAnnotation(claim) && (claim.Status.Allocation != nil || isUsed(n)) {
			s.primary = n
		}
	}
	s.neededShards = used
	if !isUsed(s.primary) {
		s.neededShards = append(s.neededShards, s.primary)
		slices.Sort(s.neededShards)
	}
}

// ignoreStaleCache returns nil for errors of writes to objects that have changed or no
// longer exist. The cache is stale then, and an event triggers the next reconcile.
func ignoreStaleCache(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
