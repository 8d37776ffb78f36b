// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package accelerator

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/accel"
	"github.com/dra-shared/dra-driver-shared/accel/dmem"
	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/device/capacity"
)

// device is an accelerator that a configuration entry matches.
type device struct {
	accel.Device
	name   string
	config *config.Accelerator // nil if the device has been missing since before this plugin started
	// pci are the standard attributes of a device on PCI.
	pci attribute.Map
	// region is the region of the device's memory that the kernel can limit, or "".
	region string
	// absent reports whether the device is missing while claims hold shares of it.
	absent bool
	// shared reports whether claims hold shares of the device.
	shared bool
}

// discover returns the accelerators that the configuration matches, and why devices cannot be published, both by
// device name. If several configured accelerators match a device, the first one applies.
func discover(host accel.Host, accelerators []config.Accelerator) (map[string]*device, map[string]error, error) {
	devices, problems := map[string]*device{}, map[string]error{}
	taken := map[string]bool{} // by PCI address and device node
	for i := range accelerators {
		accelerator := &accelerators[i]
		found, err := host.Find(match(*accelerator))
		if err != nil {
			return nil, nil, fmt.Errorf("accelerator %q: %w", accelerator.Name, err)
		}
		for _, f := range found {
			d := &device{
				Device: f,
				name:   deviceName(f),
				config: accelerator,
				pci:    attribute.PCI(host.Sys, f.PCIBusID),
				region: dmem.RegionOf(host.Cgroups, f.PCIBusID),
			}
			switch {
			case slices.ContainsFunc(identities(f), func(id string) bool { return taken[id] }):
				continue
			case len(f.Nodes) == 0:
				problems[d.name] = errors.New("the device has no device nodes: is its driver loaded, and has it created them?")
				continue
			}
			for _, id := range identities(f) {
				taken[id] = true
			}
			devices[d.name] = d
		}
	}
	return devices, problems, nil
}

// match returns the condition that a configured accelerator uses to select devices.
func match(accelerator config.Accelerator) accel.Match {
	m := accelerator.Match
	return accel.Match{Class: m.PCIClass, Vendor: m.Vendor, ID: m.Device, Paths: m.DevicePaths}
}

// identities returns the identifiers that distinguish a device from all others on the node.
func identities(f accel.Device) []string {
	if f.PCIBusID != "" {
		return append(slices.Clone(f.Nodes), f.PCIBusID)
	}
	return f.Nodes
}

// deviceName returns a name that, as far as possible, does not depend on the discovery order.
func deviceName(f accel.Device) string {
	if f.PCIBusID != "" {
		return attribute.PCIName(f.PCIBusID)
	}
	return attribute.Label(
		strings.ReplaceAll(f.Nodes[0][1:], "/", ":"),
	) // such as dev-npu0, which differs from the name of any NIC
}

// problem returns why the device does not work, or "" if it does.
func (d *device) problem() string {
	if d.absent {
		return fmt.Sprintf("accelerator %s is missing from the node or from the driver's configuration", d.name)
	}
	return ""
}

// publish returns the device for the ResourceSlice.
func (d *device) publish() resourceapi.Device {
	out := resourceapi.Device{Name: d.name, Attributes: attribute.Map{v1alpha1.AttributeKind: attribute.Text(Name)}}
	switch {
	case d.absent:
		out.Taints = []resourceapi.DeviceTaint{attribute.AbsentTaint()}
	case d.config.Exclusive && d.shared:
		out.Taints = []resourceapi.DeviceTaint{
			{Key: v1alpha1.TaintSharesHeld, Effect: resourceapi.DeviceTaintEffectNoSchedule},
		}
	}
	if !d.config.Exclusive {
		out.AllowMultipleAllocations = ptr.To(true)
	}
	out.Capacity = capacity.Publish(d.config.Capacities, d.config.Exclusive)
	for name, value := range map[resourceapi.QualifiedName]string{
		v1alpha1.AttributeAccelerator: d.config.Name, v1alpha1.AttributeVendor: d.Vendor, v1alpha1.AttributeDevice: d.ID,
		v1alpha1.AttributeModel: d.Model, v1alpha1.AttributeDriver: d.Driver,
	} {
		if value != "" {
			out.Attributes[name] = attribute.Text(fmt.Sprintf("%.64s", value))
		}
	}
	if v := semantic(d.DriverVersion); v != "" {
		out.Attributes[v1alpha1.AttributeDriverVersion] = resourceapi.DeviceAttribute{VersionValue: &v}
	}
	maps.Copy(out.Attributes, d.pci)
	return out
}

// semantic converts a driver's version to a semantic version (semver.org), which
// selectors of claims can compare: 570.086.15 becomes 570.86.15. It returns "" if
// the text is not a version.
func semantic(text string) string {
	v, err := version.ParseGeneric(text)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%d.%d.%d", v.Major(), v.Minor(), v.Patch())
}
