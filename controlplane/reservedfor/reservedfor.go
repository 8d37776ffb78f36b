// Package reservedfor lets any object hold a claim: the annotation
// scheduling.dra-shared.dev/reserved-for on a ResourceClaim names it, and the
// claim stays allocated as long as it lives (KEP-5194's story, whose field never
// came to be).
package reservedfor

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

// askAgain is for what no event tells of: a right that is granted, an API that
// is installed.
const askAgain = time.Minute

// Reconciler is the controller of claims with the annotation.
type Reconciler struct {
	// Client reads from a cache.
	Client client.Client
	// APIReader reads from the API server.
	APIReader client.Reader
	Cluster   kubernetes.Interface
	Mapper    meta.RESTMapper
	Driver    string
	Events    events.EventRecorder
	// ClusterLeavesStaleEntries is of the cluster, as claims.ClusterLeavesStaleEntries says.
	ClusterLeavesStaleEntries bool

	cache      cache.Cache
	controller controller.Controller
	mu         sync.Mutex
	watched    map[schema.GroupVersionKind]bool
}

// SetupWithManager registers the controller.
func (r *Reconciler) SetupWithManager(ctx context.Context, m ctrl.Manager) (err error) {
	r.cache, r.watched = m.GetCache(), map[schema.GroupVersionKind]bool{}
	if err := m.GetFieldIndexer().IndexField(ctx, &resourceapi.ResourceClaim{}, indexHolder, func(o client.Object) []string {
		if text, ok := o.GetAnnotations()[scheduling.ReservedForAnnotation]; ok {
			return []string{text}
		}
		return nil
	}); err != nil {
		return err
	}
	r.controller, err = ctrl.NewControllerManagedBy(m).Named("heldby").
		Watches(&resourceapi.ResourceClaim{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			if _, ok := o.GetAnnotations()[scheduling.ReservedForAnnotation]; !ok {
				return nil
			}
			return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(o)}}
		})).Build(r)
	return err
}

// indexHolder finds claims by their annotation.
const indexHolder = "dra-shared.reserved-for"

// Reconcile implements reconcile.Reconciler for the claim of that name.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var claim resourceapi.ResourceClaim
	if err := r.Client.Get(ctx, req.NamespacedName, &claim); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	text, ok := claim.Annotations[scheduling.ReservedForAnnotation]
	if !ok {
		return ctrl.Result{}, nil
	}
	holder, err := Parse(text)
	if err != nil {
		return ctrl.Result{}, r.tell(ctx, &claim, ReasonHolderInvalid, fmt.Sprintf("annotation %s: %q %v", scheduling.ReservedForAnnotation, text, err))
	}
	owner := claims.Owner{GroupVersionKind: schema.GroupVersionKind{Group: holder.Group}, Resource: holder.Resource, Namespace: claim.Namespace, Name: holder.Name}
	object, reason, err := r.find(ctx, &claim, holder)
	switch {
	case reason != "" && claim.DeletionTimestamp != nil:
		// Nobody will ever see the holder go: the claim would stay for good.
		return ctrl.Result{}, claims.ClaimWriter{Client: r.Client}.Apply(ctx, &claim, change(&claim, owner, false))
	case reason != "":
		message := fmt.Sprintf("not held by %s: %v", holder, err)
		if holder.in(claim.Status.ReservedFor) {
			message = fmt.Sprintf("still reserved for %s, and nobody sees whether that is there: %v; or delete the claim", holder, err)
		}
		return ctrl.Result{RequeueAfter: askAgain}, r.tell(ctx, &claim, reason, message)
	case err != nil:
		return ctrl.Result{}, err
	}
	if object != nil {
		owner.UID = object.UID
	}
	if owner.UID != "" && claims.IsReservedFor(&claim, owner.UID) {
		return r.keep(ctx, &claim, holder)
	}
	return r.hold(ctx, &claim, holder, owner)
}

