// Package accel finds the accelerators of a node and the device nodes that
// belong to each: PCI functions by what sysfs says of them, and anything else by
// the path of its device node. It reads files only and knows nothing of
// Kubernetes.
//
// What belongs to a PCI function is what its drivers have registered below it
// (drm/renderD128, accel/accel0, ...), each with the name of its node. NVIDIA's
// driver registers nothing there: its node is found by the minor number in
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
	// PCIBusID as sysfs writes it (0000:3b:00.0); empty if not on PCI.
	PCIBusID string
	// Class, Vendor and ID are the PCI codes in lower-case hexadecimal digits:
	// six, four and four.
	Class, Vendor, ID string
	// Driver is the kernel driver's name; empty if none is bound.
	Driver string
	// DriverVersion as the driver's module states it; empty if it does not.
	DriverVersion string
	// Model as the driver names it; empty if it does not.
	Model string
	// Nodes are the paths of the device nodes, as on the node, in order.
	Nodes []string
}

// Match says which devices are meant: those for which all that is given holds.
type Match struct {
	// Class is how the class code begins; Vendor and ID are whole. Hexadecimal.
	Class, Vendor, ID string
	// Paths are patterns of device nodes (path.Match). With PCI criteria they
	// say which nodes of the matching devices count; alone, each matching node
	// is a device, and those of one PCI device are one.
	Paths []string
}

func (m Match) onPCI() bool { return m.Class != "" || m.Vendor != "" || m.ID != "" }

// Host is where a node's file systems are.
type Host struct {
	Sys  fs.ReadLinkFS // /sys
	Proc fs.FS         // /proc
	Dev  fs.FS         // /dev
	// Cgroups is the root of the unified cgroup hierarchy; nil if that cannot
	// be seen.
	Cgroups fs.FS
	// dev is the path of Dev.
	dev string
}

// HostAt is the host whose file systems are mounted at those paths.
func HostAt(sys, proc, dev, cgroups string) Host {
	links, _ := os.DirFS(sys).(fs.ReadLinkFS) // it always is one
	return Host{Sys: links, Proc: os.DirFS(proc), Dev: os.DirFS(dev), Cgroups: os.DirFS(cgroups), dev: dev}
}

// Find returns the devices that match, ordered by address, then by node. One
// of which no node is there is among them.
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

// functions lists the PCI functions with their codes.
func (h Host) functions() ([]Device, error) {
	entries, err := fs.ReadDir(h.Sys, pciDevices)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // no PCI
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
		if d.Class != "" { // it was removed meanwhile
			functions = append(functions, d)
		}
	}
	return functions, nil
}

// text of a file in sysfs; what cannot be read is empty.
func (h Host) text(name string) string {
	raw, err := fs.ReadFile(h.Sys, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(raw))
}

// complete fills in what is asked of the matching functions only.
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

// notShared are subsystems whose nodes are not for whom a device is shared
// with: the console's frame buffer, and what configures the hardware.
var notShared = []string{"graphics", "i2c-dev", "hwmon", "ptp", "vfio-dev"}

// registered returns the nodes of what a function's drivers have registered:
// DIR/SUBSYSTEM/NAME has the node's name in its uevent file.
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

// nvidia finds what NVIDIA's driver tells about one of its GPUs.
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

// value returns what follows a key at the beginning of a line.
func value(text, key string) string {
	lines := bufio.NewScanner(bytes.NewReader([]byte(text)))
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), key); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

// present returns the node if it is there, and a device.
func (h Host) present(node string) []string {
	if h.IsNode(node) {
		return []string{node}
	}
	return nil
}

// IsNode tells whether there is a device node at a path below /dev.
func (h Host) IsNode(node string) bool {
	name, ok := strings.CutPrefix(node, "/dev/")
	if !ok || !fs.ValidPath(name) {
		return false
	}
	info, err := fs.Stat(h.Dev, name)
	return err == nil && info.Mode()&fs.ModeDevice != 0
}

// Nodes returns the device nodes that match one of the patterns, in order.
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
