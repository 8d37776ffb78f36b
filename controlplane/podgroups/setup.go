// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/controlplane/retry"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

const (
	// indexOwner indexes claims by the UID of the object that they were generated for.
	indexOwner = "dra-shared.owner"
	// indexHolder indexes claims by the names of the PodGroups that hold them.
	indexHolder = "dra-shared.holder"
	// indexTemplate indexes PodGroups by the names of the templates that they refer to.
	indexTemplate = "dra-shared.template"
	// indexClaim indexes PodGroups by the names of the claims that they refer to.
	indexClaim = "dra-shared.claim"
	// indexWorkload indexes PodGroups by the value of their annotation workload.
	indexWorkload = "dra-shared.workload"
)

// maxConcurrentReconciles is the number of PodGroups that are reconciled at a time.
const maxConcurrentReconciles = 8

// SetupWithManager registers the controller with the manager, which starts it.
func (r *Reconciler) SetupWithManager(ctx context.Context, m ctrl.Manager) error {
	if err := addIndexes(ctx, m, indexes()); err != nil {
		return err
	}
	b := ctrl.NewControllerManagedBy(m).
		For(&scheduling.PodGroup{}, builder.WithPredicates(relevantGroupChange())).
		Watches(&resourceapi.ResourceClaim{}, handler.EnqueueRequestsFromMapFunc(r.groupsOfClaim)).
		Watches(&resourceapi.ResourceClaimTemplate{}, handler.EnqueueRequestsFromMapFunc(r.groupsOfTemplate)).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(groupOfPod), builder.WithPredicates(relevantPodChange())).
		WithOptions(controllerOptions())
	if r.Mode == mode.Native {
		b = b.Owns(&schedulingapi.PodGroup{})
	}
	c, err := b.Build(r)
	r.Lookup.StartWatch = workload.Watch(c, m.GetCache(), r.groupsOfWorkload)
	return err
}

func controllerOptions() controller.Options {
	options := retry.Options()
	options.MaxConcurrentReconciles = maxConcurrentReconciles
	return options
}

// index is a field index of the cache.
type index struct {
	object client.Object
	field  string
	keys   client.IndexerFunc
}

func addIndexes(ctx context.Context, m ctrl.Manager, indexes []index) error {
	for _, i := range indexes {
		if err := m.GetFieldIndexer().IndexField(ctx, i.object, i.field, i.keys); err != nil {
			return err
		}
	}
	return nil
}

// indexes returns the field indexes that the Reconciler needs in its Client.
func indexes() []index {
	return []index{
		{&resourceapi.ResourceClaim{}, indexOwner, ownerKeys},
		{&resourceapi.ResourceClaim{}, indexHolder, holderKeys},
		{&scheduling.PodGroup{}, indexTemplate, entryKeys(func(c scheduling.PodGroupResourceClaim) *string {
			return c.ResourceClaimTemplateName
		})},
		{&scheduling.PodGroup{}, indexClaim, entryKeys(func(c scheduling.PodGroupResourceClaim) *string {
			return c.ResourceClaimName
		})},
		{&scheduling.PodGroup{}, indexWorkload, func(o client.Object) []string {
			if name, ok := o.GetAnnotations()[scheduling.WorkloadAnnotation]; ok {
				return []string{name}
			}
			return nil
		}},
	}
}

func ownerKeys(o client.Object) []string {
	if owner := metav1.GetControllerOf(o); owner != nil {
		return []string{string(owner.UID)}
	}
	return nil
}

func holderKeys(o client.Object) []string {
	claim, ok := o.(*resourceapi.ResourceClaim)
	if !ok {
		return nil
	}
	var names []string
	for _, h := range holders(claim) {
		names = append(names, h.name)
	}
	return names
}

// entryKeys returns a function that returns one field of all entries of a PodGroup's
// spec.resourceClaims.
func entryKeys(field func(scheduling.PodGroupResourceClaim) *string) client.IndexerFunc {
	return func(o client.Object) []string {
		pg, ok := o.(*scheduling.PodGroup)
		if !ok {
			return nil
		}
		var names []string
		for _, c := range pg.Spec.ResourceClaims {
			if name := field(c); name != nil {
				names = append(names, *name)
			}
		}
		return names
	}
}

