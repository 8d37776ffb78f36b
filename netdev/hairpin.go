// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// kernelMode returns the mode that a link of the NIC gets. With enforcement, the kernel must
// not switch frames between links past the queues and the checks of the NIC.
func (m managedNIC) kernelMode(wanted Mode) Mode {
	if wanted == Bridge && m.Enforce {
		return VEPA
	}
	return wanted
}

// switches reports whether the link may exchange frames with other links of its NIC.
func (a Attachment) switches() bool { return a.Mode == Bridge || a.Mode == VEPA }

// onHairpin returns the class of a share on a hairpin, by its class on the NIC. It returns 0 for none.
func onHairpin(class uint32) uint32 {
	if class == 0 {
		return 0
	}
	_, minor := netlink.MajorMinor(class)
	return shape.OneTree.Class(minor)
}

// setHairpinClass gives a share a class on the hairpin of its NIC, which it sets up for the
// first such share.
func (n *Node) setHairpinClass(nic managedNIC, minor uint16, r shape.Rates) error {
	hairpin, err := n.setUpHairpin(nic.Index)
	if err != nil {
		return fmt.Errorf("set up the hairpin of %s: %w", nic.Name, err)
	}
	return n.shaper.SetHairpinClass(hairpin, nic.Rates, minor, r)
}

// setUpHairpin sets up the hairpin of a NIC unless this Node did before.
func (n *Node) setUpHairpin(index int) (shape.Hairpin, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m, managed := n.managed[index]
	if !managed || !m.Enforce {
		return m.hairpin, fmt.Errorf("%w: link %d", errNotManaged, index)
	}
	if m.hairpin.Outer != 0 {
		return m.hairpin, nil
	}
	return n.createHairpin(m)
}

// createHairpin creates the hairpin of a NIC, or corrects it if it exists. The caller holds
// n.mu.
func (n *Node) createHairpin(m managedNIC) (shape.Hairpin, error) {
	hairpin, err := n.shaper.SetUpHairpin(m.Name, m.Rates)
	if err == nil {
		err = n.classifier.AttachHairpin(m.Index, classify.Hairpin(hairpin))
	}
	if err != nil {
		return hairpin, err
	}
	m.hairpin = hairpin
	n.managed[m.Index] = m
	return hairpin, nil
}

// keepHairpin corrects the hairpin of a NIC if the NIC has one. Otherwise it makes sure that
// frames do not go to a removed hairpin. The caller holds n.mu.
func (n *Node) keepHairpin(index int) error {
	m := n.managed[index]
	found, err := shape.FindHairpin(m.Name)
	switch {
	case err != nil:
		return err
	case found.Outer != 0 && found.Inner != 0:
		_, err = n.createHairpin(m)
		return err
	default:
		return n.classifier.RemoveHairpin(index)
	}
}

// isHairpinIntact reports whether the hairpin of a NIC is as setUpHairpin left it. The caller holds n.mu.
func (n *Node) isHairpinIntact(m managedNIC) (bool, error) {
	if m.hairpin.Outer == 0 {
		return true, nil
	}
	intact, err := n.shaper.HairpinIntact(m.Name, m.hairpin, m.Rates)
	if err != nil || !intact {
		return false, err
	}
	return n.classifier.HairpinAttached(m.Index, classify.Hairpin(m.hairpin))
}

// removeHairpin removes the hairpin of a NIC, even if an earlier process set it up. It finds it by the name that the
// NIC had when it was managed.
func (n *Node) removeHairpin(nic string) error {
	hairpin, err := shape.FindHairpin(nic)
	if err != nil || hairpin == (shape.Hairpin{}) {
		return err
	}
	return errors.Join(classify.DetachHairpin(n.bpffs, hairpin.Inner, n.failpoints), n.shaper.RemoveHairpin(nic))
}
