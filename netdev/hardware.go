// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// addHardware sets the hardware attributes, mostly from sysfs. Attributes that do not exist stay empty: a virtual
// interface does not have a device, and an interface that is down does not have a speed.
func (i *Inventory) addHardware(nic *NIC) {
	dir := filepath.Join(i.sysfs, "class/net", nic.Name)
	if mbps, err := strconv.ParseInt(readText(dir, "speed"), 10, 64); err == nil && mbps > 0 {
		nic.Speed = uint64(mbps) * 1e6
	}
	device, err := filepath.EvalSymlinks(filepath.Join(dir, "device"))
	if err != nil {
		return
	}
	if driver, err := os.Readlink(filepath.Join(device, "driver")); err == nil {
		nic.Driver = filepath.Base(driver)
	}
	nic.Bus = busOf(device)
	nic.PCIBusID = pciFunctionOf(device)
	number, _ := strconv.Atoi(readText(dir, "dev_port")) // 0 if the file does not exist
	nic.Port = port(number, readText(dir, "phys_port_name"))
	// Without an answer, the kernel is too old for the request. The feature is off
	// by default.
	features, _ := activeFeatures(nic.Index)
	nic.MacvlanOffload = features[macvlanOffload]
}

// readText returns the content of a file of sysfs without the final newline, or
// "" if the kernel does not provide the value.
func readText(dir, name string) string {
	raw, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(raw))
}

// busOf returns the name of the bus of a device directory of sysfs, or "".
func busOf(device string) string {
	subsystem, err := os.Readlink(filepath.Join(device, "subsystem"))
	if err != nil {
		return ""
	}
	return filepath.Base(subsystem)
}

// pciFunctionOf returns the address of the PCI function that a sysfs device directory is or belongs to, or "". The
// device of a virtio NIC or of a subfunction on the auxiliary bus is below its PCI function. Other devices below a PCI
// function, such as USB devices, share it with unrelated devices.
func pciFunctionOf(device string) string {
	for {
		switch busOf(device) {
		case "pci":
			return filepath.Base(device)
		case "virtio", "auxiliary":
			device = filepath.Dir(device)
		default:
			return ""
		}
	}
}

// firstPort matches the names that drivers give to a physical port. Functions
// of one card number them across the card, so the number does not distinguish
// the NICs of one function.
var firstPort = regexp.MustCompile(`^p[0-9]+$`)

// port returns NIC.Port for the values of dev_port and phys_port_name in sysfs. Only
// representors and split ports have names other than p<N>, such as pf0vf1.
func port(number int, name string) string {
	switch {
	case name != "" && !firstPort.MatchString(name):
		return name
	case number > 0:
		return "d" + strconv.Itoa(number)
	default:
		return ""
	}
}
