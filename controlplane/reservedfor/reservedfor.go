// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package reservedfor lets any object hold a claim. The annotation scheduling.dra-shared.dev/reserved-for on a
// ResourceClaim names the object, the holder, and the claim stays allocated as long as the holder exists. It serves the
// use case of KEP-5194. That KEP's API field does not exist in any release of Kubernetes.
//
// The Reconciler adds an entry for the holder to the claim's status.reservedFor when
// the claim is in use on a node, and removes it when the holder is deleted. The
// condition Held of the claim's devices reports whether the holder holds the claim, and so
// does an annotation of claims on devices of other drivers.
package reservedfor

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claimpods"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/retry"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
)

// Reconciler reconciles claims that have the annotation.
type Reconciler struct {
	// Client reads from a cache and writes to the API server.
	Client client.Client
	// APIReader reads from the API server.
	APIReader client.Reader
	// Cluster applies the status of claims.
	Cluster kubernetes.Interface
	// pods has the pods of claims with existing holders.
	pods podWatcher
	// Lookup finds the holders. SetupWithManager sets its StartWatch.
	Lookup *workload.Lookup
	// Unused measures for how long no pod has used a claim.
	Unused *workload.Timer
	// Driver is the name of the driver. Its devices get the condition Held.
	Driver string
	Events events.EventRecorder
	// ClusterLeavesStaleEntries is the result of claims.ClusterLeavesStaleEntries.
	ClusterLeavesStaleEntries bool
}

// podWatcher is a claimpods.Watcher.
type podWatcher interface {
	Pods(ctx context.Context, claim types.NamespacedName) ([]*corev1.Pod, error)
	Forget(claim types.NamespacedName)
}

// indexHolder indexes claims by the value of their annotation.
const indexHolder = "dra-shared.reserved-for"

// holderIndex returns the keys of a claim for indexHolder.
func holderIndex(o client.Object) []string {
	if text, ok := o.GetAnnotations()[scheduling.ReservedForAnnotation]; ok {
		return []string{text}
	}
	return nil
}

// SetupWithManager registers the controller with the manager, which starts it.
func (r *Reconciler) SetupWithManager(ctx context.Context, m ctrl.Manager) error {
	if err := m.GetFieldIndexer().IndexField(ctx, &resourceapi.ResourceClaim{}, indexHolder, holderIndex); err != nil {
		return err
	}
	pods := &claimpods.Watcher{Cluster: r.Cluster}
	r.pods = pods
	enqueueAnnotated := func(_ context.Context, o client.Object) []reconcile.Request {
		claim := client.ObjectKeyFromObject(o)
		if !r.isRelevant(o) && !pods.Watches(claim) {
			return nil
		}
		return []reconcile.Request{{NamespacedName: claim}}
	}
	c, err := ctrl.NewControllerManagedBy(m).Named("reservedfor").
		Watches(&resourceapi.ResourceClaim{}, handler.EnqueueRequestsFromMapFunc(enqueueAnnotated)).
		WatchesRawSource(pods.Source()).
		WithOptions(retry.Options()).
		Build(r)
	r.Lookup.StartWatch = workload.Watch(c, m.GetCache(), r.claimsHeldBy)
	return err
}

// isRelevant reports whether a claim names a holder, or has the condition or annotation Held. A claim has only the
// condition or annotation Held if its reserved-for annotation was removed while the controller was not running.
func (r *Reconciler) isRelevant(o client.Object) bool {
	_, named := o.GetAnnotations()[scheduling.ReservedForAnnotation]
	_, reported := o.GetAnnotations()[scheduling.HeldAnnotation]
	claim, ok := o.(*resourceapi.ResourceClaim)
	return named || reported || ok && r.hasCondition(claim)
}

