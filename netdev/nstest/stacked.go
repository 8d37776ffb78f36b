// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"errors"
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// VLAN creates a VLAN on a link of the test's own namespace and brings it up.
// It skips the test if the kernel does not support VLANs.
func VLAN(t testing.TB, parent, name string, id int) {
	t.Helper()
	lower := linkByName(t, parent)
	addLink(t, &netlink.Vlan{LinkAttrs: attrsOf(name, lower.Attrs().Index), VlanId: id}, "8021q")
}

// IPVLAN creates an ipvlan on parent in the test's own namespace and brings it up.
func IPVLAN(t testing.TB, parent, name string) {
	t.Helper()
	lower := linkByName(t, parent)
	ipvlan := netlink.IPVlan{LinkAttrs: attrsOf(name, lower.Attrs().Index), Mode: netlink.IPVLAN_MODE_L2}
	addLink(t, &ipvlan, "ipvlan")
}

// Bridge creates a bridge with ports in the test's own namespace and brings it up.
func Bridge(t testing.TB, name string, ports ...string) {
	t.Helper()
	bridge := addLink(t, &netlink.Bridge{LinkAttrs: attrsOf(name, 0)}, "bridge")
	for _, port := range ports {
		if err := netlink.LinkSetMaster(linkByName(t, port), bridge); err != nil {
			t.Fatalf("add %s to %s: %v", port, name, err)
		}
	}
}

// Bond creates a bond with members in the test's own namespace and brings them
// up. It skips the test if the kernel does not support bonds.
func Bond(t testing.TB, name string, mode netlink.BondMode, members ...string) {
	t.Helper()
	bond := netlink.NewLinkBond(attrsOf(name, 0))
	bond.Mode, bond.Miimon = mode, 20
	if mode == netlink.BOND_MODE_802_3AD {
		bond.LacpRate = netlink.BOND_LACP_RATE_FAST
	}
	created := addLink(t, bond, "bonding")
	for _, member := range members {
		link := linkByName(t, member)
		err := errors.Join(netlink.LinkSetDown(link), netlink.LinkSetMaster(link, created), netlink.LinkSetUp(link))
		if err != nil {
			t.Fatalf("add %s to %s: %v", member, name, err)
		}
	}
}

// Cable creates two links in the test's own namespace that are connected to each
// other, and brings them up.
func Cable(t testing.TB, one, other string) {
	t.Helper()
	addLink(t, &netlink.Veth{LinkAttrs: attrsOf(one, 0), PeerName: other}, "veth")
	if err := netlink.LinkSetUp(linkByName(t, other)); err != nil {
		t.Fatal(err)
	}
}

// MountSysfs mounts a sysfs of the test's own namespace and returns its path. The one on /sys shows the links of the
// namespace that it was mounted in.
func MountSysfs(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("sysfs", dir, "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		t.Skipf("mount sysfs: %v: does the kernel refuse it because parts of /sys are hidden?", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// VRF creates a VRF with a link of the test's own namespace in it.
func VRF(t testing.TB, name, link string) {
	t.Helper()
	vrf := addLink(t, &netlink.Vrf{LinkAttrs: attrsOf(name, 0), Table: 100}, "vrf")
	if err := netlink.LinkSetMaster(linkByName(t, link), vrf); err != nil {
		t.Fatal(err)
	}
}

// SetDown sets a link of the test's own namespace down.
func SetDown(t testing.TB, name string) {
	t.Helper()
	if err := netlink.LinkSetDown(linkByName(t, name)); err != nil {
		t.Fatal(err)
	}
}

// addLink creates a link, which ends with the test, and brings it up.
func addLink(t testing.TB, link netlink.Link, module string) netlink.Link {
	t.Helper()
	err := netlink.LinkAdd(link)
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skipf("create %s of kind %s: %v: the kernel lacks the module %s", link.Attrs().Name, link.Type(), err, module)
	}
	if err != nil {
		t.Fatalf("create %s of kind %s: %v", link.Attrs().Name, link.Type(), err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(link) }) // the test may have deleted it
	if err := netlink.LinkSetUp(link); err != nil {
		t.Fatal(err)
	}
	return linkByName(t, link.Attrs().Name)
}

func attrsOf(name string, parent int) netlink.LinkAttrs {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = name, parent
	return attrs
}

func linkByName(t testing.TB, name string) netlink.Link {
	t.Helper()
	link, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatalf("look up link %s: %v", name, err)
	}
	return link
}

// DefaultRoute adds a default route through a link of the test's own namespace,
// and returns a function that removes it.
func DefaultRoute(t testing.TB, link string) (remove func()) {
	t.Helper()
	route := &netlink.Route{
		LinkIndex: linkByName(t, link).Attrs().Index,
		Scope:     netlink.SCOPE_LINK,
		Dst:       &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)},
	}
	if err := netlink.RouteAdd(route); err != nil {
		t.Fatalf("add default route through %s: %v", link, err)
	}
	return func() {
		t.Helper()
		if err := netlink.RouteDel(route); err != nil {
			t.Fatalf("remove default route through %s: %v", link, err)
		}
	}
}
