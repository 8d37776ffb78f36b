// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/dra-shared/dra-driver-shared/internal/claimref"
)

// WithoutForeignClaims returns a ListerWatcher of ResourceClaims that keeps foreign claims out of an informer's cache
// (see IsForeign): a cluster may have many more of them than other claims, and the API server does not have a selector
// that excludes them.
func WithoutForeignClaims(all cache.ListerWatcher, driver string) cache.ListerWatcher {
	return filtered(all, func(list runtime.Object) {
		if claims, ok := list.(*resourceapi.ResourceClaimList); ok {
			claims.Items = slices.DeleteFunc(claims.Items, func(c resourceapi.ResourceClaim) bool {
				return IsForeign(&c, driver)
			})
		}
	}, func(e watch.Event) (watch.Event, bool) { return forCache(e, driver), true })
}

// forCache returns an event as the informer needs it. An event of a foreign claim becomes a deletion,
// even if the cache has never had the claim: the informer then reports the event to its handlers and
// stores nothing, so a PodGroup that refers to the claim by name is reconciled.
func forCache(e watch.Event, driver string) watch.Event {
	claim, ok := e.Object.(*resourceapi.ResourceClaim)
	if ok && (e.Type == watch.Added || e.Type == watch.Modified) && IsForeign(claim, driver) {
		e.Type = watch.Deleted
	}
	return e
}

// IsForeign reports whether the controller does not read a claim from the cache, because none of these concerns this
// driver: its annotations, its owner, its parameters, its allocated devices, their status, and its reservations, except
// pods' reservations. A claim for one of this driver's DeviceClasses can be foreign until the scheduler allocates it.
func IsForeign(claim *resourceapi.ResourceClaim, driver string) bool {
	isForObject := func(r resourceapi.ResourceClaimConsumerReference) bool { return !claimref.IsPodEntry(r) }
	return len(config(claim.Spec.Devices.Config, driver)) == 0 && len(devices(claim.Status.Devices, driver)) == 0 &&
		(claim.Status.Allocation == nil || len(results(claim.Status.Allocation, driver)) == 0) &&
		!slices.ContainsFunc(claim.Status.ReservedFor, isForObject) && !hasOwnMeta(claim)
}

// hasOwnMeta reports whether the metadata has an annotation of this driver, or an owner that the controller generates
// claims for.
func hasOwnMeta(claim *resourceapi.ResourceClaim) bool {
	kept := claimMeta(claim)
	return len(kept.Annotations) > 0 || len(kept.OwnerReferences) > 0
}
