// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"cmp"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// This file has the rules of identity that the classifier gets from the Node, and what it reports about frames
// that broke them.

// isUnchecked reports whether the classifier is loaded and does not check frames; see
// classify.Policy.
func (n *Node) isUnchecked() bool {
	c := n.openedClassifier()
	return c != nil && !c.ChecksIdentity()
}

// Refusals returns the refused frames of a class of a NIC: those of all links of the
// share with the minor number, or of no known share if it is 0. They are empty without
// enforcement. parent is the interface index of the NIC.
func (n *Node) Refusals(parent int, minor uint16) (classify.Refusals, error) {
	nic, enforced := n.enforcedNIC(parent)
	if !enforced {
		return classify.Refusals{}, nil
	}
	return n.classifier.Refusals(nic.Index, nic.trees.Class(cmp.Or(minor, shape.UnidentifiedMinor)))
}

// Conflicts returns the addresses of links that hosts on the network have used since the last call. See
// classify.Conflict.
func (n *Node) Conflicts() ([]classify.Conflict, error) {
	c := n.openedClassifier()
	if c == nil {
		return nil, nil
	}
	return c.Conflicts()
}

// SetGateways keeps the links of a NIC from using the addresses of gateways, which replace those
// of the previous call. A link for which such an address is recorded may use it. Attach adds the
// gateways of the link's routes.
func (n *Node) SetGateways(index int, gateways []netip.Addr) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if nic, known := n.managed[index]; !known || !nic.Enforce {
		return nil
	}
	gateways = slices.Clone(gateways)
	slices.SortFunc(gateways, netip.Addr.Compare)
	gateways = slices.Compact(gateways)
	if err := n.classifier.AddGateways(index, gateways); err != nil {
		return err
	}
	if previous, known := n.gateways[index]; known && slices.Equal(previous, gateways) {
		return nil
	}
	if err := n.classifier.RemoveGatewaysExcept(index, gateways); err != nil {
		return err
	}
	n.gateways[index] = gateways
	return nil
}

// holdGatewaysOf keeps links from using the addresses of gateways that a link had which has been detached. The
// next SetGateways, which would do the same, may be minutes away.
func (n *Node) holdGatewaysOf(a Attachment) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var gateways []netip.Addr
	for _, g := range n.gateways[a.Parent] {
		if slices.Contains(a.Addresses, g) {
			gateways = append(gateways, g)
		}
	}
	return n.classifier.AddGateways(a.Parent, gateways)
}

// addGateways keeps the other links of a NIC from using the addresses of a link's gateways.
func (n *Node) addGateways(nic managedNIC, s LinkSpec) error {
	if !nic.Enforce {
		return nil
	}
	var gateways []netip.Addr
	for _, r := range s.Routes {
		if r.Gateway.IsValid() {
			gateways = append(gateways, r.Gateway)
		}
	}
	return n.classifier.AddGateways(nic.Index, gateways)
}

// nodeAddresses returns the addresses of a NIC and the gateways of its routes. No link may use
// them.
func nodeAddresses(index int) (addresses []netip.Addr, err error) {
	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	own, err := listAddresses(link)
	if err != nil {
		return nil, err
	}
	routes, err := listRoutes(link)
	if err != nil {
		return nil, err
	}
	add := func(ip net.IP) {
		if a, ok := netip.AddrFromSlice(ip); ok {
			addresses = append(addresses, a.Unmap())
		}
	}
	for _, a := range own {
		add(a.IP)
	}
	for _, r := range routes {
		add(r.Gw)
	}
	slices.SortFunc(addresses, netip.Addr.Compare)
	return slices.Compact(addresses), nil
}