// groupsOfClaim returns requests for the PodGroups that the claim was generated for, that hold it, or that refer to it
// by name.
func (r *Reconciler) groupsOfClaim(ctx context.Context, o client.Object) []reconcile.Request {
	var names []string
	if owner := podGroupOwner(o); owner != nil {
		names = append(names, owner.Name)
	}
	names = append(names, holderKeys(o)...)
	return requests(o.GetNamespace(), append(names, r.groupsReferringTo(ctx, indexClaim, o)...))
}

// groupsOfTemplate returns requests for the PodGroups that refer to the template.
func (r *Reconciler) groupsOfTemplate(ctx context.Context, o client.Object) []reconcile.Request {
	return requests(o.GetNamespace(), r.groupsReferringTo(ctx, indexTemplate, o))
}

// groupsOfWorkload returns requests for the PodGroups with an annotation that names the object.
func (r *Reconciler) groupsOfWorkload(
	ctx context.Context, namespace string, object workload.Reference,
) []reconcile.Request {
	return requests(namespace, r.namesWith(ctx, &scheduling.PodGroupList{}, namespace, indexWorkload, object.String()))
}

// groupsReferringTo returns the names of the PodGroups that the index finds for the
// name of the object.
func (r *Reconciler) groupsReferringTo(ctx context.Context, field string, o client.Object) []string {
	return r.namesWith(ctx, &scheduling.PodGroupList{}, o.GetNamespace(), field, o.GetName())
}

// namesWith returns the names of the objects that an index finds for a value. list is an
// empty list of their kind.
func (r *Reconciler) namesWith(
	ctx context.Context, list client.ObjectList, namespace, field, value string,
) (names []string) {
	err := r.Client.List(ctx, list, client.InNamespace(namespace), client.MatchingFields{field: value})
	if err != nil {
		return nil // the cache is shutting down
	}
	_ = meta.EachListItem(list, func(item runtime.Object) error { // the function returns no error
		if o, ok := item.(client.Object); ok {
			names = append(names, o.GetName())
		}
		return nil
	})
	return names
}

// groupOfPod returns a request for the PodGroup of the pod.
func groupOfPod(_ context.Context, o client.Object) []reconcile.Request {
	name := o.GetAnnotations()[scheduling.GroupAnnotation]
	if name == "" {
		return nil
	}
	return requests(o.GetNamespace(), []string{name})
}

// requests returns one request for each distinct name.
func requests(namespace string, names []string) []reconcile.Request {
	var all []reconcile.Request
	seen := map[string]bool{}
	for _, name := range names {
		if !seen[name] {
			seen[name] = true
			all = append(all, reconcile.Request{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}})
		}
	}
	return all
}

// relevantPodChange drops updates of pods that do not affect their claims.
func relevantPodChange() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, ok := e.ObjectOld.(*corev1.Pod)
		after, ok2 := e.ObjectNew.(*corev1.Pod)
		if !ok || !ok2 {
			return true
		}
		return before.Spec.NodeName != after.Spec.NodeName ||
			isGated(before) != isGated(after) || hasForeignGate(before) != hasForeignGate(after) ||
			podstatus.IsTerminal(before) != podstatus.IsTerminal(after) ||
			podstatus.IsUnschedulable(before) != podstatus.IsUnschedulable(after) ||
			before.Labels[scheduling.GroupUIDLabel] != after.Labels[scheduling.GroupUIDLabel]
	}}
}

// relevantGroupChange drops updates that change only the status of a PodGroup, which the controller writes. A
// condition's message may contain the error of a refused write. If that error differs each time, for example by the
// port of a connection, each write of the status would otherwise cause the next reconcile immediately.
func relevantGroupChange() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, ok := e.ObjectOld.(*scheduling.PodGroup)
		after, ok2 := e.ObjectNew.(*scheduling.PodGroup)
		isResync := e.ObjectOld.GetResourceVersion() == e.ObjectNew.GetResourceVersion()
		return !ok || !ok2 || isResync || !equality.Semantic.DeepEqual(withoutStatus(before), withoutStatus(after))
	}}
}

// withoutStatus returns a copy of the PodGroup without its status, and without what changes with each write.
func withoutStatus(pg *scheduling.PodGroup) *scheduling.PodGroup {
	c := pg.DeepCopy()
	c.Status, c.ResourceVersion, c.ManagedFields = scheduling.PodGroupStatus{}, "", nil
	return c
}
