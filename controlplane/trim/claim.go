// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"slices"
	"strings"
	"sync"
	"unique"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dra-shared/dra-driver-shared/api"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// Claim returns a function that returns a claim without the fields that no part of the
// controller reads. A cluster may have many times more claims of other drivers than of this
// one. Generated claims stay whole: further shards are generated from them.
func Claim(driver string) func(object any) (any, error) {
	shared := newSharedValues()
	return func(object any) (any, error) {
		claim, ok := object.(*resourceapi.ResourceClaim)
		if !ok {
			return object, nil
		}
		if _, generated := claim.Annotations[scheduling.ClaimAnnotation]; generated {
			claim.ManagedFields = nil
			return claim, nil
		}
		return &resourceapi.ResourceClaim{
			TypeMeta:   claim.TypeMeta,
			ObjectMeta: claimMeta(claim),
			Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: shared.requests(claim.Spec.Devices.Requests), Config: config(claim.Spec.Devices.Config, driver),
			}},
			Status: resourceapi.ResourceClaimStatus{
				Allocation: shared.allocation(claim.Status.Allocation, driver), ReservedFor: claim.Status.ReservedFor,
				Devices: devices(claim.Status.Devices, driver),
			},
		}, nil
	}
}

// sharedValues has values that many claims have in common, so that the cache contains each once.
// Readers of the cache do not change what they read.
type sharedValues struct {
	empty *resourceapi.AllocationResult

	mu   sync.Mutex
	sets map[string][]resourceapi.DeviceRequest // by names and classes
}

// maxSets limits the number of remembered sets of requests.
const maxSets = 1000

func newSharedValues() *sharedValues {
	return &sharedValues{
		empty: &resourceapi.AllocationResult{}, sets: map[string][]resourceapi.DeviceRequest{},
	}
}

// requests returns the requests with their names and DeviceClasses.
func (s *sharedValues) requests(all []resourceapi.DeviceRequest) []resourceapi.DeviceRequest {
	var key strings.Builder
	for _, r := range all {
		key.WriteString(r.Name)
		if r.Exactly != nil {
			key.WriteString("=" + r.Exactly.DeviceClassName)
		}
		for _, f := range r.FirstAvailable {
			key.WriteString("," + f.Name + "=" + f.DeviceClassName)
		}
		key.WriteString("\n")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if kept, ok := s.sets[key.String()]; ok {
		return kept
	}
	if len(s.sets) == maxSets {
		clear(s.sets)
	}
	kept := requests(all)
	s.sets[key.String()] = kept
	return kept
}

// allocation returns the results of the driver.
func (s *sharedValues) allocation(
	whole *resourceapi.AllocationResult, driver string,
) *resourceapi.AllocationResult {
	if whole == nil {
		return nil
	}
	isOurs := func(d resourceapi.DeviceRequestAllocationResult) bool { return d.Driver == driver }
	if !slices.ContainsFunc(whole.Devices.Results, isOurs) {
		return s.empty
	}
	kept := &resourceapi.AllocationResult{}
	for _, d := range whole.Devices.Results {
		if isOurs(d) {
			kept.Devices.Results = append(kept.Devices.Results, d)
		}
	}
	return kept
}

// claimMeta returns the metadata with the driver's annotations, and with the owner if it may be one
// for which the controller generates claims. The owner of most claims is a pod.
func claimMeta(claim *resourceapi.ResourceClaim) metav1.ObjectMeta {
	kept := metav1.ObjectMeta{
		Namespace: unique.Make(claim.Namespace).Value(), Name: claim.Name, UID: claim.UID,
		ResourceVersion:   claim.ResourceVersion,
		CreationTimestamp: claim.CreationTimestamp, DeletionTimestamp: claim.DeletionTimestamp,
	}
	for key, value := range claim.Annotations {
		domain, _, _ := strings.Cut(key, "/")
		if domain == scheduling.GroupName || domain == api.DriverName {
			if kept.Annotations == nil {
				kept.Annotations = map[string]string{}
			}
			kept.Annotations[key] = value
		}
	}
	controller := metav1.GetControllerOf(claim)
	if controller != nil && generatesClaims(controller) {
		kept.OwnerReferences = []metav1.OwnerReference{*controller}
	}
	return kept
}

// generatesClaims reports whether the owner's kind is in an API group with kinds for which the
// controller generates claims.
func generatesClaims(owner *metav1.OwnerReference) bool {
	switch schema.FromAPIVersionAndKind(owner.APIVersion, owner.Kind).Group {
	case scheduling.GroupName, batchv1.GroupName, appsv1.GroupName:
		return true
	}
	return false
}

func requests(all []resourceapi.DeviceRequest) []resourceapi.DeviceRequest {
	kept := make([]resourceapi.DeviceRequest, 0, len(all))
	for _, r := range all {
		request := resourceapi.DeviceRequest{Name: r.Name}
		if r.Exactly != nil {
			request.Exactly = &resourceapi.ExactDeviceRequest{DeviceClassName: r.Exactly.DeviceClassName}
		}
		for _, s := range r.FirstAvailable {
			request.FirstAvailable = append(request.FirstAvailable,
				resourceapi.DeviceSubRequest{Name: s.Name, DeviceClassName: s.DeviceClassName})
		}
		kept = append(kept, request)
	}
	return kept
}

// config returns the parameters of the driver.
func config(all []resourceapi.DeviceClaimConfiguration, driver string) (kept []resourceapi.DeviceClaimConfiguration) {
	for _, c := range all {
		if c.Opaque != nil && c.Opaque.Driver == driver {
			kept = append(kept, c)
		}
	}
	return kept
}

// devices returns the status of the driver's devices.
func devices(all []resourceapi.AllocatedDeviceStatus, driver string) (kept []resourceapi.AllocatedDeviceStatus) {
	for _, d := range all {
		if d.Driver == driver {
			kept = append(kept, d)
		}
	}
	return kept
}
