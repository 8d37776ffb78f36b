// Package heldby lets any object hold a claim: the annotation
// scheduling.dra-shared.dev/reserved-for on a ResourceClaim names it, and the
// claim stays allocated as long as it lives (KEP-5194's story, whose field never
// came to be).
package heldby

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/report"
)

// Holds tells whether a claim is reserved for the holder of that annotation: then
// the annotation must stay as it is, or nobody would take the entry away.
func Holds(annotation string, reserved []resourceapi.ResourceClaimConsumerReference) bool {
	h, err := Parse(annotation)
	return err == nil && h.in(reserved)
}

// Holder names an object in the claim's namespace.
type Holder struct {
	schema.GroupResource
	Name string
}

// in tells whether a claim is reserved for an object of that name.
func (h Holder) in(reserved []resourceapi.ResourceClaimConsumerReference) bool {
	return slices.ContainsFunc(reserved, func(r resourceapi.ResourceClaimConsumerReference) bool {
		return r.APIGroup == h.Group && r.Resource == h.Resource && r.Name == h.Name
	})
}

func (h Holder) String() string { return h.Group + "/" + h.Resource + "/" + h.Name }

// Parse reads <API group>/<resource>/<name>; the group of the core API is empty.
func Parse(text string) (Holder, error) {
	parts := strings.Split(text, "/")
	if len(parts) != 3 || parts[1] == "" || parts[2] == "" {
		return Holder{}, errors.New("must be <API group>/<resource>/<name>, such as batch/jobs/train; for the core group, /replicationcontrollers/web")
	}
	if parts[0] == "" && parts[1] == "pods" {
		return Holder{}, errors.New("a pod holds the claims that it names in spec.resourceClaims, until it ends: name what lives longer")
	}
	h := Holder{GroupResource: schema.GroupResource{Group: parts[0], Resource: parts[1]}, Name: parts[2]}
	if h.Group != "" && len(validation.IsDNS1123Subdomain(h.Group)) > 0 {
		return Holder{}, fmt.Errorf("%q is no API group: such as batch, apps, or nothing for the core group", h.Group)
	}
	if len(validation.IsDNS1123Label(h.Resource)) > 0 {
		return Holder{}, fmt.Errorf("%q is no resource: its lower-case plural, such as jobs", h.Resource)
	}
	if len(validation.IsDNS1123Subdomain(h.Name)) > 0 {
		return Holder{}, fmt.Errorf("%q is no name of an object", h.Name)
	}
	return h, nil
}

// ConditionHeld of a claim's device tells whether the object that the annotation
// names holds the claim.
const ConditionHeld = "Held"

// Reasons of ConditionHeld, and, but for the first, of events.
const (
	ReasonHolderFound     = "HolderFound"
	ReasonHolderUnknown   = "HolderUnknown"
	ReasonHolderForbidden = "HolderForbidden"
	ReasonHolderMissing   = "HolderMissing"
	ReasonHolderInvalid   = "HolderInvalid"
)

// askAgain is for what no event tells of: a right that is granted, an API that
// is installed.
const askAgain = time.Minute

// Reconciler is the controller of claims with the annotation.
type Reconciler struct {
	// Client reads from a cache.
	Client client.Client
	// Live reads from the API server.
	Live    client.Reader
	Cluster kubernetes.Interface
	Mapper  meta.RESTMapper
	Driver  string
	Events  events.EventRecorder
	// StaleEntriesStay is of the cluster, as claims.StaleEntriesStay says.
	StaleEntriesStay bool

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
		return ctrl.Result{}, claims.Keeper{Client: r.Client}.Change(ctx, &claim, change(&claim, owner, false))
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
	if owner.UID != "" && claims.HasReservation(&claim, owner.UID) {
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
	return ctrl.Result{RequeueAfter: again}, claims.Keeper{Client: r.Client}.Change(ctx, claim, c)
}

// keep tells that a claim is held, and takes care of its pods that have ended.
func (r *Reconciler) keep(ctx context.Context, claim *resourceapi.ResourceClaim, holder Holder) (ctrl.Result, error) {
	if err := r.tell(ctx, claim, ReasonHolderFound, fmt.Sprintf("allocated as long as %s is there", holder)); err != nil {
		return ctrl.Result{}, err
	}
	finder := claims.Finder{Live: r.Live, All: r.StaleEntriesStay}
	users, err := finder.Users(ctx, claim)
	if err != nil {
		return ctrl.Result{}, err
	}
	gone, err := finder.Gone(ctx, claim, users)
	if err != nil {
		return ctrl.Result{}, err
	}
	c := claims.Leftovers(claim, users, gone, claims.MaxEnded)
	again := time.Duration(0)
	if len(c.Add) > 0 || len(finder.MayBeGone(claim)) > 0 {
		again = podsAgain
	}
	return ctrl.Result{RequeueAfter: again}, claims.Keeper{Client: r.Client}.Change(ctx, claim, c)
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
		c.Remove = claims.EntriesOf(claim, theirs)
		c.Guard = len(c.Remove) > 0 // see claims.Released
	}
	switch {
	case owner.UID == "" && len(c.Remove) == len(claim.Status.ReservedFor) && len(c.Remove) > 0 && claim.DeletionTimestamp == nil:
		return claims.Change{Deallocate: true}
	case owner.UID != "" && bound && claim.DeletionTimestamp == nil && !claims.HasReservation(claim, owner.UID):
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
		if !claims.Ended(entry) && (entry.APIGroup != "" || entry.Resource != "pods") {
			return true, nil // held by what lives longer than a pod
		}
	}
	for _, entry := range claim.Status.ReservedFor {
		var pod corev1.Pod
		err := r.Live.Get(ctx, types.NamespacedName{Namespace: claim.Namespace, Name: entry.Name}, &pod)
		if err == nil && pod.UID == entry.UID && pod.Spec.NodeName != "" {
			return true, nil
		}
		if client.IgnoreNotFound(err) != nil {
			return false, err
		}
	}
	return false, nil
}

