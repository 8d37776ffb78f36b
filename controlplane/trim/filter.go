// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// filtered returns a ListerWatcher of some of the objects of another one. filterList removes objects from a list, and
// filterEvent drops or changes events.
func filtered(
	all cache.ListerWatcher, filterList func(runtime.Object), filterEvent watch.FilterFunc,
) cache.ListerWatcher {
	source := cache.ToListerWatcherWithContext(all)
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list, err := source.ListWithContext(ctx, options)
			filterList(list)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			events, err := source.WatchWithContext(ctx, options)
			if err != nil {
				return nil, err
			}
			return watch.Filter(events, filterEvent), nil
		},
	}, all)
}
