// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package accel discovers the accelerators of a node and their device nodes. It finds PCI functions
// in sysfs, and other devices by the paths of their device nodes. It only reads files, and does not
// depend on Kubernetes.
//
// A PCI function's device nodes are those that its drivers register below it in sysfs (drm/renderD128, accel/accel0,
// ...). NVIDIA's driver does not register any there: package accel finds its node by the minor number in
// /proc/driver/nvidia/gpus.
package accel

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
)

// Device is an accelerator.
type Device struct {
	// PCIBusID is the PCI address in the format of sysfs (0000:3b:00.0), or ""
	// for a device that is not on PCI.
	PCIBusID string
	// Class, Vendor, and ID are the PCI codes in lower-case hexadecimal, with six,
	// four, and four digits.
	Class, Vendor, ID string
	// Driver is the name of the kernel driver, or "" if none is bound.
	Driver string
	// DriverVersion is the version that the driver's module reports, or "".
	DriverVersion string
	// Model is the model name that the driver reports, or "".
	Model string
	// Nodes are the paths of the device nodes on the host, sorted.
	Nodes []string
}

// Match selects the devices that meet all given conditions.
type Match struct {
	// Class is a prefix of the class code; Vendor and ID are complete codes. All are hexadecimal.
	Class, Vendor, ID string
	// Paths are patterns of device nodes (path.Match). With PCI conditions, they select among the matching devices'
	// nodes. Without, each matching node is a device, except that matching nodes of the same PCI device are one device.
	Paths []string
}

func (m Match) onPCI() bool { return m.Class != "" || m.Vendor != "" || m.ID != "" }

// Host gives access to a node's filesystems.
type Host struct {
	Sys  fs.ReadLinkFS // /sys
	Proc fs.FS         // /proc
	Dev  fs.FS         // /dev
	// Cgroups is the root of the unified cgroup hierarchy, or nil if it is not
	// accessible.
	Cgroups fs.FS
	// dev is the path of Dev.
	dev string
}

// HostAt returns the host with filesystems mounted at these paths.
func HostAt(sys, proc, dev, cgroups string) Host {
	links, _ := os.DirFS(sys).(fs.ReadLinkFS) // os.DirFS documents that it implements it
	return Host{Sys: links, Proc: os.DirFS(proc), Dev: os.DirFS(dev), Cgroups: os.DirFS(cgroups), dev: dev}
}

// Find returns the matching devices, sorted by PCI address and then by node. They
// include PCI devices without device nodes.
func (h Host) Find(m Match) ([]Device, error) {
	functions, err := h.functions()
	if err != nil {
		return nil, err
	}
	var found []Device
	owned := map[string]bool{}
	for _, d := range functions {
		if !d.matches(m) {
			continue
		}
		h.complete(&d)
		for _, node := range d.Nodes {
			owned[node] = true
		}
		if len(m.Paths) > 0 {
			d.Nodes = slices.DeleteFunc(d.Nodes, func(node string) bool { return !matchesAny(m.Paths, node) })
		}
		if m.onPCI() || len(d.Nodes) > 0 {
			found = append(found, d)
		}
	}
	if m.onPCI() {
		return found, nil
	}
	nodes, err := h.Nodes(m.Paths)
	for _, node := range nodes {
		if !owned[node] {
			found = append(found, Device{Nodes: []string{node}})
		}
	}
	return found, err
}

func (d Device) matches(m Match) bool {
	return strings.HasPrefix(d.Class, strings.ToLower(m.Class)) &&
		(m.Vendor == "" || strings.EqualFold(m.Vendor, d.Vendor)) &&
		(m.ID == "" || strings.EqualFold(m.ID, d.ID))
}

func matchesAny(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { ok, err := path.Match(p, name); return ok && err == nil })
}

const pciDevices = "bus/pci/devices"

