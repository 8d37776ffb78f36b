// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"bytes"
	"cmp"
	"maps"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// This file has the rules of identity that the classifier gets from the Node, and what it reports about frames
// that broke them.

// IsUnchecked reports whether the classifier is loaded and does not check frames; see
// classify.Policy.
func (n *Node) IsUnchecked() bool {
	c := n.openedClassifier()
	return c != nil && !c.ChecksIdentity()
}

// Refusals returns the refused frames of a NIC's class: the frames of all links of the share with the minor number, or,
// if it is 0, frames that do not belong to a known share. They are empty without enforcement. parent is the interface
// index of the NIC.
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

// SetGateways keeps the links of a NIC from using gateways' addresses, which replace the addresses from the previous
// call. A link with such a recorded address may use it. Attach adds the gateways of the link's routes.
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

// holdGatewaysOf keeps links from using the gateway addresses of a detached link. The next SetGateways, which would do
// the same, may be minutes away.
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

// nodeAddresses returns the addresses that no link of a NIC may use: the NIC's own, the gateways of its routes, and the
// node's addresses on other links. A host that gets frames with such an address from a pod takes the pod for the node.
func nodeAddresses(c NICConfig) (addresses []netip.Addr, err error) {
	all, err := listAddresses()
	if err != nil {
		return nil, err
	}
	gateways, err := gatewaysThrough(c.Index)
	if err != nil {
		return nil, err
	}
	held := map[int]bool{c.Index: true}
	for _, a := range all {
		ip, ok := netip.AddrFromSlice(a.IP)
		if ip = ip.Unmap(); !ok || a.LinkIndex != c.Index && !isHeldOnAllNICs(ip, c.Policy) {
			continue
		}
		if _, known := held[a.LinkIndex]; !known {
			link, err := netlink.LinkByIndex(a.LinkIndex)
			held[a.LinkIndex] = err == nil && areAddressesHeld(link, c.Policy) // the link may be gone: an event follows
		}
		if held[a.LinkIndex] {
			addresses = append(addresses, ip)
		}
	}
	addresses = slices.AppendSeq(addresses, maps.Keys(gateways))
	slices.SortFunc(addresses, netip.Addr.Compare)
	return slices.Compact(addresses), nil
}

// isHeldOnAllNICs reports whether no link of a NIC may use an address if the node has it on a link other than the NIC.
// Other networks can have the same link-local addresses. The network may permit an address to all links, such as the
// address of a router that the node and pods belong to.
func isHeldOnAllNICs(a netip.Addr, p classify.Policy) bool {
	permits := func(network netip.Prefix) bool { return network.Contains(a) }
	return a.IsGlobalUnicast() && !slices.ContainsFunc(p.Addresses, permits)
}

// areAddressesHeld reports whether no link of a NIC may use the addresses of another link of the node. It returns
// false for these links:
//   - Dummy devices that are down. In its mode ipvs, kube-proxy gives the addresses of all Services to such a device,
//     kube-ipvs0: there may be thousands, and each change would set up the NICs again. They are not the node's own. A
//     dummy device that is up, in contrast, may have the address that routers know the node by.
//   - Links with a MAC address that the network permits, such as a VRRP address: their frames leave through the NIC,
//     where the programs would refuse them.
//   - The links that this package tries programs on.
func areAddressesHeld(link netlink.Link, p classify.Policy) bool {
	a := link.Attrs()
	isPermitted := func(mac net.HardwareAddr) bool { return bytes.Equal(mac, a.HardwareAddr) }
	isUp := a.Flags&net.FlagUp != 0
	return (link.Type() != "dummy" || isUp) && !slices.ContainsFunc(p.MACs, isPermitted) && !trial.IsLink(a.Name)
}
