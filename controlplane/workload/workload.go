// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package workload finds the objects that annotations name: holders of claims, and creators of the pods of PodGroups.
// Users choose their kinds, so the Lookup reads the few fields that kinds have in common, and starts a watch for each
// kind that an annotation names.
package workload

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// Lookup finds objects, and watches their kinds.
type Lookup struct {
	// APIReader reads from the API server.
	APIReader client.Reader
	// Mapper resolves the resources that annotations name.
	Mapper meta.RESTMapper
	// StartWatch starts a watch for objects of a kind; see Watch. It does not wait for the API server, because other
	// lookups may wait for it.
	StartWatch func(schema.GroupVersionKind, schema.GroupResource) error
	// Cache is the cache of the watches. Default: Find does not wait until a new watch has listed its objects.
	Cache cache.Informers

	// mu is not held during requests to the API server: an answer for one kind may take long.
	mu sync.Mutex
	// watched has the kinds with a watch. A watch does not end while the controller runs: their number is
	// limited by controller.reservedFor of the chart, which permits the controller to watch a kind.
	watched map[schema.GroupVersionKind]bool
}

// Watch returns a function for Lookup.StartWatch that makes a controller reconcile the requests that enqueue returns
// for an object.
func Watch(
	c controller.Controller, from cache.Cache,
	enqueue func(ctx context.Context, namespace string, object Reference) []reconcile.Request,
) func(schema.GroupVersionKind, schema.GroupResource) error {
	return func(kind schema.GroupVersionKind, resource schema.GroupResource) error {
		object := &metav1.PartialObjectMetadata{}
		object.SetGroupVersionKind(kind)
		requests := func(ctx context.Context, o *metav1.PartialObjectMetadata) []reconcile.Request {
			return enqueue(ctx, o.Namespace, Reference{GroupResource: resource, Name: o.Name})
		}
		return c.Watch(source.Kind(from, object, handler.TypedEnqueueRequestsFromMapFunc(requests)))
	}
}

// State is the state of an object that determines whether it needs devices.
type State struct {
	UID types.UID
	// Complete objects have ended, successfully or not.
	Complete bool
	// Suspended objects currently do not have pods: they are suspended, or have 0 replicas.
	Suspended bool
}

// RetryInterval is the time between two attempts to find an object if its existence cannot be verified. No event
// announces that an administrator grants a permission or installs an API.
const RetryInterval = time.Minute

// UnverifiableError reports that the Lookup cannot determine whether an object
// exists until the author of the annotation or the administrator changes something.
type UnverifiableError struct {
	// Reason is a reason of the condition Held.
	Reason  string
	Message string
}

func (e *UnverifiableError) Error() string { return e.Message }

var (
	// ErrMissing reports that the API serves the object's resource and that the object
	// does not exist.
	ErrMissing = errors.New("the object does not exist")
	// ErrCannotHold reports that objects of the resource cannot hold claims.
	ErrCannotHold = errors.New("names an object that cannot hold a claim")
)

// Find returns the state of an object, and starts a watch for objects of its resource.
// It returns ErrMissing if the object does not exist, an UnverifiableError if it cannot
// determine that, and an error that wraps ErrCannotHold for objects without a namespace.
func (l *Lookup) Find(ctx context.Context, namespace string, ref Reference) (State, error) {
	mapping, err := l.mappingFor(ref)
	if err != nil {
		return State{}, err
	}
	kind := mapping.GroupVersionKind
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(kind)
	// The watch must begin before the object is read. Otherwise, no event would announce that an object was deleted
	// in between.
	err = l.watch(ctx, mapping)
	isServed := !apierrors.IsNotFound(err)
	if err == nil {
		err = l.APIReader.Get(ctx, types.NamespacedName{Namespace: namespace, Name: ref.Name}, object)
		isServed = !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
	}
	if !isServed {
		// The API server also returns an error of a missing object if it no longer serves the resource. The object may
		// still exist.
		return State{}, &UnverifiableError{v1alpha1.ReasonHolderUnknown,
			fmt.Sprintf("the API server no longer serves %s: is its API still installed?", kind)}
	}
	switch {
	case apierrors.IsForbidden(err):
		return State{}, &UnverifiableError{v1alpha1.ReasonHolderForbidden,
			fmt.Sprintf("the controller is not permitted to get, list, and watch %s: "+
				"ask the administrator to add it to the chart's controller.reservedFor", ref.GroupResource)}
	case apierrors.IsNotFound(err):
		return State{}, ErrMissing
	case err != nil:
		return State{}, err
	}
	return stateOf(object), nil
}

