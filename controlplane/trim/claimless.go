// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// WithoutClaimlessPods returns a ListerWatcher of pods for an informer whose cache contains only pods that use
// claims. A pod's entries for claims are immutable.
func WithoutClaimlessPods(all cache.ListerWatcher) cache.ListerWatcher {
	source := cache.ToListerWatcherWithContext(all)
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list, err := source.ListWithContext(ctx, options)
			if pods, ok := list.(*corev1.PodList); ok {
				pods.Items = slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return len(p.Spec.ResourceClaims) == 0 })
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			events, err := source.WatchWithContext(ctx, options)
			if err != nil {
				return nil, err
			}
			return watch.Filter(events, func(e watch.Event) (watch.Event, bool) { return e, !isClaimlessPodEvent(e) }), nil
		},
	}, all)
}

// isClaimlessPodEvent reports whether the event is about a pod that uses no claim. A bookmark is about no pod.
func isClaimlessPodEvent(e watch.Event) bool {
	pod, ok := e.Object.(*corev1.Pod)
	return ok && e.Type != watch.Bookmark && len(pod.Spec.ResourceClaims) == 0
}
