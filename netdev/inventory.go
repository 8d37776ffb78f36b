// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// NIC is a network interface of the node that can be the parent of macvlans.
type NIC struct {
	Name  string
	Index int
	MAC   net.HardwareAddr
	// PermanentMAC is the address that the hardware reports; nil for virtual interfaces.
	PermanentMAC net.HardwareAddr
	MTU          int // bytes
	// Speed is in bits per second; 0 if the driver reports none.
	Speed uint64
	// Driver is the name of the kernel driver; empty for virtual interfaces.
	Driver string
	// PCIBusID is the PCI address in the format of sysfs (0000:3b:00.0); empty
	// if the NIC is not a PCI device.
	PCIBusID string
	// Up is the administrative state.
	Up bool
	// Carrier reports whether the NIC has a link at the physical layer.
	Carrier bool
	// DefaultRoute reports whether a default route of the node uses the NIC.
	DefaultRoute bool
	// Master is the name of the bridge or bond that the NIC is a port of; empty
	// if none. The kernel refuses to create macvlans on such a port.
	Master string
}

// Inventory lists the NICs of the caller's network namespace.
type Inventory struct {
	sysfs string
}

// NewInventory returns an Inventory that reads hardware attributes from the
// sysfs mounted at sysfs, usually /sys.
func NewInventory(sysfs string) *Inventory { return &Inventory{sysfs: sysfs} }

// Sysfs returns the file system from which the Inventory reads hardware attributes.
func (i *Inventory) Sysfs() fs.ReadLinkFS {
	sysfs, _ := os.DirFS(i.sysfs).(fs.ReadLinkFS) // os.DirFS documents that it implements it
	return sysfs
}

// List returns the NICs ordered by name. It omits the loopback interface, IFB
// devices, and interfaces that are stacked on a NIC (macvlan, macvtap, ipvlan).
func (i *Inventory) List() ([]NIC, error) {
	links, err := listLinks()
	if err != nil {
		return nil, err
	}
	defaults, err := defaultRouteLinks()
	if err != nil {
		return nil, err
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	var nics []NIC
	for _, l := range links {
		if !isNIC(l) {
			continue
		}
		a := l.Attrs()
		nic := NIC{
			Name:         a.Name,
			Index:        a.Index,
			MAC:          a.HardwareAddr,
			PermanentMAC: a.PermHWAddr,
			MTU:          a.MTU,
			Up:           a.Flags&net.FlagUp != 0,
			Carrier:      a.RawFlags&unix.IFF_LOWER_UP != 0,
			DefaultRoute: defaults[a.Index],
			Master:       names[a.MasterIndex],
		}
		i.addHardware(&nic)
		nics = append(nics, nic)
	}
	sort.Slice(nics, func(a, b int) bool { return nics[a].Name < nics[b].Name })
	return nics, nil
}

func isNIC(l netlink.Link) bool {
	switch l.Type() {
	case "ifb", "macvlan", "macvtap", "ipvlan":
		return false
	}
	return l.Attrs().Flags&net.FlagLoopback == 0
}

// dumpRetries is the maximum number of attempts at a dump. The kernel
// interrupts a dump when the dumped objects change.
const dumpRetries = 10

// listLinks returns the links of the caller's network namespace.
func listLinks() (links []netlink.Link, err error) {
	for range dumpRetries {
		if links, err = netlink.LinkList(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	return links, nil
}

// defaultRouteLinks returns the interface indexes that default routes use.
func defaultRouteLinks() (map[int]bool, error) {
	var routes []netlink.Route
	var err error
	for range dumpRetries {
		if routes, err = netlink.RouteList(nil, netlink.FAMILY_ALL); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	links := map[int]bool{}
	for _, r := range routes {
		if !isDefault(r) {
			continue
		}
		links[r.LinkIndex] = true
		for _, hop := range r.MultiPath {
			links[hop.LinkIndex] = true
		}
	}
	return links, nil
}

func isDefault(r netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0
}

// addHardware sets the attributes that sysfs has. The others stay empty: a
// virtual interface has no device, and an interface that is down has no speed.
func (i *Inventory) addHardware(nic *NIC) {
	dir := filepath.Join(i.sysfs, "class/net", nic.Name)
	if raw, err := os.ReadFile(filepath.Join(dir, "speed")); err == nil {
		if mbps, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64); err == nil && mbps > 0 {
			nic.Speed = uint64(mbps) * 1e6
		}
	}
	if driver, err := os.Readlink(filepath.Join(dir, "device/driver")); err == nil {
		nic.Driver = filepath.Base(driver)
	}
	if device, err := filepath.EvalSymlinks(filepath.Join(dir, "device")); err == nil {
		subsystem, err := os.Readlink(filepath.Join(device, "subsystem"))
		if err == nil && filepath.Base(subsystem) == "pci" {
			nic.PCIBusID = filepath.Base(device)
		}
	}
}
