// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/fabricpool"
)

// MaxShards is the largest number of shards of an owner's entry.
const MaxShards = 256

// ShardNumber returns the number of the shard from its claim's name. It returns false if no claim for the owner's entry
// has that name.
func ShardNumber(owner Owner, entry, name string) (int, bool) {
	first := Name(owner, entry, 0)
	if name == first {
		return 0, true
	}
	suffix, ok := strings.CutPrefix(name, first+"-")
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(suffix)
	if err != nil || n <= 0 || n >= MaxShards {
		return 0, false
	}
	// Atoi accepts spellings that Name does not produce, such as "01".
	return n, Name(owner, entry, n) == name
}

// RequestsFabric reports whether a request of the spec, or one of its alternatives, is for a fabric of the driver. Pods
// on several nodes can use a fabric, so there may be more pods than a claim can be reserved for.
//
// A request is for fabrics if it has the chart's DeviceClass, or if a selector of the request or its DeviceClass
// selects fabrics. class returns a DeviceClass, or nil if it does not exist.
func RequestsFabric(
	spec *resourceapi.ResourceClaimSpec, driver string, class func(name string) (*resourceapi.DeviceClass, error),
) (bool, error) {
	var names []string
	for _, r := range spec.Devices.Requests {
		names = append(names, ClassNames(r)...)
		if anySelectsFabric(Selectors(r), driver) {
			return true, nil
		}
	}
	if slices.Contains(names, v1alpha1.DeviceClassName(v1alpha1.DeviceKindFabric, driver)) {
		return true, nil
	}
	for _, name := range names {
		found, err := class(name)
		if err != nil {
			return false, fmt.Errorf("look up DeviceClass %q: %w", name, err)
		}
		if found != nil && anySelectsFabric(found.Spec.Selectors, driver) {
			return true, nil
		}
	}
	return false, nil
}

// Selectors returns the selectors of a request and its alternatives.
func Selectors(r resourceapi.DeviceRequest) (selectors []resourceapi.DeviceSelector) {
	if r.Exactly != nil {
		selectors = append(selectors, r.Exactly.Selectors...)
	}
	for _, alternative := range r.FirstAvailable {
		selectors = append(selectors, alternative.Selectors...)
	}
	return selectors
}

// ClassNames returns the names of the DeviceClasses of a request and its alternatives.
func ClassNames(r resourceapi.DeviceRequest) (names []string) {
	if r.Exactly != nil {
		names = append(names, r.Exactly.DeviceClassName)
	}
	for _, alternative := range r.FirstAvailable {
		names = append(names, alternative.DeviceClassName)
	}
	return names
}

// GenerateShard returns the claim for a shard of an owner's entry that is not the primary one. The claim
// selects the devices that are allocated to the primary shard and consumes none of
// their capacity: the primary shard already accounts for the whole group. An error states
// why the devices cannot be shared that way.
func GenerateShard(
	owner Owner, entry string, shard int, template *resourceapi.ResourceClaimTemplate,
	primary *resourceapi.ResourceClaim, driver string,
) (*resourceapi.ResourceClaim, error) {
	claim := generate(owner, entry, shard, template)
	claim.Spec = *primary.Spec.DeepCopy()
	if primary.Status.Allocation == nil {
		return nil, fmt.Errorf("claim %s is not allocated yet", primary.Name)
	}
	for _, result := range primary.Status.Allocation.Devices.Results {
		if result.Driver != driver || !fabricpool.Is(result.Pool) {
			return nil, fmt.Errorf("device %s of pool %s, driver %s, is not a fabric: at most %d pods can share it",
				result.Device, result.Pool, result.Driver, MaxPods)
		}
		if err := selectDevice(&claim.Spec.Devices, result, driver); err != nil {
			return nil, err
		}
	}
	return claim, nil
}

// selectDevice changes the result's request: it selects exactly the allocated device and consumes none of its capacity.
func selectDevice(
	devices *resourceapi.DeviceClaim, result resourceapi.DeviceRequestAllocationResult, driver string,
) error {
	request, err := allocatedRequest(devices, result)
	if err != nil {
		return err
	}
	if request.AllocationMode != resourceapi.DeviceAllocationModeExactCount || request.Count != 1 {
		return fmt.Errorf("request %s asks for more than one device: at most %d pods can share them",
			result.Request, MaxPods)
	}
	request.Capacity = nil
	for capacity := range result.ConsumedCapacity {
		if capacity != v1alpha1.CapacityGroups {
			return fmt.Errorf("fabric %s is divided by its capacity %s, and at most %d pods can use one share of it: "+
				"set the fabric's groups field instead", result.Device, capacity, MaxPods)
		}
		request.Capacity = &resourceapi.CapacityRequirements{
			Requests: map[resourceapi.QualifiedName]resource.Quantity{capacity: resource.MustParse("0")},
		}
	}
	request.Selectors = append(request.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{
		Expression: fmt.Sprintf("device.attributes[%q].fabric == %q", driver, result.Device),
	}})
	return nil
}

// allocatedRequest returns the result's request. If the result is for one of several alternatives, the request is
// changed to ask for that one alone.
func allocatedRequest(
	devices *resourceapi.DeviceClaim, result resourceapi.DeviceRequestAllocationResult,
) (*resourceapi.ExactDeviceRequest, error) {
	unknown := fmt.Errorf("device %s was allocated for request %s, which the claim does not have",
		result.Device, result.Request)
	name, alternative, _ := strings.Cut(result.Request, "/")
	i := slices.IndexFunc(devices.Requests, func(r resourceapi.DeviceRequest) bool { return r.Name == name })
	if i < 0 {
		return nil, unknown
	}
	request := &devices.Requests[i]
	if alternative == "" {
		return request.Exactly, nil
	}
	j := slices.IndexFunc(request.FirstAvailable, func(s resourceapi.DeviceSubRequest) bool {
		return s.Name == alternative
	})
	if j < 0 {
		return nil, unknown
	}
	chosen := request.FirstAvailable[j]
	request.FirstAvailable = nil
	request.Exactly = &resourceapi.ExactDeviceRequest{
		DeviceClassName: chosen.DeviceClassName, Selectors: chosen.Selectors,
		AllocationMode: chosen.AllocationMode, Count: chosen.Count, Tolerations: chosen.Tolerations,
	}
	return request.Exactly, nil
}
