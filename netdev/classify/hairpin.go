// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
)

// hairpinProgram is the name of the program at the inner link of a hairpin.
const hairpinProgram = "dra_shared_hairpin"

// Hairpin is a pair of links on the node that switches frames between the links of shares
// that may reach each other. Frames of such a share first pass the queues of the outer link.
// The program at the inner link returns each to the NIC: as an arriving frame if it is for
// another link, otherwise as a leaving frame.
type Hairpin struct {
	Outer, Inner int // interface indexes
}

// AttachHairpin connects a hairpin to the programs of a NIC. It replaces the program that an earlier process attached,
// without a gap.
func (c *Classifier) AttachHairpin(nic int, h Hairpin) error {
	if err := c.attachHairpinProgram(h.Inner); err != nil {
		return fmt.Errorf("attach classifier to the hairpin of link %d: %w", nic, err)
	}
	inner := uint32(h.Inner)
	mark, err := c.hairpinMark(uint32(nic), 0)
	if err != nil {
		return fmt.Errorf("look up the hairpin of link %d: %w", nic, err)
	}
	priority, err := c.hairpinMark(inner, mark) // an earlier release has the same number in both entries
	if err != nil {
		return fmt.Errorf("look up the hairpin of link %d: %w", nic, err)
	}
	err = c.failpoints.Do("put hairpin in map", func() error {
		return errors.Join( // the inner link first, because the second entry puts the hairpin in use
			put(c.maps.DraSharedHairpins, inner, bpfHairpin{Peer: uint32(nic), Inner: inner, Mark: priority}),
			put(c.maps.DraSharedHairpins, uint32(nic), bpfHairpin{Peer: uint32(h.Outer), Inner: inner, Mark: mark}),
		)
	})
	if err != nil {
		return fmt.Errorf("add the hairpin of link %d to the classifier's map: %w", nic, err)
	}
	return nil
}

func (c *Classifier) attachHairpinProgram(inner int) error {
	if c.attachPoint == AttachTCX {
		return c.failpoints.Do("attach program", func() error { return c.attachTCX(inner, ingress(), c.hairpin) })
	}
	if err := c.failpoints.Do("add clsact", func() error { return addClsact(inner) }); err != nil {
		return err
	}
	return c.failpoints.Do("attach program", filter{link: inner, parent: ingress().parent, program: c.hairpin}.replace)
}

// hairpinMark returns the mark for an entry of a hairpin. It keeps the mark of an earlier process, because frames with
// it may be in the hairpin, unless it equals other. Otherwise, the mark is random and a pod cannot guess it.
func (c *Classifier) hairpinMark(key, other uint32) (uint32, error) {
	var present bpfHairpin
	err := c.maps.DraSharedHairpins.Lookup(key, &present)
	if err == nil && present.Mark != other || err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return present.Mark, err
	}
	var random [4]byte
	_, err = rand.Read(random[:])
	return cmp.Or(binary.NativeEndian.Uint32(random[:]), 1), err // 0 is the mark of frames without one
}

// HairpinAttached reports whether the programs of a NIC use a hairpin, and whether this
// Classifier's program is attached to its inner link.
func (c *Classifier) HairpinAttached(nic int, h Hairpin) (attached bool, err error) {
	var present bpfHairpin
	err = c.maps.DraSharedHairpins.Lookup(uint32(nic), &present)
	if err != nil || present.Peer != uint32(h.Outer) {
		return false, ignoreMissing(err)
	}
	if c.attachPoint == AttachTCX {
		return attachedByTCX(linkPin(c.bpffs, h.Inner, ingress()), h.Inner, c.hairpin)
	}
	return attachedAt(h.Inner, netlink.HANDLE_MIN_INGRESS, c.hairpin)
}

// RemoveHairpin removes the hairpin of a NIC from the map: the frames of its links then leave
// without passing it.
func (c *Classifier) RemoveHairpin(nic int) error {
	return errors.Join(
		ignoreMissing(c.maps.DraSharedHairpins.Delete(uint32(nic))),
		replace(c.maps.DraSharedHairpins, map[uint32]bpfHairpin{}, func(_ uint32, h bpfHairpin) bool {
			return h.Peer == uint32(nic)
		}),
	)
}

// DetachHairpin detaches the program of the hairpin with that inner link, even if an
// earlier process attached it.
func DetachHairpin(bpffs string, inner int, failpoints failpoint.Injector) error {
	_, err := detachTCX(linkPin(bpffs, inner, ingress()), failpoints)
	return err // the kernel removes a filter with the link
}
