// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package shape

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Hairpin is a pair of virtual Ethernet links on the node. A NIC's links exchange frames through it; see
// classify.Hairpin. Frames wait in the queues of the outer link, which have the rates of the queues of the NIC.
type Hairpin struct {
	Outer, Inner int // interface indexes; 0 if the NIC does not have a hairpin
}

// Prefixes of the names of a hairpin's links.
const (
	outerPrefix = "hpo-"
	innerPrefix = "hpi-"
)

// HairpinNames returns the names of the links of a NIC's hairpin.
func HairpinNames(nic string) (outer, inner string) {
	return outerPrefix + suffix(nic), innerPrefix + suffix(nic)
}

// hairpinMTU is the largest MTU of a virtual Ethernet link, in bytes. No frame of a NIC is
// larger.
const hairpinMTU = 65535

// SetUpHairpin creates the hairpin of a NIC and its queues, or corrects the rates of the
// queues if they exist. It keeps the classes of shares.
func (h *HTB) SetUpHairpin(nic string, l NICRates) (Hairpin, error) {
	outer, inner := HairpinNames(nic)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = outer, hairpinMTU
	pair := &netlink.Veth{LinkAttrs: attrs, PeerName: inner, PeerMTU: hairpinMTU}
	err := h.failpoints.Do("add hairpin", func() error { return netlink.LinkAdd(pair) })
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return Hairpin{}, fmt.Errorf("create %s: %w: does the kernel have veth?", outer, err)
	}
	var found Hairpin
	if found.Outer, err = h.bringUpHairpin(outer); err != nil {
		return found, err
	}
	if found.Inner, err = h.bringUpHairpin(inner); err != nil {
		return found, err
	}
	if err := h.setupDevice(found.Outer, OneTree, l.base(OneTree)); err != nil {
		return found, fmt.Errorf("set up queues on %s: %w", outer, err)
	}
	return found, nil
}

// bringUpHairpin brings up one link of a hairpin and returns its interface index. The link does not get an address, and
// does not take part in neighbor discovery.
func (h *HTB) bringUpHairpin(name string) (int, error) {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return 0, fmt.Errorf("look up %s: %w", name, err)
	}
	if link.Type() != "veth" {
		return 0, fmt.Errorf("link %s is a %s, want a veth: does another program use the name?", name, link.Type())
	}
	return link.Attrs().Index, h.failpoints.Do("bring up hairpin", func() error {
		return errors.Join(netlink.LinkSetARPOff(link), setUpWithoutIPv6(link))
	})
}

// HairpinIntact reports whether the hairpin of a NIC is as SetUpHairpin left it. It does not check the classes of
// shares.
func (h *HTB) HairpinIntact(nic string, p Hairpin, l NICRates) (bool, error) {
	outer, inner := HairpinNames(nic)
	for name, index := range map[string]int{outer: p.Outer, inner: p.Inner} {
		link, err := netlink.LinkByName(name)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if link.Attrs().Index != index || link.Attrs().Flags&net.FlagUp == 0 {
			return false, nil
		}
	}
	return h.deviceIntact(p.Outer, OneTree, l.base(OneTree))
}

// FindHairpin returns the hairpin of a NIC, even if an earlier process created it.
func FindHairpin(nic string) (p Hairpin, err error) {
	outer, inner := HairpinNames(nic)
	for name, index := range map[string]*int{outer: &p.Outer, inner: &p.Inner} {
		link, err := netlink.LinkByName(name)
		switch {
		case errors.As(err, &netlink.LinkNotFoundError{}):
		case err != nil:
			return p, err
		case link.Type() == "veth":
			*index = link.Attrs().Index
		}
	}
	return p, nil
}

// RemoveHairpin deletes the hairpin of a NIC. It returns nil if the NIC has none.
func (h *HTB) RemoveHairpin(nic string) error {
	p, err := FindHairpin(nic)
	if err != nil || p.Outer == 0 {
		return err
	}
	return h.failpoints.Do("remove hairpin", func() error {
		return netlink.LinkDel(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Index: p.Outer}})
	})
}
