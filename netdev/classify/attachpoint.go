// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
)

// AttachPoint names where the kernel runs the programs.
type AttachPoint string

// Values of AttachPoint, best first.
const (
	// AttachTCX runs the programs before all programs and filters that other owners have
	// attached by then. Linux has it since 6.6.
	AttachTCX AttachPoint = "TCX"
	// AttachClsact runs the programs as filters of the clsact qdisc, after programs of TCX
	// and after filters of a lower priority.
	AttachClsact AttachPoint = "clsact"
)

// AttachPoints returns all attach points, best first.
func AttachPoints() []AttachPoint { return []AttachPoint{AttachTCX, AttachClsact} }

// direction is the direction of the frames of a NIC that a program sees.
type direction struct {
	name   string          // part of the name of a pin
	parent uint32          // of the filter at the attach point of clsact
	attach ebpf.AttachType // of the link by TCX
}

func egress() direction {
	return direction{"egress", netlink.HANDLE_MIN_EGRESS, ebpf.AttachTCXEgress}
}

func ingress() direction {
	return direction{"ingress", netlink.HANDLE_MIN_INGRESS, ebpf.AttachTCXIngress}
}

func directions() []direction { return []direction{egress(), ingress()} }

// program returns the program for a direction.
func (c *Classifier) program(d direction) *ebpf.Program {
	if d == egress() {
		return c.egress
	}
	return c.ingress
}

// attach attaches the programs to a link, at the attach point of the Classifier. It replaces
// the programs that an earlier process attached there.
func (c *Classifier) attach(index, ifb int) error {
	if c.attachPoint == AttachTCX {
		for _, d := range directions() {
			attach := func() error { return c.attachTCX(index, d, c.program(d)) }
			if err := c.failpoints.Do("attach program", attach); err != nil {
				return fmt.Errorf("attach classifier to link %d by TCX: %w", index, err)
			}
		}
		return nil
	}
	if err := c.failpoints.Do("add clsact", func() error { return addClsact(index) }); err != nil {
		return fmt.Errorf("add clsact to link %d: %w: does the kernel have sch_ingress?", index, err)
	}
	for _, f := range c.filters(index, ifb) {
		if err := c.failpoints.Do("attach program", f.replace); err != nil {
			return fmt.Errorf("attach classifier to link %d: %w: does the kernel have cls_bpf and act_mirred?", index, err)
		}
	}
	return nil
}

// AttachPoint returns the attach point that Attach uses.
func (c *Classifier) AttachPoint() AttachPoint { return c.attachPoint }

// Attached reports whether the programs of this Classifier are attached to a NIC in both
// directions. Another program may have removed them.
func (c *Classifier) Attached(index int) (attached bool, err error) {
	for _, d := range directions() {
		if c.attachPoint == AttachTCX {
			attached, err = attachedByTCX(linkPin(c.bpffs, index, d), index, c.program(d))
		} else {
			attached, err = attachedAt(index, d.parent, c.program(d))
		}
		if err != nil || !attached {
			return false, err
		}
	}
	return true, nil
}

// AnyVersionAttached reports whether programs of this driver are attached to a NIC in both
// directions, even if another process attached them: they use the same maps.
func AnyVersionAttached(bpffs string, index int) (bool, error) {
	for _, d := range directions() {
		attached, err := attachedByTCX(linkPin(bpffs, index, d), index, nil)
		if err == nil && !attached {
			attached, err = attachedAt(index, d.parent, nil)
		}
		if err != nil || !attached {
			return false, err
		}
	}
	return true, nil
}

// detachFrom detaches this driver's programs from an attach point of a NIC, and reports whether it
// found any.
func detachFrom(point AttachPoint, bpffs string, index int, failpoints failpoint.Injector) (found bool, err error) {
	for _, d := range directions() {
		var removed bool
		var removeErr error
		if point == AttachTCX {
			removed, removeErr = detachTCX(linkPin(bpffs, index, d), failpoints)
		} else {
			removed, removeErr = removeFilter(index, d.parent, failpoints)
		}
		found = found || removed
		if removeErr != nil {
			err = errors.Join(err, fmt.Errorf("detach classifier from link %d (%s, %s): %w", index, point, d.name, removeErr))
		}
	}
	return found, err
}
