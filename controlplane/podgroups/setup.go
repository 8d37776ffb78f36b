package podgroups

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

const (
	// indexOwner finds claims by the UID of what they were generated for.
	indexOwner = "dra-shared.owner"
	// indexHolder finds claims by the name of the PodGroup that they are held for.
	indexHolder = "dra-shared.holder"
	// indexTemplate finds PodGroups by the templates that they name.
	indexTemplate = "dra-shared.template"
	// indexClaim finds PodGroups by the claims that they name.
	indexClaim = "dra-shared.claim"
)

// reconcilesAtOnce is how many groups are worked on at a time.
const reconcilesAtOnce = 8

// SetupWithManager registers the controller.
func (r *Reconciler) SetupWithManager(ctx context.Context, m ctrl.Manager) error {
	if err := index(ctx, m.GetFieldIndexer()); err != nil {
		return err
	}
	b := ctrl.NewControllerManagedBy(m).
		For(&scheduling.PodGroup{}).
		Watches(&resourceapi.ResourceClaim{}, handler.EnqueueRequestsFromMapFunc(r.ofClaim)).
		Watches(&resourceapi.ResourceClaimTemplate{}, handler.EnqueueRequestsFromMapFunc(r.ofTemplate)).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(ofPod), builder.WithPredicates(podMatters())).
		WithOptions(controller.Options{MaxConcurrentReconciles: reconcilesAtOnce})
	if r.Mode == mode.Native {
		b = b.Owns(&schedulingapi.PodGroup{})
	}
	return b.Complete(r)
}

func index(ctx context.Context, indexer client.FieldIndexer) error {
	if err := indexer.IndexField(ctx, &resourceapi.ResourceClaim{}, indexOwner, func(o client.Object) []string {
		if controller := metav1.GetControllerOf(o); controller != nil {
			return []string{string(controller.UID)}
		}
		return nil
	}); err != nil {
		return err
	}
	if err := indexer.IndexField(ctx, &resourceapi.ResourceClaim{}, indexHolder, func(o client.Object) (names []string) {
		if claim, ok := o.(*resourceapi.ResourceClaim); ok {
			for _, h := range holders(claim) {
				names = append(names, h.name)
			}
		}
		return names
	}); err != nil {
		return err
	}
	for key, field := range map[string]func(scheduling.PodGroupResourceClaim) *string{
		indexTemplate: func(c scheduling.PodGroupResourceClaim) *string { return c.ResourceClaimTemplateName },
		indexClaim:    func(c scheduling.PodGroupResourceClaim) *string { return c.ResourceClaimName },
	} {
		if err := indexer.IndexField(ctx, &scheduling.PodGroup{}, key, func(o client.Object) (names []string) {
			if pg, ok := o.(*scheduling.PodGroup); ok {
				for _, c := range pg.Spec.ResourceClaims {
					if name := field(c); name != nil {
						names = append(names, *name)
					}
				}
			}
			return names
		}); err != nil {
			return err
		}
	}
	return nil
}

// ofClaim are the PodGroups that a claim was generated for, is held for, or is
// named by.
func (r *Reconciler) ofClaim(ctx context.Context, o client.Object) (requests []reconcile.Request) {
	seen := map[string]bool{}
	add := func(name string) {
		if !seen[name] {
			seen[name] = true
			requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Namespace: o.GetNamespace(), Name: name}})
		}
	}
	if owner := metav1.GetControllerOf(o); owner != nil && owner.Kind == scheduling.Kind && owner.APIVersion == scheduling.GroupVersion.String() {
		add(owner.Name)
	}
	if claim, ok := o.(*resourceapi.ResourceClaim); ok {
		for _, h := range holders(claim) {
			add(h.name)
		}
	}
	for _, name := range r.naming(ctx, indexClaim, o) {
		add(name)
	}
	return requests
}

func (r *Reconciler) ofTemplate(ctx context.Context, o client.Object) (requests []reconcile.Request) {
	for _, name := range r.naming(ctx, indexTemplate, o) {
		requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Namespace: o.GetNamespace(), Name: name}})
	}
	return requests
}

// naming are the PodGroups that name an object.
func (r *Reconciler) naming(ctx context.Context, index string, o client.Object) (names []string) {
	var list scheduling.PodGroupList
	if err := r.Client.List(ctx, &list, client.InNamespace(o.GetNamespace()), client.MatchingFields{index: o.GetName()}); err != nil {
		return nil // the cache has ended
	}
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	return names
}

func ofPod(_ context.Context, o client.Object) []reconcile.Request {
	name := o.GetAnnotations()[scheduling.GroupAnnotation]
	if name == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: o.GetNamespace(), Name: name}}}
}

// podMatters drops what changes nothing for a pod's claims.
func podMatters() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		before, ok := e.ObjectOld.(*corev1.Pod)
		now, ok2 := e.ObjectNew.(*corev1.Pod)
		return !ok || !ok2 || before.Spec.NodeName != now.Spec.NodeName || gated(before) != gated(now) || podstatus.IsTerminal(before) != podstatus.IsTerminal(now) ||
			podstatus.IsUnschedulable(before) != podstatus.IsUnschedulable(now) || before.Labels[scheduling.GroupUIDLabel] != now.Labels[scheduling.GroupUIDLabel]
	}}
}
