// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// Traffic counts the bytes that have passed the queues of a NIC, including Ethernet headers.
type Traffic struct {
	// Sent and Received count the bytes of all classes. Frames that arrive for the node itself do
	// not pass a queue.
	Sent, Received uint64
	// Multicast counts the bytes of multicast and broadcast frames that arrived, except ARP and
	// neighbor discovery. Received includes them.
	Multicast uint64
}

// ShareTraffic counts the bytes that have passed the classes of a share. Sent includes what it sent
// to other links of the NIC.
type ShareTraffic struct{ Sent, Received uint64 }

// Traffic returns the traffic of a NIC, or an error if the NIC is not managed with enforcement.
func (n *Node) Traffic(parent int) (t Traffic, err error) {
	nic, enforced := n.enforcedNIC(parent)
	if !enforced {
		return t, fmt.Errorf("%w: link %d", errNotManaged, parent)
	}
	if t.Sent, err = n.shaper.SentBytes(nic.Index, nic.trees); err != nil {
		return t, err
	}
	if t.Received, err = n.shaper.SentBytes(nic.ifb, nic.trees); err != nil {
		return t, err
	}
	multicast, err := n.shaper.ReadClass(nic.ifb, nic.trees.Class(shape.MulticastMinor))
	if multicast != nil {
		t.Multicast = multicast.SentBytes
	}
	return t, err
}

// ShareTraffic returns the traffic of all shares of a NIC, by the minor numbers of their classes, and how many
// multicast and broadcast frames exceeded the rate for multicast, from one dump of each of its devices. It returns
// an error if the NIC is not managed with enforcement.
func (n *Node) ShareTraffic(parent int) (shares map[uint16]ShareTraffic, multicastDropped uint64, err error) {
	nic, enforced := n.enforcedNIC(parent)
	if !enforced {
		return nil, 0, fmt.Errorf("%w: link %d", errNotManaged, parent)
	}
	shares = map[uint16]ShareTraffic{}
	for _, dev := range nic.devices() {
		classes, dropped, err := n.shaper.ReceivedClasses(dev)
		if err != nil {
			return nil, 0, err
		}
		multicastDropped += dropped // only the IFB device has such classes
		for class, state := range classes {
			_, minor := netlink.MajorMinor(class)
			share := shares[minor]
			if dev == nic.ifb {
				share.Received = state.SentBytes
			} else { // what leaves the hairpin may pass the NIC, too
				share.Sent = max(share.Sent, state.SentBytes)
			}
			shares[minor] = share
		}
	}
	return shares, multicastDropped, nil
}
