// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// The classifier recognizes what the node forwards, and what the kernel of the node sends itself, by the route of the
// frame. A VLAN of the node releases the route before the frame reaches the NIC below, unless the NIC needs routes
// (IFF_XMIT_DST_RELEASE). The VLAN takes this property from the NIC when it is created, and when the features of the
// NIC change.

// Features that are toggled for this purpose. The kernel must let every link of the kind change the feature on its own.
const (
	// toggledFeature is a feature of every NIC (Linux 5.12), and the kernel does not take it from the members of a bond
	// or a team, as it does with others. While it is on, the kernel may combine received UDP packets that it forwards.
	toggledFeature = "rx-udp-gro-forwarding"
	// toggledFeatureOfVLAN is one of the few features that a VLAN does not take from the link below.
	toggledFeatureOfVLAN = "rx-gro"
)

// keepRoutes makes frames that leave a NIC through VLANs of the node keep their route, also on VLANs that are created
// later. The kernel does not show whether frames keep it, so keepRoutes does it once for each NIC that this Node sets
// up. It returns an error only if the NIC has VLANs; without them, the next call tries again. The caller holds n.mu.
func (n *Node) keepRoutes(m managedNIC) error {
	if !n.classifier.ReadsRoutes() || n.keepingRoutes[m.Index] {
		return nil
	}
	links, err := listLinks()
	if err != nil {
		return err
	}
	below := newTopology(links).belowVLANs(m.Index)
	err = keepRoutesThrough(m, below)
	switch {
	case err == nil:
		n.keepingRoutes[m.Index] = true
	case len(below) > 0:
		return fmt.Errorf("VLANs of the node on %s would lose their frames: %w: remove the VLANs, share another NIC, "+
			"or set enforcement None for its network", m.Name, err)
	}
	return nil
}

// keepRoutesThrough makes a NIC need routes, and announces that to the VLANs on the links below.
func keepRoutesThrough(m managedNIC, below []int) error {
	if err := classify.KeepRoutes(m.Index, m.trees.Class(0)); err != nil {
		return err
	}
	for _, link := range below {
		feature := toggledFeatureOfVLAN
		if link == m.Index {
			feature = toggledFeature
		}
		if err := toggleFeature(link, feature); err != nil {
			return err
		}
	}
	return nil
}

// belowVLANs returns the links that have VLANs, from a link upward: the link itself, and VLANs that have VLANs.
func (t topology) belowVLANs(index int) (below []int) {
	for i, l := range t {
		if l.kind != "vlan" || l.lower != index {
			continue
		}
		if len(below) == 0 {
			below = append(below, index)
		}
		below = append(below, t.belowVLANs(i)...)
	}
	return below
}

// toggleFeature switches a feature of a link off and on again, or on and off, to make the kernel announce a change of
// features to the links above.
func toggleFeature(index int, name string) error {
	active, err := activeFeatures(index)
	if err != nil {
		return err
	}
	on := active[name]
	if err := setFeature(index, name, !on); err != nil {
		return err
	}
	changed, err := activeFeatures(index)
	if err == nil && changed[name] == on {
		err = fmt.Errorf("the feature %s of link %d cannot be changed", name, index)
	}
	if err != nil {
		return err
	}
	return setFeature(index, name, on)
}

// setFeature switches a feature of a link on or off, as "ethtool -K" does.
func setFeature(index int, name string, on bool) error {
	wanted := nl.NewRtAttr(unix.ETHTOOL_A_FEATURES_WANTED|unix.NLA_F_NESTED, nil)
	bit := wanted.AddRtAttr(unix.ETHTOOL_A_BITSET_BITS|unix.NLA_F_NESTED, nil).
		AddRtAttr(unix.ETHTOOL_A_BITSET_BITS_BIT|unix.NLA_F_NESTED, nil)
	bit.AddRtAttr(unix.ETHTOOL_A_BITSET_BIT_NAME, nl.ZeroTerminated(name))
	if on {
		bit.AddRtAttr(unix.ETHTOOL_A_BITSET_BIT_VALUE, nil)
	}
	_, err := ethtool(index, unix.ETHTOOL_MSG_FEATURES_SET, unix.ETHTOOL_A_FEATURES_HEADER, wanted)
	if err != nil {
		return fmt.Errorf("switch the feature %s of link %d: %w", name, index, err)
	}
	return nil
}
