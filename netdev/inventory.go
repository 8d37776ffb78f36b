// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// NIC is a network interface of the node that can be the parent of macvlans.
type NIC struct {
	Name  string
	Index int
	// Type is the kind of a virtual interface in the kernel, such as vlan or bridge; "device" for hardware.
	Type string
	MAC  net.HardwareAddr
	// PermanentMAC is the address that the hardware reports; nil for virtual
	// interfaces, which may inherit it from the NIC below them.
	PermanentMAC net.HardwareAddr
	MTU          int // bytes
	// Speed is in bits per second; 0 if the driver does not report one. A VLAN has the speed of the NIC below it, and a
	// bond the total speed of its members that can currently send.
	Speed uint64
	// Driver is the name of the kernel driver; empty for virtual interfaces.
	Driver string
	// Bus is the name of the bus that the NIC's device is on, such as pci or
	// virtio; empty for virtual interfaces.
	Bus string
	// PCIBusID is the address, in the format of sysfs (0000:3b:00.0), of the PCI
	// function that the NIC's device is or belongs to; empty if there is none.
	PCIBusID string
	// Port distinguishes the NICs of one PCI function; empty for a function's
	// first port. It does not depend on which other NICs the function has.
	Port string
	// MacvlanOffload reports whether the NIC may deliver the frames of macvlans in hardware. Such frames bypass the
	// classifier and the queues.
	MacvlanOffload bool
	// Up is the administrative state.
	Up bool
	// Carrier reports whether the NIC has a link at the physical layer.
	Carrier bool
	// Uplink reports whether a default route of the node depends on the NIC:
	// through the NIC itself, a VLAN on it, or a bridge or bond that it is a port
	// of. It stays true when the route disappears.
	Uplink bool
	// Below are the interface indexes of all links that the NIC is stacked on, in
	// order: the NIC of a VLAN, the members of a bond, the ports of a bridge, and
	// the links below these.
	Below []int
	// Master is the name of the bridge, bond, or switch that the NIC is a port of; empty
	// if none. The kernel refuses to create macvlans on such a port. A VRF is not one in
	// this sense.
	Master string
}

// Inventory lists the NICs of the caller's network namespace. It is safe for
// concurrent use.
type Inventory struct {
	sysfs string

	mu      sync.Mutex
	uplinks uplinkMemory
}

// NewInventory returns an Inventory that reads hardware attributes from the
// sysfs mounted at sysfs, usually /sys.
func NewInventory(sysfs string) *Inventory {
	return &Inventory{sysfs: sysfs, uplinks: uplinkMemory{}}
}

// Sysfs returns the file system that the Inventory reads hardware attributes from.
func (i *Inventory) Sysfs() fs.ReadLinkFS {
	sysfs, _ := os.DirFS(i.sysfs).(fs.ReadLinkFS) // os.DirFS documents that it implements it
	return sysfs
}

// List returns the NICs ordered by name. It omits the loopback interface, IFB
// devices, and interfaces that are stacked on a NIC for pods (macvlan, macvtap,
// ipvlan). NIC.Uplink takes into account what earlier calls found, and AddUplinks.
func (i *Inventory) List() ([]NIC, error) {
	links, err := listLinks()
	if err != nil {
		return nil, err
	}
	routed, err := defaultRouteLinks()
	if err != nil {
		return nil, err
	}
	stack := newTopology(links)
	i.mu.Lock()
	defer i.mu.Unlock()
	i.uplinks.update(stack, routed, time.Now())
	var nics []NIC
	for _, l := range links {
		if !isNIC(l) {
			continue
		}
		a := l.Attrs()
		nic := NIC{
			Name:    a.Name,
			Index:   a.Index,
			Type:    l.Type(),
			MAC:     a.HardwareAddr,
			MTU:     a.MTU,
			Up:      a.Flags&net.FlagUp != 0,
			Carrier: a.RawFlags&unix.IFF_LOWER_UP != 0,
			Below:   stack.allBelow(a.Index),
			Master:  stack.master(a.Index),
		}
		if l.Type() == "device" {
			nic.PermanentMAC = a.PermHWAddr
		}
		_, nic.Uplink = i.uplinks[a.Name]
		i.addHardware(&nic)
		nics = append(nics, nic)
	}
	sort.Slice(nics, func(a, b int) bool { return nics[a].Name < nics[b].Name })
	return nics, nil
}

// Uplinks returns the names of the links that a default route depends on, or has depended on since the Inventory was
// created or before, in order; see NIC.Uplink. Some may currently not exist.
func (i *Inventory) Uplinks() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Sorted(maps.Keys(i.uplinks))
}

// AddUplinks makes links uplinks that an earlier Inventory has found.
func (i *Inventory) AddUplinks(names []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, name := range names {
		i.uplinks[name] = time.Now()
	}
}

func isNIC(l netlink.Link) bool {
	switch l.Type() {
	case "ifb", "macvlan", "macvtap", "ipvlan":
		return false
	}
	return l.Attrs().Flags&net.FlagLoopback == 0 && !trial.IsLink(l.Attrs().Name)
}

// retryDump repeats a dump that the kernel interrupts.
func retryDump[T any](dump func() ([]T, error)) (objects []T, err error) {
	for range rtnl.MaxDumpAttempts {
		if objects, err = dump(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return objects, err
}

// listLinks returns the links of the caller's network namespace.
func listLinks() ([]netlink.Link, error) {
	links, err := retryDump(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	return links, nil
}

// listAddresses returns the addresses of the caller's network namespace.
func listAddresses() ([]netlink.Addr, error) {
	addresses, err := retryDump(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	return addresses, nil
}
