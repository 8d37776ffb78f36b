package reservedfor

import (
	"context"
	"errors"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

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
	err = r.APIReader.Get(ctx, types.NamespacedName{Namespace: claim.Namespace, Name: holder.Name}, object)
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
	if err := r.APIReader.List(ctx, list, client.Limit(1)); err != nil {
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
