package claims

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dra-shared/dra-driver-shared/device/fabricpool"
)

// MaxShards of an entry.
const MaxShards = 256

// ShardNumber is the number of the claim of that name among those of an owner's entry.
func ShardNumber(owner Owner, entry, name string) (int, bool) {
	first := Name(owner, entry, 0)
	if name == first {
		return 0, true
	}
	number, ok := strings.CutPrefix(name, first+"-")
	n, err := strconv.Atoi(number)
	return n, ok && err == nil && 0 < n && n < MaxShards && Name(owner, entry, n) == name
}

// RequestsFabric tells whether a claim asks for a fabric of the driver: a device whose
// pods are on many nodes, so that there may be more of them than one claim can
// be reserved for.
func RequestsFabric(spec *resourceapi.ResourceClaimSpec, driver string) bool {
	class := fabricpool.Kind + "." + driver
	return slices.ContainsFunc(spec.Devices.Requests, func(r resourceapi.DeviceRequest) bool {
		return r.Exactly != nil && r.Exactly.DeviceClassName == class ||
			slices.ContainsFunc(r.FirstAvailable, func(s resourceapi.DeviceSubRequest) bool { return s.DeviceClassName == class })
	})
}

// GenerateShard makes a further claim for an owner's entry, on the very devices
// that the first one has got. It consumes nothing: the first one is in the
// group's name.
func GenerateShard(owner Owner, entry string, shard int, template *resourceapi.ResourceClaimTemplate, first *resourceapi.ResourceClaim, driver string) (*resourceapi.ResourceClaim, error) {
	claim := Generate(owner, entry, shard, template)
	claim.Spec = *first.Spec.DeepCopy()
	if first.Status.Allocation == nil {
		return nil, fmt.Errorf("claim %s is not allocated yet", first.Name)
	}
	for _, result := range first.Status.Allocation.Devices.Results {
		if result.Driver != driver || !fabricpool.Is(result.Pool) {
			return nil, fmt.Errorf("device %s of pool %s, driver %s, is no fabric: at most %d pods can share it", result.Device, result.Pool, result.Driver, MaxPods)
		}
		if err := pin(&claim.Spec.Devices, result, driver); err != nil {
			return nil, err
		}
	}
	return claim, nil
}

// pin makes the request that a result is for ask for that device, and consume
// nothing of it.
func pin(devices *resourceapi.DeviceClaim, result resourceapi.DeviceRequestAllocationResult, driver string) error {
	name, alternative, _ := strings.Cut(result.Request, "/")
	i := slices.IndexFunc(devices.Requests, func(r resourceapi.DeviceRequest) bool { return r.Name == name })
	if i < 0 {
		return fmt.Errorf("device %s was allocated to request %s, which is not there", result.Device, result.Request)
	}
	request := &devices.Requests[i]
	if alternative != "" {
		j := slices.IndexFunc(request.FirstAvailable, func(s resourceapi.DeviceSubRequest) bool { return s.Name == alternative })
		if j < 0 {
			return fmt.Errorf("device %s was allocated to request %s, which is not there", result.Device, result.Request)
		}
		s := request.FirstAvailable[j]
		request.FirstAvailable = nil
		request.Exactly = &resourceapi.ExactDeviceRequest{DeviceClassName: s.DeviceClassName, Selectors: s.Selectors,
			AllocationMode: s.AllocationMode, Count: s.Count, Tolerations: s.Tolerations}
	}
	exactly := request.Exactly
	if exactly.AllocationMode != resourceapi.DeviceAllocationModeExactCount || exactly.Count != 1 {
		return fmt.Errorf("request %s asks for more than one device: at most %d pods can share those", name, MaxPods)
	}
	exactly.Capacity = nil
	for capacity := range result.ConsumedCapacity {
		if capacity != fabricpool.CapacityGroups {
			return fmt.Errorf("fabric %s is shared by its capacity %s, and at most %d pods can have one share of it: give the fabric groups instead", result.Device, capacity, MaxPods)
		}
		exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{capacity: resource.MustParse("0")}}
	}
	exactly.Selectors = append(exactly.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{
		Expression: fmt.Sprintf("device.attributes[%q].fabric == %q", driver, result.Device)}})
	return nil
}
