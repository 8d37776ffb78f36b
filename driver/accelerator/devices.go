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
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/device/capacity"
)

// device is an accelerator of a group, as it is published.
type device struct {
	accel.Device
	name  string
	group *config.Accelerator // nil: absent since before this plugin started
	// pci are the standard attributes of a device on PCI.
	pci attribute.Map
	// region of the device's memory that the kernel can limit; empty: none.
	region string
	// absent: the device is gone, shares of it are not.
	absent bool
	// shared: claims have shares of it.
	shared bool
}

// TaintSharesHeld is on a device that has become exclusive while claims have
// shares of it: the scheduler would give the whole of it to another.
const TaintSharesHeld = "dra-shared.dev/shares-held"

// find returns the devices of all groups by name, and what cannot be
// published, and why.
func find(host accel.Host, groups []config.Accelerator) (map[string]*device, map[string]error, error) {
	devices, problems := map[string]*device{}, map[string]error{}
	taken := map[string]bool{} // by PCI address or node: the first group has it
	for i := range groups {
		group := &groups[i]
		found, err := host.Find(match(*group))
		if err != nil {
			return nil, nil, fmt.Errorf("accelerator %q: %w", group.Name, err)
		}
		for _, f := range found {
			d := &device{Device: f, name: deviceName(f), group: group, pci: attribute.PCI(host.Sys, f.PCIBusID), region: dmem.RegionOf(host.Cgroups, f.PCIBusID)}
			switch {
			case slices.ContainsFunc(identities(f), func(id string) bool { return taken[id] }):
				continue
			case len(f.Nodes) == 0:
				problems[d.name] = errors.New("it has no device nodes: is its driver loaded, are its device nodes made?")
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

func match(group config.Accelerator) accel.Match {
	m := group.Match
	return accel.Match{Class: m.PCIClass, Vendor: m.Vendor, ID: m.Device, Paths: m.DevicePaths}
}

func identities(f accel.Device) []string {
	if f.PCIBusID != "" {
		return append(slices.Clone(f.Nodes), f.PCIBusID)
	}
	return f.Nodes
}

// deviceName is made of what does not change when devices are found in another
// order, as far as there is such a thing.
func deviceName(f accel.Device) string {
	if f.PCIBusID != "" {
		return attribute.PCIName(f.PCIBusID)
	}
	return attribute.Label(strings.ReplaceAll(f.Nodes[0][1:], "/", ":")) // dev-npu0: no NIC is named so
}

// trouble is why the device does not work, empty if it does.
func (d *device) trouble() string {
	if d.absent {
		return fmt.Sprintf("accelerator %s is gone from the node, or from the driver's configuration", d.name)
	}
	return ""
}

// publish is the device as it stands in a ResourceSlice.
func (d *device) publish() resourceapi.Device {
	out := resourceapi.Device{Name: d.name, Attributes: attribute.Map{attribute.Kind: attribute.Text(Name)}}
	switch {
	case d.absent:
		out.Taints = []resourceapi.DeviceTaint{{Key: attribute.TaintAbsent, Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	case d.group.Exclusive && d.shared:
		out.Taints = []resourceapi.DeviceTaint{{Key: TaintSharesHeld, Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	}
	if !d.group.Exclusive {
		out.AllowMultipleAllocations = ptr.To(true)
	}
	out.Capacity = capacity.Publish(d.group.Capacities, d.group.Exclusive)
	for name, value := range map[resourceapi.QualifiedName]string{
		"accelerator": d.group.Name, "vendor": d.Vendor, "device": d.ID, "model": d.Model, "driver": d.Driver,
	} {
		if value != "" {
			out.Attributes[name] = attribute.Text(fmt.Sprintf("%.64s", value))
		}
	}
	if v := semantic(d.DriverVersion); v != "" {
		out.Attributes["driverVersion"] = resourceapi.DeviceAttribute{VersionValue: &v}
	}
	maps.Copy(out.Attributes, d.pci)
	return out
}

// semantic makes a semantic version (semver.org) of a driver's: 570.086.15 is
// 570.86.15, and can be compared in a claim's selectors. What has none is empty.
func semantic(text string) string {
	v, err := version.ParseGeneric(text)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%d.%d.%d", v.Major(), v.Minor(), v.Patch())
}