// claimsHeldBy returns requests for the claims with an annotation that names the object.
func (r *Reconciler) claimsHeldBy(
	ctx context.Context, namespace string, object workload.Reference,
) []reconcile.Request {
	var held resourceapi.ResourceClaimList
	err := r.Client.List(ctx, &held, client.InNamespace(namespace), client.MatchingFields{indexHolder: object.String()})
	if err != nil {
		return nil // the cache is shutting down
	}
	var requests []reconcile.Request
	for i := range held.Items {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&held.Items[i])})
	}
	return requests
}

// Reconcile makes the holder that the claim's annotation names hold the claim, or
// releases the claim if the holder does not exist.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var claim resourceapi.ResourceClaim
	if err := r.Client.Get(ctx, req.NamespacedName, &claim); err != nil {
		r.pods.Forget(req.NamespacedName)
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	text, ok := claim.Annotations[scheduling.ReservedForAnnotation]
	if !ok || claim.Status.Allocation == nil || claim.DeletionTimestamp != nil {
		r.Unused.Reset(claim.UID)
		r.pods.Forget(req.NamespacedName)
	}
	if !ok {
		return ctrl.Result{}, r.withdraw(ctx, &claim)
	}
	ref, err := workload.Parse(text)
	holder := holderRef{ref}
	if err != nil {
		return ctrl.Result{}, r.refuse(ctx, &claim, holder, err)
	}
	if holder.isOwnerOf(&claim) {
		return ctrl.Result{}, r.reconcileGenerated(ctx, &claim, holder)
	}
	if claim.DeletionTimestamp != nil {
		// Only the pods that run with the claim keep it then. A holder that outlives the
		// namespace's deletion would keep the namespace too.
		return ctrl.Result{}, r.apply(ctx, &claim, releaseChange(&claim, holder))
	}
	state, err := r.Lookup.Find(ctx, claim.Namespace, ref)
	var unverifiable *workload.UnverifiableError
	switch {
	case errors.Is(err, workload.ErrCannotHold):
		return ctrl.Result{}, r.refuse(ctx, &claim, holder, err)
	case errors.As(err, &unverifiable):
		return r.reconcileUnverifiable(ctx, &claim, holder, unverifiable)
	case errors.Is(err, workload.ErrMissing):
		return ctrl.Result{}, r.reconcileMissing(ctx, &claim, holder)
	case err != nil:
		return ctrl.Result{}, err
	case claims.IsReservedFor(&claim, state.UID):
		return r.reconcileHeld(ctx, &claim, holder, state)
	}
	return ctrl.Result{}, r.reconcileNotHeld(ctx, &claim, holder, state.UID)
}

// refuse reports that the annotation is invalid, and releases a claim that is held for
// an object that cannot hold claims, which earlier releases accepted.
func (r *Reconciler) refuse(
	ctx context.Context, claim *resourceapi.ResourceClaim, holder holderRef, cause error,
) error {
	r.pods.Forget(client.ObjectKeyFromObject(claim))
	if holder.Name != "" {
		if change := releaseChange(claim, holder); !change.Empty() {
			return r.apply(ctx, claim, change)
		}
	}
	message := fmt.Sprintf("annotation %s: %q %v",
		scheduling.ReservedForAnnotation, claim.Annotations[scheduling.ReservedForAnnotation], cause)
	return r.report(ctx, claim, v1alpha1.ReasonHolderInvalid, message)
}

// reconcileGenerated reports that the annotation names the object that the claim was generated for. That object's own
// controller holds and releases the claim; two writers of one entry would revert each other without end.
func (r *Reconciler) reconcileGenerated(ctx context.Context, claim *resourceapi.ResourceClaim, holder holderRef) error {
	r.pods.Forget(client.ObjectKeyFromObject(claim))
	if claim.Status.Allocation == nil || claim.DeletionTimestamp != nil {
		return r.withdraw(ctx, claim)
	}
	message := fmt.Sprintf("the claim was generated for %s, which holds it; the annotation %s has no effect",
		holder, scheduling.ReservedForAnnotation)
	return r.report(ctx, claim, v1alpha1.ReasonHolderFound, message)
}

