// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package capacity publishes the configured capacities of a device and admits
// shares against them. The scheduler checks the same sums first; the driver
// checks them again because it is the last component that can refuse a claim.
package capacity

import (
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
)

// Publish returns the capacities of a device for its ResourceSlice. An exclusive device does not have request
// policies, because claims do not request parts of it.
func Publish(c config.Capacities, exclusive bool) map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	if len(c.Capacity) == 0 {
		return nil
	}
	capacity := make(map[resourceapi.QualifiedName]resourceapi.DeviceCapacity, len(c.Capacity))
	for name, value := range c.Capacity {
		published := resourceapi.DeviceCapacity{Value: value}
		if p, ok := c.Policy[name]; ok && !exclusive {
			published.RequestPolicy = policy(p)
		}
		capacity[resourceapi.QualifiedName(name)] = published
	}
	return capacity
}

func policy(p config.CapacityPolicy) *resourceapi.CapacityRequestPolicy {
	if len(p.Values) > 0 {
		return &resourceapi.CapacityRequestPolicy{Default: p.Default, ValidValues: p.Values}
	}
	return &resourceapi.CapacityRequestPolicy{Default: p.Default,
		ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: p.Min, Max: p.Max, Step: p.Step}}
}

// Admit refuses a share that exceeds what other shares leave of a device capacity, and a whole device while other
// shares of it are in use.
func Admit(
	device string, c config.Capacities, whole bool,
	wanted map[string]resource.Quantity, others []map[string]resource.Quantity,
) error {
	if whole && len(others) > 0 {
		return fmt.Errorf(
			"claim requests the whole device %s, but %d shares of it are in use on this node: wait until they are released",
			device, len(others))
	}
	for name, q := range wanted {
		limit, ok := c.Capacity[name]
		if !ok {
			continue // the capacity was removed from the configuration after the allocation
		}
		var taken resource.Quantity
		for _, o := range others {
			taken.Add(o[name])
		}
		sum := taken.DeepCopy()
		sum.Add(q)
		if sum.Cmp(limit) > 0 {
			return fmt.Errorf("%s %s: device %s has %s, and %s are granted to other shares on this node",
				name, q.String(), device, limit.String(), taken.String())
		}
	}
	return nil
}

// Decimal formats a quantity as a decimal number without suffix or exponent.
func Decimal(q resource.Quantity) string {
	dec := q.AsDec()
	if dec.Scale() <= 0 {
		return fmt.Sprint(q.Value())
	}
	return strings.TrimRight(strings.TrimRight(dec.String(), "0"), ".")
}