// functions returns the PCI functions with their codes.
func (h Host) functions() ([]Device, error) {
	entries, err := fs.ReadDir(h.Sys, pciDevices)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // the node has no PCI bus
	}
	if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	var functions []Device
	for _, e := range entries {
		d := Device{PCIBusID: e.Name()}
		for file, code := range map[string]*string{"class": &d.Class, "vendor": &d.Vendor, "device": &d.ID} {
			*code = strings.ToLower(strings.TrimPrefix(h.text(path.Join(pciDevices, e.Name(), file)), "0x"))
		}
		if d.Class != "" { // otherwise the device was removed in the meantime
			functions = append(functions, d)
		}
	}
	return functions, nil
}

// text returns the content of a file in sysfs, or "" if it cannot be read.
func (h Host) text(name string) string {
	raw, err := fs.ReadFile(h.Sys, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(raw))
}

// complete sets the fields that only matching functions need.
func (h Host) complete(d *Device) {
	dir := path.Join(pciDevices, d.PCIBusID)
	if driver, err := h.Sys.ReadLink(path.Join(dir, "driver")); err == nil {
		d.Driver = path.Base(driver)
		d.DriverVersion = h.text(path.Join("module", strings.ReplaceAll(d.Driver, "-", "_"), "version"))
	}
	d.Model = h.text(path.Join(dir, "product_name"))
	d.Nodes = h.registered(dir)
	h.nvidia(d)
	slices.Sort(d.Nodes)
}

// notShared lists the subsystems with nodes that are not passed to containers: the console's frame buffer, and nodes
// that configure the hardware.
var notShared = []string{"graphics", "i2c-dev", "hwmon", "ptp", "vfio-dev"}

// registered returns the device nodes that a function's drivers registered: the uevent file in dir/SUBSYSTEM/NAME
// contains the node's name.
func (h Host) registered(dir string) (nodes []string) {
	subsystems, err := fs.ReadDir(h.Sys, dir)
	if err != nil {
		return nil
	}
	for _, subsystem := range subsystems {
		if !subsystem.IsDir() || slices.Contains(notShared, subsystem.Name()) {
			continue
		}
		names, err := fs.ReadDir(h.Sys, path.Join(dir, subsystem.Name()))
		if err != nil {
			continue
		}
		for _, name := range names {
			uevent := h.text(path.Join(dir, subsystem.Name(), name.Name(), "uevent"))
			if node := value(uevent, "DEVNAME="); node != "" {
				nodes = append(nodes, h.present("/dev/"+node)...)
			}
		}
	}
	return nodes
}

// nvidia adds the model and the device node that NVIDIA's driver reports for a GPU.
func (h Host) nvidia(d *Device) {
	raw, err := fs.ReadFile(h.Proc, path.Join("driver/nvidia/gpus", d.PCIBusID, "information"))
	if err != nil {
		return
	}
	information := string(raw)
	if model := value(information, "Model:"); model != "" {
		d.Model = model
	}
	if minor := value(information, "Device Minor:"); minor != "" {
		d.Nodes = append(d.Nodes, h.present("/dev/nvidia"+minor)...)
	}
}

// value returns the text after a key that starts a line, or "".
func value(text, key string) string {
	lines := bufio.NewScanner(bytes.NewReader([]byte(text)))
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), key); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

// present returns the node if it exists and is a device node.
func (h Host) present(node string) []string {
	if h.IsNode(node) {
		return []string{node}
	}
	return nil
}

// IsNode reports whether a path below /dev is a device node.
func (h Host) IsNode(node string) bool {
	name, ok := strings.CutPrefix(node, "/dev/")
	if !ok || !fs.ValidPath(name) {
		return false
	}
	info, err := fs.Stat(h.Dev, name)
	return err == nil && info.Mode()&fs.ModeDevice != 0
}

// Nodes returns the device nodes that match one of the patterns, sorted.
func (h Host) Nodes(patterns []string) ([]string, error) {
	var nodes []string
	for _, pattern := range patterns {
		relative, ok := strings.CutPrefix(pattern, "/dev/")
		if !ok {
			return nil, fmt.Errorf("pattern %q is not below /dev", pattern)
		}
		names, err := fs.Glob(h.Dev, relative)
		if err != nil {
			return nil, fmt.Errorf("pattern %q: %w", pattern, err)
		}
		for _, name := range names {
			nodes = append(nodes, h.present("/dev/"+name)...)
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes), nil
}
