// Package groups makes one claim serve a group of pods: it generates the claims
// of a PodGroup, holds them while the group lives, and lets go of them after. How
// it stands is in the PodGroup's conditions.
//
// What is in the API is all that it knows: each step is one write that follows
// from what it reads, so that a controller which ends between any two of them
// leaves nothing that the next one does not finish.
package groups

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

// Reconciler is the controller of PodGroups.
type Reconciler struct {
	// Client reads from a cache.
	Client client.Client
	// Live reads from the API server.
	Live   client.Reader
	Mode   mode.Mode
	Driver string
	Events events.EventRecorder
	// StaleEntriesStay is of the cluster, as claims.StaleEntriesStay says.
	StaleEntriesStay bool

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
	if err == nil && slices.ContainsFunc(g.entries, func(e *entry) bool { return e.problem != nil }) {
		return ctrl.Result{RequeueAfter: askAgain}, nil
	}
	return ctrl.Result{}, err
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
		if n, ok := claims.Shard(g.owner, c.Name, claimOf(pod, c.Name)); ok && !slices.Contains(e.wanted, n) && !ended(pod) {
			e.wanted = append(e.wanted, n)
		}
	}
	slices.Sort(e.wanted)
	var owned resourceapi.ResourceClaimList
	if err := r.Client.List(ctx, &owned, client.InNamespace(g.Namespace), client.MatchingFields{indexOwner: string(g.UID)}); err != nil {
		return nil, err
	}
	for i := range owned.Items {
		if n, ok := claims.Shard(g.owner, c.Name, owned.Items[i].Name); ok {
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

// claimOf is the claim that a pod's entry of that name stands for.
func claimOf(pod *corev1.Pod, name string) string {
	for _, c := range pod.Spec.ResourceClaims {
		if c.Name == name {
			return ptr.Deref(c.ResourceClaimName, "")
		}
	}
	return ""
}

func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// generate creates the claims that are missing, and deletes shards that no pod
// names any more.
func (r *Reconciler) generate(ctx context.Context, g *group) (err error) {
	keeper := claims.Keeper{Client: r.Client}
	for _, e := range g.entries {
		if e.ResourceClaimName != nil {
			continue
		}
		for _, n := range e.wanted {
			if e.shards[n] == nil {
				err = errors.Join(err, r.generateShard(ctx, keeper, g, e, n))
			}
		}
		for n, claim := range e.shards {
			// One that is wanted again while it goes is made anew when it has gone.
			if !slices.Contains(e.wanted, n) || n > 0 && claim.DeletionTimestamp != nil {
				err = errors.Join(err, keeper.Delete(ctx, claim), keeper.Change(ctx, claim, claims.Released(claim, g.UID, false)))
				delete(e.shards, n)
			}
		}
	}
	return err
}

func (r *Reconciler) generateShard(ctx context.Context, keeper claims.Keeper, g *group, e *entry, n int) error {
	if e.template == nil {
		e.problem = fmt.Errorf("resourceClaims[%q].resourceClaimTemplateName: there is no ResourceClaimTemplate %s in namespace %s: create it", e.Name, *e.ResourceClaimTemplateName, g.Namespace)
		return nil
	}
	claim := claims.Generate(g.owner, e.Name, n, e.template)
	if n > 0 {
		first := e.shards[0]
		if first == nil || first.Status.Allocation == nil {
			return nil // its devices are not known yet; the event will come
		}
		var err error
		if claim, err = claims.GenerateShard(g.owner, e.Name, n, e.template, first, r.Driver); err != nil {
			e.problem = fmt.Errorf("resourceClaims[%q] has more pods than one claim can be reserved for: %w", e.Name, err)
			return nil
		}
	}
	err := keeper.Create(ctx, claim)
	if taken := (*claims.TakenError)(nil); errors.As(err, &taken) || apierrors.IsInvalid(err) || apierrors.IsForbidden(err) {
		e.problem = fmt.Errorf("resourceClaims[%q]: %w", e.Name, err)
		return nil
	}
	if err == nil {
		e.shards[n] = claim
	}
	return err
}

// translate keeps Kubernetes' own PodGroup of the name, with the same claims, by
// name.
func (r *Reconciler) translate(ctx context.Context, g *group) error {
	if r.Mode != mode.Native {
		return nil
	}
	var there schedulingapi.PodGroup
	err := r.Client.Get(ctx, client.ObjectKeyFromObject(g.PodGroup), &there)
	if err == nil && !metav1.IsControlledBy(&there, g.PodGroup) {
		problem := fmt.Errorf("there is a PodGroup %s of scheduling.k8s.io that was not made for this one: delete one of them", g.Name)
		if there.DeletionTimestamp != nil {
			problem = fmt.Errorf("the PodGroup of scheduling.k8s.io of an earlier PodGroup %s goes when the pods of that name have ended", g.Name)
		}
		for _, e := range g.entries {
			e.problem = problem
		}
		return nil
	}
	if !apierrors.IsNotFound(err) {
		return err
	}
	native := &schedulingapi.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: g.Namespace, Name: g.Name},
		Spec: schedulingapi.PodGroupSpec{
			SchedulingPolicy: schedulingapi.PodGroupSchedulingPolicy{Basic: &schedulingapi.BasicSchedulingPolicy{}},
		},
	}
	for _, e := range g.entries {
		name := e.ResourceClaimName
		if name == nil {
			name = ptr.To(claims.Name(g.owner, e.Name, 0))
		}
		native.Spec.ResourceClaims = append(native.Spec.ResourceClaims, schedulingapi.PodGroupResourceClaim{Name: e.Name, ResourceClaimName: name})
	}
	if err := controllerutil.SetControllerReference(g.PodGroup, native, r.Client.Scheme()); err != nil {
		return err
	}
	err = r.Client.Create(ctx, native)
	if apierrors.IsAlreadyExists(err) {
		return nil // the cache is behind
	}
	return err
}

