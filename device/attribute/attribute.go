// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package attribute builds the names, attributes, and taints that devices of every kind carry in ResourceSlices and
// in containers' device metadata.
package attribute

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"reflect"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/capacity"
)

// Map is the attributes of a device, by name.
type Map = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

// Text returns a string attribute.
func Text(value string) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{StringValue: &value}
}

// AbsentTaint returns the taint of a device that is missing from the node while claims hold shares of it.
func AbsentTaint() resourceapi.DeviceTaint {
	return resourceapi.DeviceTaint{Key: v1alpha1.TaintAbsent, Effect: resourceapi.DeviceTaintEffectNoSchedule}
}

// PCIName returns the device name of a PCI device. The name follows from the PCI address and does not depend on the
// discovery order.
func PCIName(busID string) string { return "pci-" + Label(busID) }

// Label converts any name to a DNS label (RFC 1123). If the conversion loses
// information, it appends a hash of the original name so that different names
// remain different.
func Label(name string) string {
	mapped := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		default:
			return '-'
		}
	}, name)
	trimmed := strings.Trim(mapped, "-")
	if trimmed == strings.NewReplacer(":", "-", ".", "-").Replace(name) {
		return trimmed
	}
	return strings.Trim(fmt.Sprintf("%s-%x", trimmed, sha256.Sum256([]byte(name)))[:len(trimmed)+9], "-")
}

// PCI returns the standard attributes of a PCI device: its bus ID, PCIe root,
// and NUMA node. It omits the attributes that sysfs does not provide.
func PCI(sysfs fs.ReadLinkFS, busID string) Map {
	attributes := Map{}
	if busID == "" {
		return attributes
	}
	from := deviceattribute.WithFS(sysfs)
	if a, err := deviceattribute.GetPCIBusIDAttribute(busID); err == nil {
		attributes[a.Name] = a.Value
	}
	if a, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(busID, from); err == nil {
		attributes[a.Name] = a.Value
	}
	if a, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(busID, deviceattribute.ScalarAttribute, from); err == nil {
		attributes[a.Name] = a.Value
	}
	return attributes
}

// Intersect removes from attributes those that others lacks or has with another value.
func Intersect(attributes, others Map) {
	maps.DeleteFunc(attributes, func(name resourceapi.QualifiedName, value resourceapi.DeviceAttribute) bool {
		other, ok := others[name]
		return !ok || !reflect.DeepEqual(value, other)
	})
}

// Granted returns the attributes that report a grant in a container's device metadata: grantedMemory,
// grantedBandwidth, and so on.
func Granted(grant map[string]resource.Quantity) Map {
	attributes := Map{}
	for name, q := range grant {
		key := resourceapi.QualifiedName(v1alpha1.AttributeGrantedPrefix + strings.ToUpper(name[:1]) + name[1:])
		if value, ok := q.AsInt64(); ok {
			attributes[key] = resourceapi.DeviceAttribute{IntValue: ptr.To(value)}
		} else {
			attributes[key] = Text(capacity.Decimal(q))
		}
	}
	return attributes
}
