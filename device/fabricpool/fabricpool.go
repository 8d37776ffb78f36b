// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fabricpool builds the pool and the device that represent a fabric.
// The controller publishes both once per cluster; the node plugin uses them to
// recognize shares of a fabric and to describe them to containers.
package fabricpool

import (
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/device/capacity"
)

// prefix starts the name of every fabric's pool. It contains a slash, which a
// node name cannot.
const prefix = "fabric/"

// Name returns the name of a fabric's pool.
func Name(fabric string) string { return prefix + fabric }

// Is reports whether a pool belongs to a fabric.
func Is(pool string) bool { return strings.HasPrefix(pool, prefix) }

// Device returns the device of a fabric for its ResourceSlice.
func Device(f *config.Fabric) resourceapi.Device {
	d := resourceapi.Device{
		Name:     f.Name,
		Capacity: capacity.Publish(f.Capacities, f.Exclusive),
		Attributes: attribute.Map{
			v1alpha1.AttributeKind:   attribute.Text(v1alpha1.DeviceKindFabric),
			v1alpha1.AttributeFabric: attribute.Text(f.Name),
		},
	}
	for name, value := range f.Attributes {
		d.Attributes[resourceapi.QualifiedName(name)] = attribute.Text(value)
	}
	if !f.Exclusive {
		d.AllowMultipleAllocations = ptr.To(true)
	}
	if f.Groups > 0 {
		if d.Capacity == nil {
			d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{}
		}
		none, one := resource.MustParse("0"), resource.MustParse("1")
		d.Capacity[v1alpha1.CapacityGroups] = resourceapi.DeviceCapacity{
			Value:         *resource.NewQuantity(int64(f.Groups), resource.DecimalSI),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &one, ValidValues: []resource.Quantity{none, one}},
		}
	}
	return d
}