// reconcileUnverifiable handles a claim if the controller cannot determine whether its holder exists. An entry of the
// holder stays.
func (r *Reconciler) reconcileUnverifiable(
	ctx context.Context, claim *resourceapi.ResourceClaim, holder holderRef, cause *workload.UnverifiableError,
) (ctrl.Result, error) {
	r.pods.Forget(client.ObjectKeyFromObject(claim))
	message := fmt.Sprintf("not held by %s: %v", holder, cause)
	if holder.hasEntry(claim.Status.ReservedFor) {
		message = fmt.Sprintf("still reserved for %s, whose existence cannot be verified: %v; "+
			"to release the claim, delete it", holder, cause)
	}
	return ctrl.Result{RequeueAfter: workload.RetryInterval}, r.report(ctx, claim, cause.Reason, message)
}

// reconcileMissing releases a claim if its holder does not exist. The Lookup watches the holder's kind, so an event
// announces when the holder exists.
func (r *Reconciler) reconcileMissing(
	ctx context.Context, claim *resourceapi.ResourceClaim, holder holderRef,
) error {
	r.pods.Forget(client.ObjectKeyFromObject(claim))
	change := releaseChange(claim, holder)
	if !change.Empty() {
		return r.apply(ctx, claim, change)
	}
	message := fmt.Sprintf("not held by %s: it does not exist in namespace %s", holder, claim.Namespace)
	return r.report(ctx, claim, v1alpha1.ReasonHolderMissing, message)
}

// reconcileNotHeld adds the entry of an existing holder when the claim is in use and has room for it. Until the claim
// is in use, it withdraws what was reported before the holder appeared, or before the claim was released.
func (r *Reconciler) reconcileNotHeld(
	ctx context.Context, claim *resourceapi.ResourceClaim, holder holderRef, uid types.UID,
) error {
	inUse, err := r.isInUse(ctx, claim)
	if err != nil {
		return err
	}
	owner := claims.Owner{
		GroupVersionKind: schema.GroupVersionKind{Group: holder.Group}, Resource: holder.Resource,
		Namespace: claim.Namespace, Name: holder.Name, UID: uid,
	}
	change := holdChange(claim, holder, owner, inUse)
	entries := len(claim.Status.ReservedFor)
	switch {
	case change.Empty():
		return r.withdraw(ctx, claim)
	case entries-len(change.Remove)+len(change.Add) > resourceapi.ResourceClaimReservedForMaxSize:
		message := fmt.Sprintf("not held by %s: the claim is reserved for %d consumers, which leaves no room for the "+
			"holder: delete pods that use it", holder, entries)
		return r.report(ctx, claim, v1alpha1.ReasonNoRoom, message)
	}
	return r.apply(ctx, claim, change)
}

// reconcileHeld reports that the claim is held, and maintains its stale entries. It
// releases the claim if no pod uses it and the annotation release, or by default the state
// of the holder, permits it (KEP-5194). The next pod makes the scheduler allocate the claim
// again.
func (r *Reconciler) reconcileHeld(
	ctx context.Context, claim *resourceapi.ResourceClaim, holder holderRef, state workload.State,
) (ctrl.Result, error) {
	policy, err := releasePolicy(claim)
	message := heldMessage(holder, policy, err)
	isUsed := slices.ContainsFunc(claim.Status.ReservedFor, holder.isOther)
	due, wait := workload.ReleaseDue(policy, state, claim.UID, isUsed, r.Unused)
	if due {
		return ctrl.Result{}, r.apply(ctx, claim, releaseChange(claim, holder))
	}
	if err := r.report(ctx, claim, v1alpha1.ReasonHolderFound, message); err != nil {
		return ctrl.Result{}, err
	}
	change, err := r.staleEntriesChange(ctx, claim)
	if err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: wait}, r.apply(ctx, claim, change)
}

