// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package claimpods watches the pods of single claims, whether they are in a PodGroup or not.
//
// The controller's cache has only the pods of PodGroups: with all pods, it would grow with unrelated workloads. A
// Watcher caches the pods of a namespace as long as its user needs the pods of a claim in it, and only pods that use
// claims. Changes of the pods cause requests for the claim, so reconcilers do not need to poll.
package claimpods

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/dra-shared/dra-driver-shared/controlplane/trim"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
)

const (
	// requestDelay is the time from a pod's change to the request for its claim. With it, the start of hundreds of pods
	// causes few requests.
	requestDelay = time.Second
	// listTimeout limits how long Pods waits for the first list of a namespace's pods.
	listTimeout = 10 * time.Second
	// indexClaim indexes pods by the names of their claims.
	indexClaim = "claim"
)

// Watcher watches pods. Its Source must be started first.
type Watcher struct {
	Cluster kubernetes.Interface
	// Labels is a label selector; "" selects all pods.
	Labels string

	mu         sync.Mutex
	queue      workqueue.TypedRateLimitingInterface[reconcile.Request]
	namespaces map[string]*namespace
	// start runs an informer until stop is called.
	start func(cache.SharedIndexInformer) (stop context.CancelFunc)
}

// namespace is a namespace with a claim that Pods was called for.
type namespace struct {
	informer cache.SharedIndexInformer
	stop     context.CancelFunc
	// claims has the names of these claims.
	claims map[string]bool
}

// Source returns the source of the requests.
func (w *Watcher) Source() source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.queue, w.namespaces = queue, map[string]*namespace{}
		w.start = func(informer cache.SharedIndexInformer) context.CancelFunc {
			ctx, stop := context.WithCancel(ctx)
			go informer.RunWithContext(ctx)
			return stop
		}
		return nil
	})
}

// Pods returns the pods that use the claim, which the caller must not change. Until Forget is called, the Source
// sends a request for the claim when such a pod appears, is bound, changes its phase, or disappears.
func (w *Watcher) Pods(ctx context.Context, claim types.NamespacedName) (pods []*corev1.Pod, err error) {
	informer, err := w.watch(claim)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	if !cache.WaitFor(ctx, "", informer.HasSyncedChecker()) {
		return nil, fmt.Errorf("watch the pods of namespace %s: the API server has not sent them within %s: "+
			"does the log have an error of the watch?", claim.Namespace, listTimeout)
	}
	objects, err := informer.GetIndexer().ByIndex(indexClaim, claim.Name)
	for _, object := range objects {
		if pod, ok := object.(*corev1.Pod); ok {
			pods = append(pods, pod)
		}
	}
	return pods, err
}

// Forget ends the requests for a claim. After the last claim of a namespace, it also ends the watch of the
// namespace's pods. It does nothing if Pods was not called for the claim.
func (w *Watcher) Forget(claim types.NamespacedName) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.namespaces[claim.Namespace]
	if n == nil {
		return
	}
	delete(n.claims, claim.Name)
	if len(n.claims) == 0 {
		n.stop()
		delete(w.namespaces, claim.Namespace)
	}
}

// Watches reports whether Pods was called for the claim, and Forget was not called afterward.
func (w *Watcher) Watches(claim types.NamespacedName) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.namespaces[claim.Namespace]
	return n != nil && n.claims[claim.Name]
}

// watch returns the informer of the claim's namespace.
func (w *Watcher) watch(claim types.NamespacedName) (cache.SharedIndexInformer, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.namespaces[claim.Namespace]
	if n == nil {
		informer, err := w.newInformer(claim.Namespace)
		if err != nil {
			return nil, fmt.Errorf("watch the pods of namespace %s: %w", claim.Namespace, err)
		}
		n = &namespace{informer: informer, stop: w.start(informer), claims: map[string]bool{}}
		w.namespaces[claim.Namespace] = n
	}
	n.claims[claim.Name] = true
	return n.informer, nil
}

// newInformer returns an informer of the pods of a namespace that use claims.
func (w *Watcher) newInformer(namespace string) (cache.SharedIndexInformer, error) {
	pods := w.Cluster.CoreV1().Pods(namespace)
	all := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.LabelSelector = w.Labels
			return pods.List(ctx, options)
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.LabelSelector = w.Labels
			return pods.Watch(ctx, options)
		},
	}, w.Cluster)
	informer := cache.NewSharedIndexInformer(trim.OnlyPodsWithClaims(all), &corev1.Pod{}, 0,
		cache.Indexers{indexClaim: claimKeys})
	if err := informer.SetTransform(trim.PodWithClaims); err != nil {
		return nil, err
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(pod any, isInFirstList bool) {
			if !isInFirstList { // Pods waits for that list
				w.request(pod)
			}
		},
		UpdateFunc: func(before, after any) {
			if isRelevant(before, after) {
				w.request(after)
			}
		},
		DeleteFunc: w.request,
	})
	return informer, err
}

// claimKeys returns the keys of a pod for indexClaim.
func claimKeys(object any) ([]string, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return nil, nil
	}
	return claimref.AllNames(pod), nil
}

// isRelevant reports whether an update of a pod affects its claims.
func isRelevant(before, after any) bool {
	a, ok := before.(*corev1.Pod)
	b, ok2 := after.(*corev1.Pod)
	return !ok || !ok2 || a.Spec.NodeName != b.Spec.NodeName || a.Status.Phase != b.Status.Phase
}

// request sends requests for the claims of a pod that Pods was called for.
func (w *Watcher) request(object any) {
	if last, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = last.Obj
	}
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return
	}
	for _, name := range claimref.AllNames(pod) {
		if claim := (types.NamespacedName{Namespace: pod.Namespace, Name: name}); w.Watches(claim) {
			w.queue.AddAfter(reconcile.Request{NamespacedName: claim}, requestDelay)
		}
	}
}
