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

// NIC is a link of the node that shares could be made of.
type NIC struct {
	Name  string
	Index int
	MAC   net.HardwareAddr
	// PermanentMAC is what the hardware was made with; nil for virtual links.
	PermanentMAC net.HardwareAddr
	MTU          int // bytes
	// Speed of the link in bits per second; 0 if it reports none.
	Speed uint64
	// Driver is the kernel driver's name; empty for virtual links.
	Driver string
	// PCIBusID as sysfs writes it (0000:3b:00.0); empty if not on PCI.
	PCIBusID string
	Up       bool
	Carrier  bool
	// DefaultRoute: the node itself is reached through it.
	DefaultRoute bool
	// Master is the bridge or bond that the link belongs to; empty if none.
	// No macvlan can be made of such a link.
	Master string
}

// Inventory reads which NICs there are.
type Inventory struct {
	sysfs string
}

// NewInventory returns an inventory that reads hardware attributes below
// sysfs, usually /sys.
func NewInventory(sysfs string) *Inventory { return &Inventory{sysfs: sysfs} }

// Sysfs is where hardware attributes are read.
func (i *Inventory) Sysfs() fs.ReadLinkFS {
	sysfs, _ := os.DirFS(i.sysfs).(fs.ReadLinkFS) // it always is one
	return sysfs
}

// List returns the links of this network namespace, ordered by name, without
// those that exist only on top of others.
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
		a := l.Attrs()
		switch {
		case a.Flags&net.FlagLoopback != 0:
			continue
		case l.Type() == "ifb" || l.Type() == "macvlan" || l.Type() == "macvtap" || l.Type() == "ipvlan":
			continue
		}
		nic := NIC{
			Name: a.Name, Index: a.Index, MAC: a.HardwareAddr, MTU: a.MTU, Master: names[a.MasterIndex],
			PermanentMAC: a.PermHWAddr, Up: a.Flags&net.FlagUp != 0, Carrier: a.RawFlags&unix.IFF_LOWER_UP != 0,
			DefaultRoute: defaults[a.Index],
		}
		i.hardware(&nic)
		nics = append(nics, nic)
	}
	sort.Slice(nics, func(a, b int) bool { return nics[a].Name < nics[b].Name })
	return nics, nil
}

// dumpRetries bounds how often a dump is repeated that a change interrupted.
const dumpRetries = 10

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
		if r.Dst != nil {
			if ones, _ := r.Dst.Mask.Size(); ones != 0 {
				continue
			}
		}
		links[r.LinkIndex] = true
		for _, hop := range r.MultiPath {
			links[hop.LinkIndex] = true
		}
	}
	return links, nil
}

// hardware fills in what sysfs knows. What it does not know stays empty:
// virtual links have no device, links that are down no speed.
func (i *Inventory) hardware(nic *NIC) {
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
		if subsystem, err := os.Readlink(filepath.Join(device, "subsystem")); err == nil && filepath.Base(subsystem) == "pci" {
			nic.PCIBusID = filepath.Base(device)
		}
	}
}