// reserve keeps the claims reserved for whom they should be.
func (r *Reconciler) reserve(ctx context.Context, g *group) (err error) {
	keeper := claims.Keeper{Client: r.Client}
	for _, e := range g.entries {
		for n, claim := range e.shards {
			users := g.users(e, n)
			change := claims.Reservation(claim, g.owner, users, r.Mode == mode.Native)
			if change.Empty() || len(claim.Status.ReservedFor) >= resourceapi.ResourceClaimReservedForMaxSize {
				first, problem := r.leftovers(ctx, g, e, claim, users)
				if err = errors.Join(err, problem); !first.Empty() {
					change = first // it may make room for the other
				}
			}
			err = errors.Join(err, keeper.Change(ctx, claim, change))
		}
	}
	return err
}

// leftovers are changes for pods that use the claim no more.
func (r *Reconciler) leftovers(ctx context.Context, g *group, e *entry, claim *resourceapi.ResourceClaim, users []claims.Pod) (c claims.Change, err error) {
	finder := claims.Finder{Live: r.Live, All: r.StaleEntriesStay}
	// In native mode the cluster takes care of those that have ended.
	holds := r.Mode == mode.Bridge && claims.HasReservation(claim, g.owner.UID)
	if claim.Status.Allocation == nil || !holds && len(finder.MayBeGone(claim)) == 0 {
		return c, nil
	}
	atMost := claims.MaxEnded
	if e.ResourceClaimName != nil { // also pods that are not of the group use it
		more, err := finder.Users(ctx, claim)
		if err != nil {
			return c, err
		}
		users = append(users, more...)
	} else if claims.Spans(&claim.Spec, r.Driver) {
		atMost = claims.MaxPods // those that come get further claims
	}
	gone, err := finder.Gone(ctx, claim, users)
	if err != nil {
		return c, err
	}
	if !holds {
		users = nil
	}
	return claims.Leftovers(claim, users, gone, atMost), nil
}

// users are the group's pods that use a shard, the oldest first.
func (g *group) users(e *entry, shard int) (users []claims.Pod) {
	name := g.claimName(e, shard)
	for _, pod := range g.pods {
		if claimOf(pod, e.Name) != name {
			continue
		}
		users = append(users, claims.Pod{Name: pod.Name, UID: pod.UID, Bound: pod.Spec.NodeName != "", Ended: ended(pod), Going: pod.DeletionTimestamp != nil,
			Gated: gated(pod), Unschedulable: unschedulable(pod)})
	}
	return users
}

func (g *group) claimName(e *entry, shard int) string {
	if e.ResourceClaimName != nil {
		return *e.ResourceClaimName
	}
	return claims.Name(g.owner, e.Name, shard)
}

func unschedulable(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
	})
}

// ignoreBehind is for writes of objects that have changed or gone: the cache is
// behind, and the event will come.
func ignoreBehind(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
