// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reservedfor

import (
	"context"
	"errors"
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
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

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// unverifiableError reports that the controller cannot determine whether a holder
// exists until the author of the annotation or the administrator changes something.
type unverifiableError struct {
	// reason is a reason of the condition Held.
	reason  string
	message string
}

func (e *unverifiableError) Error() string { return e.message }

// errNoHolder reports that the API serves the holder's resource and that the holder
// does not exist.
var errNoHolder = errors.New("the holder does not exist")

// errRefused reports that objects of the holder's resource cannot hold claims.
var errRefused = errors.New("the object cannot hold a claim")

// findHolder returns the UID of the holder in the claim's namespace, and starts a
// watch for objects of its resource. It returns errNoHolder if the holder does not
// exist, and an unverifiableError if the controller cannot determine that.
func (r *Reconciler) findHolder(
	ctx context.Context, claim *resourceapi.ResourceClaim, holder Holder,
) (types.UID, error) {
	mapping, err := r.mappingFor(holder)
	if err != nil {
		return "", err
	}
	kind := mapping.GroupVersionKind
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(kind)
	err = r.APIReader.Get(ctx, types.NamespacedName{Namespace: claim.Namespace, Name: holder.Name}, object)
	if apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse) {
		// The API server answers so if it does not serve the resource at all any more.
		// The object may still exist.
		return "", &unverifiableError{v1alpha1.ReasonHolderUnknown,
			fmt.Sprintf("the API server no longer serves %s: is its API still installed?", kind)}
	}
	missing := apierrors.IsNotFound(err)
	if err == nil || missing {
		err = r.watch(ctx, mapping)
	}
	switch {
	case apierrors.IsForbidden(err):
		return "", &unverifiableError{v1alpha1.ReasonHolderForbidden,
			fmt.Sprintf("the controller is not permitted to get, list, and watch %s: "+
				"ask the administrator to add it to the chart's controller.reservedFor", holder.GroupResource)}
	case err != nil:
		return "", err
	case missing:
		return "", errNoHolder
	}
	return object.UID, nil
}

// mappingFor returns the REST mapping of the holder's resource. It accepts only the
// plural, because entries of status.reservedFor with other names are not recognized
// as the holder's.
func (r *Reconciler) mappingFor(holder Holder) (*meta.RESTMapping, error) {
	kind, err := r.Mapper.KindFor(holder.WithVersion(""))
	if meta.IsNoMatchError(err) {
		return nil, &unverifiableError{v1alpha1.ReasonHolderUnknown,
			fmt.Sprintf("the cluster does not serve resource %s: "+
				"is the group or the plural misspelled, or its API not installed?", holder.GroupResource)}
	}
	if err != nil {
		return nil, err
	}
	mapping, err := r.Mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return nil, err
	}
	if plural := mapping.Resource.Resource; plural != holder.Resource {
		correct := Holder{schema.GroupResource{Group: holder.Group, Resource: plural}, holder.Name}
		return nil, &unverifiableError{v1alpha1.ReasonHolderUnknown,
			fmt.Sprintf("the name of the resource is %s: use %s", plural, correct)}
	}
	if mapping.Scope.Name() != meta.RESTScopeNameNamespace {
		return nil, fmt.Errorf("%w: %s is not in a namespace, and would keep the claim and its namespace from "+
			"being deleted: name an object in the namespace of the claim", errRefused, holder)
	}
	return mapping, nil
}

// isIdle reports whether the holder needs no devices now: it is a Job that has ended or
// is suspended. The caller checks that no pod uses the claim.
func (r *Reconciler) isIdle(ctx context.Context, namespace string, holder Holder) (bool, error) {
	if holder.Group != batchv1.GroupName || holder.Resource != "jobs" {
		return false, nil
	}
	var job batchv1.Job
	if err := r.APIReader.Get(ctx, types.NamespacedName{Namespace: namespace, Name: holder.Name}, &job); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	return slices.ContainsFunc(job.Status.Conditions, func(c batchv1.JobCondition) bool {
		idle := c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed || c.Type == batchv1.JobSuspended
		return idle && c.Status == corev1.ConditionTrue
	}), nil
}

// watch starts a watch for the resource, unless there is one. Events about an object
// trigger reconciles of the claims whose annotation names it.
func (r *Reconciler) watch(ctx context.Context, mapping *meta.RESTMapping) error {
	kind := mapping.GroupVersionKind
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.watched[kind] {
		return nil
	}
	// Without permission, an informer retries forever and returns no error. List once
	// to find out.
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(kind)
	if err := r.APIReader.List(ctx, list, client.Limit(1)); err != nil {
		return err
	}
	if err := r.startWatch(kind, mapping.Resource.GroupResource()); err != nil {
		return fmt.Errorf("watch %s: %w", mapping.Resource.GroupResource(), err)
	}
	r.watched[kind] = true
	return nil
}

// watchHolders starts an informer for the kind.
func (r *Reconciler) watchHolders(kind schema.GroupVersionKind, resource schema.GroupResource) error {
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(kind)
	enqueue := func(ctx context.Context, o *metav1.PartialObjectMetadata) []reconcile.Request {
		return r.claimsHeldBy(ctx, o.Namespace, Holder{GroupResource: resource, Name: o.Name})
	}
	return r.controller.Watch(source.Kind(r.cache, object, handler.TypedEnqueueRequestsFromMapFunc(enqueue)))
}

// claimsHeldBy returns requests for the claims whose annotation names the holder.
func (r *Reconciler) claimsHeldBy(ctx context.Context, namespace string, holder Holder) []reconcile.Request {
	var held resourceapi.ResourceClaimList
	err := r.Client.List(ctx, &held, client.InNamespace(namespace), client.MatchingFields{indexHolder: holder.String()})
	if err != nil {
		return nil // the cache is shutting down
	}
	var requests []reconcile.Request
	for i := range held.Items {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&held.Items[i])})
	}
	return requests
}
