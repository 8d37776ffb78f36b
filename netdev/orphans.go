// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"net"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// LinkKey identifies a link on the node, independently of the link's namespace.
// A NIC does not accept two links with the same MAC address.
type LinkKey struct {
	Parent int // interface index of the NIC
	MAC    [6]byte
}

// NewLinkKey returns the key of the link with the address mac on the NIC parent.
func NewLinkKey(parent int, mac net.HardwareAddr) LinkKey {
	k := LinkKey{Parent: parent}
	copy(k.MAC[:], mac)
	return k
}

// Classes returns the minor numbers of all classes of shares on the devices of a NIC.
// The result is empty if the NIC is managed without enforcement.
func (n *Node) Classes(parent int) (map[uint16]bool, error) {
	nic, err := n.managedNIC(parent)
	if err != nil || !nic.Enforce {
		return nil, err
	}
	minors := map[uint16]bool{}
	for _, dev := range nic.devices() {
		states, err := n.shaper.ShareClasses(dev)
		if err != nil {
			return nil, err
		}
		for class := range states {
			_, minor := netlink.MajorMinor(class)
			minors[minor] = true
		}
	}
	return minors, nil
}

// Members returns the links that the classifier has entries for, of all NICs.
func (n *Node) Members() ([]classify.Member, error) {
	c := n.openedClassifier()
	if c == nil {
		return nil, nil
	}
	return c.Members()
}

// RemoveMember removes the classifier entries of a link.
func (n *Node) RemoveMember(m classify.Member) error {
	c := n.openedClassifier()
	if c == nil {
		return nil
	}
	return c.RemoveMember(m)
}

// openedClassifier returns the classifier, or nil if it is not loaded.
func (n *Node) openedClassifier() *classify.Classifier {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.classifier
}

// Links returns the keys of the macvlans on links of the node in all namespaces that have an ID in
// the node's namespace. Attach assigns an ID to the pod's namespace, so the
// result includes every link of a share.
func (n *Node) Links() (map[LinkKey]bool, error) {
	ids, err := n.conn.NamespaceIDs()
	if err != nil {
		return nil, err
	}
	links := map[LinkKey]bool{}
	for _, id := range ids {
		macvlans, err := n.macvlans(id)
		if err != nil {
			return nil, err
		}
		for _, m := range macvlans {
			links[NewLinkKey(m.parent, m.mac)] = true
		}
	}
	return links, nil
}

// OrphanIFBs returns the names of this driver's IFB devices if their NIC does not exist or does not have this driver's
// queues.
func (n *Node) OrphanIFBs() (names []string, err error) {
	links, err := listLinks()
	if err != nil {
		return nil, err
	}
	ifbs := map[string]bool{} // whether a NIC uses the device
	for _, l := range links {
		if l.Type() != "ifb" {
			continue
		}
		owned, ownedErr := n.shaper.Owned(l.Attrs().Index)
		err = errors.Join(err, ownedErr)
		if owned {
			ifbs[l.Attrs().Name] = false
		}
	}
	for _, l := range links {
		ifb := shape.IFBName(l.Attrs().Name)
		if _, exists := ifbs[ifb]; !exists || l.Type() == "ifb" {
			continue
		}
		owned, ownedErr := n.shaper.Owned(l.Attrs().Index)
		err = errors.Join(err, ownedErr)
		ifbs[ifb] = ifbs[ifb] || owned
	}
	if err != nil {
		return nil, err
	}
	for name, used := range ifbs {
		if !used {
			names = append(names, name)
		}
	}
	return names, nil
}

// RemoveIFB deletes an IFB device by the name that OrphanIFBs returned, and the hairpin of
// the same NIC. It returns nil if the device does not exist.
func (n *Node) RemoveIFB(name string) error {
	if err := n.removeHairpin(shape.NICOfIFB(name)); err != nil {
		return err
	}
	link, err := netlink.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return err
	}
	return n.failpoints.Do("remove IFB", func() error { return netlink.LinkDel(link) })
}
