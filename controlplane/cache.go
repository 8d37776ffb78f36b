// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	clientcache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/trim"
)

// cacheOptions limits the cache to pods of PodGroups, to claims that concern this driver, to the
// controller's own EndpointSlices, and to the fields of pods, claims, Jobs, StatefulSets, and nodes
// that the controller reads: a PodGroup may have thousands of pods.
func cacheOptions(driver string) (cache.Options, error) {
	inPodGroup, err := labels.NewRequirement(scheduling.GroupUIDLabel, selection.Exists, nil)
	if err != nil {
		return cache.Options{}, err
	}
	return cache.Options{
		NewInformer: func(
			source clientcache.ListerWatcher, object runtime.Object, resync time.Duration, indexers clientcache.Indexers,
		) clientcache.SharedIndexInformer {
			if _, ok := object.(*resourceapi.ResourceClaim); ok {
				source = trim.WithoutForeignClaims(source, driver)
			}
			return clientcache.NewSharedIndexInformer(source, object, resync, indexers)
		},
		DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}:  {Label: labels.NewSelector().Add(*inPodGroup), Transform: trim.Pod},
			&batchv1.Job{}: {Transform: trim.Job},
			&corev1.Node{}: {Transform: trim.Node},

			&appsv1.StatefulSet{}:        {Transform: trim.StatefulSet},
			&resourceapi.ResourceClaim{}: {Transform: trim.Claim(driver)},
			&discoveryv1.EndpointSlice{}: {
				Label: labels.SelectorFromSet(labels.Set{discoveryv1.LabelManagedBy: v1alpha1.ManagedByController}),
			},
		},
	}, nil
}
