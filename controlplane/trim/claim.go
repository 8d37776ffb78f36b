// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dra-shared/dra-driver-shared/api"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// Claim returns a function that returns a claim without the fields that no part of the controller reads. Generated
// claims stay whole: more shards are generated from them.
func Claim(driver string) func(object any) (any, error) {
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
				Requests: requests(claim.Spec.Devices.Requests), Config: config(claim.Spec.Devices.Config, driver),
			}},
			Status: resourceapi.ResourceClaimStatus{
				Allocation: allocation(claim.Status.Allocation, driver), ReservedFor: claim.Status.ReservedFor,
				Devices: devices(claim.Status.Devices, driver),
			},
		}, nil
	}
}

// allocation returns the results of the driver.
func allocation(whole *resourceapi.AllocationResult, driver string) *resourceapi.AllocationResult {
	if whole == nil {
		return nil
	}
	return &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results(whole, driver)}}
}

// results returns the allocated devices of the driver.
func results(
	whole *resourceapi.AllocationResult, driver string,
) (kept []resourceapi.DeviceRequestAllocationResult) {
	for _, d := range whole.Devices.Results {
		if d.Driver == driver {
			kept = append(kept, d)
		}
	}
	return kept
}

// claimMeta returns the metadata with the driver's annotations, and with the owner if the controller may generate
// claims for it. The owner of most claims is a pod.
func claimMeta(claim *resourceapi.ResourceClaim) metav1.ObjectMeta {
	kept := metav1.ObjectMeta{
		Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
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

// generatesClaims reports whether the owner's kind is in an API group with kinds that the controller generates claims
// for.
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
