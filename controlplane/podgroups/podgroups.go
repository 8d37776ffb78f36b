// Package podgroups makes one claim serve a group of pods: it generates the claims
// of a PodGroup, holds them while the group lives, and lets go of them after. How
// it stands is in the PodGroup's conditions.
//
// What is in the API is all that it knows: each step is one write that follows
// from what it reads, so that a controller which ends between any two of them
// leaves nothing that the next one does not finish.
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
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// Reconciler is the controller of PodGroups.
type Reconciler struct {
	// Client reads from a cache.
	Client client.Client
	// APIReader reads from the API server.
	APIReader client.Reader
	Mode      mode.Mode
	Driver    string
	Events    events.EventRecorder
	// ClusterLeavesStaleEntries is of the cluster, as claims.ClusterLeavesStaleEntries says.
	ClusterLeavesStaleEntries bool

	passed recently
}

// Owner is a PodGroup as the owner of its claims.
func Owner(g *scheduling.PodGroup) claims.Owner {
	return claims.Owner{GroupVersionKind: scheduling.GroupVersion.WithKind(scheduling.Kind), Resource: scheduling.Resource,
		Namespace: g.Namespace, Name: g.Name, UID: g.UID}
}

// entry is one of a group's claims, as it is.
type entry struct {
	scheduling.PodGroupResourceClaim
	template *resourceapi.ResourceClaimTemplate
	// shards by their number: 0 is there for all but a claim that does not exist.
	shards map[int]*resourceapi.ResourceClaim
	// wanted are the numbers of the shards that pods name; 0 always is.
	wanted []int
	// problem keeps the claim from being there.
	problem error
}

// group is a PodGroup with all that belongs to it.
type group struct {
	*scheduling.PodGroup
	owner   claims.Owner
	pods    []*corev1.Pod
	entries []*entry
}

// Reconcile implements reconcile.Reconciler for the PodGroup of that name, and
// for those that had the name before.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var pg scheduling.PodGroup
	err := r.Client.Get(ctx, req.NamespacedName, &pg)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	if err := r.releaseOthers(ctx, req.NamespacedName, pg.UID); err != nil || pg.UID == "" {
		return ctrl.Result{}, err
	}
	g, err := r.read(ctx, &pg)
	if err != nil {
		return ctrl.Result{}, err
	}
	if pg.DeletionTimestamp != nil {
		return ctrl.Result{}, r.end(ctx, g)
	}
	if len(pg.Spec.ResourceClaims) > 0 && controllerutil.AddFinalizer(&pg, scheduling.Finalizer) {
		// Before the first claim: whoever makes one must also let go of it.
		before := pg.DeepCopy()
		controllerutil.RemoveFinalizer(before, scheduling.Finalizer)
		if err := r.Client.Patch(ctx, &pg, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return ctrl.Result{}, ignoreBehind(err)
		}
	}
	err = errors.Join(r.serve(ctx, g), r.report(ctx, g))
	switch {
	case err != nil:
		return ctrl.Result{}, err
	case g.deletes():
		return ctrl.Result{RequeueAfter: settling}, nil
	case slices.ContainsFunc(g.entries, func(e *entry) bool { return e.problem != nil }):
		return ctrl.Result{RequeueAfter: askAgain}, nil
	}
	return ctrl.Result{}, nil
}

// askAgain is for problems whose end no event tells of: a quota, a name that
// somebody else had.
const askAgain = 30 * time.Second

// serve does for the pods that there are what they wait for.
func (r *Reconciler) serve(ctx context.Context, g *group) error {
	return errors.Join(r.generate(ctx, g), r.translate(ctx, g), r.reserve(ctx, g), r.admit(ctx, g))
}

// read collects what belongs to a PodGroup.
func (r *Reconciler) read(ctx context.Context, pg *scheduling.PodGroup) (*group, error) {
	g := &group{PodGroup: pg, owner: Owner(pg)}
	var pods corev1.PodList
	if err := r.Client.List(ctx, &pods, client.InNamespace(pg.Namespace), client.MatchingLabels{scheduling.GroupUIDLabel: string(pg.UID)}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	for i := range pods.Items {
		g.pods = append(g.pods, &pods.Items[i])
	}
	for _, c := range pg.Spec.ResourceClaims {
		e, err := r.readEntry(ctx, g, c)
		if err != nil {
			return nil, err
		}
		g.entries = append(g.entries, e)
	}
	return g, nil
}

func (r *Reconciler) readEntry(ctx context.Context, g *group, c scheduling.PodGroupResourceClaim) (*entry, error) {
	e := &entry{PodGroupResourceClaim: c, shards: map[int]*resourceapi.ResourceClaim{}, wanted: []int{0}}
	if c.ResourceClaimName != nil {
		claim, err := r.claim(ctx, g.Namespace, *c.ResourceClaimName)
		if claim != nil {
			e.shards[0] = claim
		} else {
			e.problem = fmt.Errorf("resourceClaims[%q].resourceClaimName: there is no ResourceClaim %s in namespace %s: create it", c.Name, *c.ResourceClaimName, g.Namespace)
		}
		return e, err
	}
	for _, pod := range g.pods {
		if n, ok := claims.ShardNumber(g.owner, c.Name, claimref.Name(pod, c.Name)); ok && !slices.Contains(e.wanted, n) && !podstatus.IsTerminal(pod) {
			e.wanted = append(e.wanted, n)
		}
	}
	slices.Sort(e.wanted)
	var owned resourceapi.ResourceClaimList
	if err := r.Client.List(ctx, &owned, client.InNamespace(g.Namespace), client.MatchingFields{indexOwner: string(g.UID)}); err != nil {
		return nil, err
	}
	for i := range owned.Items {
		if n, ok := claims.ShardNumber(g.owner, c.Name, owned.Items[i].Name); ok {
			e.shards[n] = &owned.Items[i]
		}
	}
	var template resourceapi.ResourceClaimTemplate
	err := r.Client.Get(ctx, types.NamespacedName{Namespace: g.Namespace, Name: *c.ResourceClaimTemplateName}, &template)
	if err == nil {
		e.template = &template
	}
	return e, client.IgnoreNotFound(err)
}

func (r *Reconciler) claim(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	var claim resourceapi.ResourceClaim
	err := r.Client.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &claim)
	if err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return &claim, nil
}

// ignoreBehind is for writes of objects that have changed or gone: the cache is
// behind, and the event will come.
func ignoreBehind(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