// hold makes an owner hold a claim, or lets go of it if that is gone: it has no
// UID then.
func (r *Reconciler) hold(ctx context.Context, claim *resourceapi.ResourceClaim, holder Holder, owner claims.Owner) (ctrl.Result, error) {
	bound, err := r.bound(ctx, claim, owner)
	if err != nil {
		return ctrl.Result{}, err
	}
	c := change(claim, owner, bound)
	if owner.UID == "" && c.Empty() {
		return ctrl.Result{RequeueAfter: askAgain}, r.tell(ctx, claim, ReasonHolderMissing, fmt.Sprintf("not held by %s: it does not exist in namespace %s", holder, claim.Namespace))
	}
	again := time.Duration(0)
	if !bound && owner.UID != "" && len(claim.Status.ReservedFor) > 0 {
		again = bindSoon
	}
	return ctrl.Result{RequeueAfter: again}, claims.ClaimWriter{Client: r.Client}.Apply(ctx, claim, c)
}

// keep tells that a claim is held, and takes care of its pods that have ended.
func (r *Reconciler) keep(ctx context.Context, claim *resourceapi.ResourceClaim, holder Holder) (ctrl.Result, error) {
	if err := r.tell(ctx, claim, ReasonHolderFound, fmt.Sprintf("allocated as long as %s is there", holder)); err != nil {
		return ctrl.Result{}, err
	}
	lookup := claims.PodLookup{APIReader: r.APIReader, ClusterLeavesStaleEntries: r.ClusterLeavesStaleEntries}
	users, err := lookup.PodsUsing(ctx, claim)
	if err != nil {
		return ctrl.Result{}, err
	}
	gone, err := lookup.DeletedPods(ctx, claim, users)
	if err != nil {
		return ctrl.Result{}, err
	}
	c := claims.StaleEntriesChange(claim, users, gone, claims.MaxTerminalPods)
	again := time.Duration(0)
	if len(c.Add) > 0 || len(lookup.EntriesToCheck(claim)) > 0 {
		again = podsAgain
	}
	return ctrl.Result{RequeueAfter: again}, claims.ClaimWriter{Client: r.Client}.Apply(ctx, claim, c)
}

// podsAgain is how often it is looked whether pods are gone whose entries nobody
// else takes away: see bindSoon.
const podsAgain = 15 * time.Second

// bindSoon is how long a pod takes from its reservation to its node: the
// scheduler writes one after the other. No event tells, for all pods of the
// cluster would have to be watched.
const bindSoon = time.Second

// change makes the holder's entry what it should be. An owner without a UID is
// gone.
func change(claim *resourceapi.ResourceClaim, owner claims.Owner, bound bool) (c claims.Change) {
	theirs := func(entry resourceapi.ResourceClaimConsumerReference) bool {
		return entry.APIGroup == owner.Group && entry.Resource == owner.Resource && entry.Name == owner.Name && entry.UID != owner.UID
	}
	if owner.UID == "" || slices.ContainsFunc(claim.Status.ReservedFor, theirs) {
		c.Remove = claims.EntriesToRemove(claim, theirs)
		c.Precondition = len(c.Remove) > 0 // see claims.ReleaseChange
	}
	switch {
	case owner.UID == "" && len(c.Remove) == len(claim.Status.ReservedFor) && len(c.Remove) > 0 && claim.DeletionTimestamp == nil:
		return claims.Change{Deallocate: true}
	case owner.UID != "" && bound && claim.DeletionTimestamp == nil && !claims.IsReservedFor(claim, owner.UID):
		c.Add = append(c.Add, owner.Reference())
	}
	return c
}

// bound tells whether the claim is in use on a node: before that, the scheduler
// must be able to give its allocation up.
func (r *Reconciler) bound(ctx context.Context, claim *resourceapi.ResourceClaim, owner claims.Owner) (bool, error) {
	if claim.Status.Allocation == nil || owner.UID == "" {
		return false, nil
	}
	for _, entry := range claim.Status.ReservedFor {
		if !claims.IsTerminalPodEntry(entry) && (entry.APIGroup != "" || entry.Resource != "pods") {
			return true, nil // held by what lives longer than a pod
		}
	}
	for _, entry := range claim.Status.ReservedFor {
		var pod corev1.Pod
		err := r.APIReader.Get(ctx, types.NamespacedName{Namespace: claim.Namespace, Name: entry.Name}, &pod)
		if err == nil && pod.UID == entry.UID && pod.Spec.NodeName != "" {
			return true, nil
		}
		if client.IgnoreNotFound(err) != nil {
			return false, err
		}
	}
	return false, nil
}