// find returns the holder, nil if it is gone. A reason is given for what the
// claim's owner, or the administrator, must change.
func (r *Reconciler) find(ctx context.Context, claim *resourceapi.ResourceClaim, holder Holder) (*metav1.PartialObjectMetadata, string, error) {
	kind, err := r.Mapper.KindFor(holder.WithVersion(""))
	if meta.IsNoMatchError(err) {
		return nil, ReasonHolderUnknown, fmt.Errorf("the cluster has no resource %s: is the group or the plural misspelt, or its API not installed?", holder.GroupResource)
	}
	if err != nil {
		return nil, "", err
	}
	mapping, err := r.Mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return nil, "", err
	}
	if plural := mapping.Resource.Resource; plural != holder.Resource {
		return nil, ReasonHolderUnknown, fmt.Errorf("the resource is called %s: write %s", plural, Holder{schema.GroupResource{Group: holder.Group, Resource: plural}, holder.Name})
	}
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(kind)
	err = r.Live.Get(ctx, types.NamespacedName{Namespace: claim.Namespace, Name: holder.Name}, object)
	if apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse) {
		// Not this object is missing, but its whole API: it may come back.
		return nil, ReasonHolderUnknown, fmt.Errorf("the API server does not serve %s any more: is its API still installed?", kind)
	}
	if err == nil || apierrors.IsNotFound(err) {
		err = errors.Join(client.IgnoreNotFound(err), r.watch(ctx, mapping))
	}
	switch {
	case apierrors.IsForbidden(err):
		return nil, ReasonHolderForbidden, fmt.Errorf("the controller may not get, list and watch %s: let the administrator add it to the chart's controller.reservedFor", holder.GroupResource)
	case err != nil:
		return nil, "", err
	case object.UID == "":
		return nil, "", nil
	}
	return object, "", nil
}

// watch makes the claims of a kind of holder be looked at when one changes.
func (r *Reconciler) watch(ctx context.Context, mapping *meta.RESTMapping) error {
	kind := mapping.GroupVersionKind
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.watched[kind] {
		return nil
	}
	// An informer without the right would try for ever, and say nothing here.
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(kind)
	if err := r.Live.List(ctx, list, client.Limit(1)); err != nil {
		return err
	}
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(kind)
	enqueue := handler.TypedEnqueueRequestsFromMapFunc(func(ctx context.Context, o *metav1.PartialObjectMetadata) (requests []reconcile.Request) {
		holder := Holder{GroupResource: mapping.Resource.GroupResource(), Name: o.Name}
		var held resourceapi.ResourceClaimList
		if err := r.Client.List(ctx, &held, client.InNamespace(o.Namespace), client.MatchingFields{indexHolder: holder.String()}); err != nil {
			return nil // the cache has ended
		}
		for i := range held.Items {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&held.Items[i])})
		}
		return requests
	})
	if err := r.controller.Watch(source.Kind(r.cache, object, enqueue)); err != nil {
		return fmt.Errorf("watch %s: %w", mapping.Resource.GroupResource(), err)
	}
	r.watched[kind] = true
	return nil
}

// tell says whether the claim is held: in a condition of each of the driver's
// devices that the claim has, and, where it is not, in an event.
func (r *Reconciler) tell(ctx context.Context, claim *resourceapi.ResourceClaim, reason, message string) error {
	c := metav1.Condition{Type: ConditionHeld, Status: metav1.ConditionTrue, Reason: reason, Message: message}
	if reason != ReasonHolderFound {
		c.Status = metav1.ConditionFalse
		// Without its resourceVersion: events that are alike are one series then.
		about := &corev1.ObjectReference{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}
		r.Events.Eventf(about, nil, corev1.EventTypeWarning, reason, "Hold", "%s", message)
	}
	rows := rowsOf(claim, r.Driver, c)
	if len(rows) == 0 {
		return nil
	}
	return report.Apply(ctx, r.Cluster, claim, report.FieldManagerHolders, rows)
}

// rowsOf are the entries that lack the condition. It is pure.
func rowsOf(claim *resourceapi.ResourceClaim, driver string, c metav1.Condition) (rows []resourceapi.AllocatedDeviceStatus) {
	if claim.Status.Allocation == nil {
		return nil
	}
	told := true
	for _, d := range claim.Status.Allocation.Devices.Results {
		if d.Driver != driver {
			continue
		}
		row := report.Row(d, nil, c)
		rows = append(rows, row)
		told = told && slices.ContainsFunc(claim.Status.Devices, func(s resourceapi.AllocatedDeviceStatus) bool {
			there := meta.FindStatusCondition(s.Conditions, c.Type)
			return s.Driver == row.Driver && s.Pool == row.Pool && s.Device == row.Device && ptr.Equal(s.ShareID, row.ShareID) &&
				there != nil && there.Status == c.Status && there.Reason == c.Reason && there.Message == c.Message
		})
	}
	if told {
		return nil
	}
	return rows
}