// stateOf reads the fields that workload APIs have in common. Where spec.suspend exists, it is newer than the condition
// Suspended.
func stateOf(object *unstructured.Unstructured) State {
	state := State{UID: object.GetUID()}
	conditions, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions")
	for _, c := range conditions {
		condition, ok := c.(map[string]any)
		if !ok || condition["status"] != string(metav1.ConditionTrue) {
			continue
		}
		switch condition["type"] {
		case "Complete", "Completed", "Succeeded", "Finished", "Failed":
			state.Complete = true
		case "Suspended":
			state.Suspended = true
		}
	}
	if suspend, ok, err := unstructured.NestedBool(object.Object, "spec", "suspend"); ok && err == nil {
		state.Suspended = suspend
	}
	replicas, ok, err := unstructured.NestedInt64(object.Object, "spec", "replicas")
	state.Suspended = state.Suspended || ok && err == nil && replicas == 0
	return state
}

// mappingFor returns the REST mapping of the object's resource. It accepts only the
// plural, because entries of status.reservedFor with other names are not recognized
// as the holder's.
func (l *Lookup) mappingFor(ref Reference) (*meta.RESTMapping, error) {
	kind, err := l.Mapper.KindFor(ref.WithVersion(""))
	if meta.IsNoMatchError(err) {
		return nil, &UnverifiableError{v1alpha1.ReasonHolderUnknown,
			fmt.Sprintf("the cluster does not serve resource %s: "+
				"is the group or the plural misspelled, or its API not installed?", ref.GroupResource)}
	}
	if err != nil {
		return nil, err
	}
	mapping, err := l.Mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return nil, err
	}
	if plural := mapping.Resource.Resource; plural != ref.Resource {
		correct := Reference{schema.GroupResource{Group: ref.Group, Resource: plural}, ref.Name}
		return nil, &UnverifiableError{v1alpha1.ReasonHolderUnknown,
			fmt.Sprintf("the name of the resource is %s: use %s", plural, correct)}
	}
	if mapping.Scope.Name() != meta.RESTScopeNameNamespace {
		return nil, fmt.Errorf("%w: %s is not in a namespace, and would keep the claim and its namespace from "+
			"being deleted: name an object in the namespace of the claim", ErrCannotHold, ref)
	}
	return mapping, nil
}

// watch starts a watch for the resource, unless there is one. Events about an object
// trigger reconciles of the objects that name it.
func (l *Lookup) watch(ctx context.Context, mapping *meta.RESTMapping) error {
	kind := mapping.GroupVersionKind
	if l.isWatched(kind) {
		return nil
	}
	// Without permission, an informer retries forever and does not return an error. List once to find out.
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(kind)
	if err := l.APIReader.List(ctx, list, client.Limit(1)); err != nil {
		return err
	}
	if err := l.awaitCache(ctx, kind); err != nil {
		return fmt.Errorf("list %s: %w", mapping.Resource.GroupResource(), err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.watched[kind] {
		return nil // another worker has listed the kind, too
	}
	if err := l.StartWatch(kind, mapping.Resource.GroupResource()); err != nil {
		return fmt.Errorf("watch %s: %w", mapping.Resource.GroupResource(), err)
	}
	if l.watched == nil {
		l.watched = map[schema.GroupVersionKind]bool{}
	}
	l.watched[kind] = true
	return nil
}

// cacheTimeout limits how long one lookup waits for the list of a kind. The reconcile is repeated after an error.
const cacheTimeout = 10 * time.Second

// awaitCache waits until the cache has all objects of a kind. StartWatch then does not need the API server's answer to
// announce more changes.
func (l *Lookup) awaitCache(ctx context.Context, kind schema.GroupVersionKind) error {
	if l.Cache == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, cacheTimeout)
	defer cancel()
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(kind)
	_, err := l.Cache.GetInformer(ctx, object)
	return err
}

func (l *Lookup) isWatched(kind schema.GroupVersionKind) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.watched[kind]
}
