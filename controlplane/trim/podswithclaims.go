// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// OnlyPodsWithClaims returns a ListerWatcher that limits an informer's cache of pods to pods that use claims. A pod's
// entries for claims are immutable.
func OnlyPodsWithClaims(all cache.ListerWatcher) cache.ListerWatcher {
	return filtered(all, func(list runtime.Object) {
		if pods, ok := list.(*corev1.PodList); ok {
			pods.Items = slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return len(p.Spec.ResourceClaims) == 0 })
		}
	}, func(e watch.Event) (watch.Event, bool) {
		pod, ok := e.Object.(*corev1.Pod)
		withoutClaims := ok && e.Type != watch.Bookmark && len(pod.Spec.ResourceClaims) == 0 // a bookmark is about no pod
		return e, !withoutClaims
	})
}