// staleEntriesChange returns the change that maintains the stale entries of a held claim.
func (r *Reconciler) staleEntriesChange(
	ctx context.Context, claim *resourceapi.ResourceClaim,
) (claims.Change, error) {
	pods, err := r.pods.Pods(ctx, client.ObjectKeyFromObject(claim))
	if err != nil {
		return claims.Change{}, err
	}
	var users []claims.PodState
	for _, pod := range pods {
		users = append(users, claims.PodStateOf(pod))
	}
	// A pod that the watch has not reported yet is missing from the cache, so the API server must confirm
	// that it was deleted.
	lookup := claims.PodLookup{APIReader: r.APIReader, ClusterLeavesStaleEntries: r.ClusterLeavesStaleEntries}
	deleted, err := lookup.DeletedPods(ctx, claim, users)
	return claims.StaleEntriesChange(claim, users, deleted, claims.MaxTerminalPods), err
}

// releasePolicy returns when the claim is released before its holder is deleted. An invalid annotation, which admission
// denies, does not release anything.
func releasePolicy(claim *resourceapi.ResourceClaim) (scheduling.Release, error) {
	value, ok := claim.Annotations[scheduling.ReleaseAnnotation]
	if !ok {
		return scheduling.Release{OnCompletion: true, OnSuspension: true}, nil
	}
	return scheduling.ParseRelease(value)
}

// heldMessage describes how long the claim stays allocated. err is the error of its
// annotation release.
func heldMessage(holder holderRef, policy scheduling.Release, err error) string {
	message := fmt.Sprintf("allocated as long as %s exists", holder)
	if err != nil {
		return fmt.Sprintf("%s; the annotation %s is ignored: it %v", message, scheduling.ReleaseAnnotation, err)
	}
	if conditions := policy.Describe(holder.String()); conditions != "" {
		message += "; released earlier if no pod uses the claim and " + conditions
	}
	return message
}

// apply applies a change to the entries of a claim. It emits an event if the API server refuses the change. The
// condition Held is unchanged, because the API server may refuse that write too.
func (r *Reconciler) apply(ctx context.Context, claim *resourceapi.ResourceClaim, change claims.Change) error {
	err := claims.ClaimWriter{Client: r.Client, APIReader: r.APIReader}.Apply(ctx, claim, change)
	if claims.IsRefused(err) {
		r.Events.Eventf(claimref.ForEvent(claim), nil, corev1.EventTypeWarning, scheduling.ReasonWriteRefused,
			v1alpha1.EventActionHold, "the API server refuses a change of the reservations of ResourceClaim %s: %v; "+
				"change the webhook or the policy that the error names", claim.Name, err)
	}
	return err
}

// isInUse reports whether the claim is allocated and one of its users is bound to a
// node. Until then the scheduler must be able to deallocate the claim. A user other
// than a pod, such as a PodGroup, counts as bound: it prevents the deallocation anyway.
func (r *Reconciler) isInUse(ctx context.Context, claim *resourceapi.ResourceClaim) (bool, error) {
	switch {
	case claim.Status.Allocation == nil || len(claim.Status.ReservedFor) == 0:
		return false, nil
	case slices.ContainsFunc(claim.Status.ReservedFor, isHolderEntry):
		return true, nil
	}
	pods, err := r.pods.Pods(ctx, client.ObjectKeyFromObject(claim))
	return slices.ContainsFunc(pods, func(p *corev1.Pod) bool {
		return p.Spec.NodeName != "" && claims.IsReservedFor(claim, p.UID)
	}), err
}

// isHolderEntry reports whether the entry is for an object other than a pod.
func isHolderEntry(entry resourceapi.ResourceClaimConsumerReference) bool {
	return !claimref.IsPodEntry(entry) && !claims.IsTerminalPodEntry(entry)
}
