// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// Counts are the numbers of frames of a NIC that the programs have seen since the
// NIC was first attached.
type Counts struct{ Sent, Received uint64 }

// Counts returns the counts of a NIC.
func (c *Classifier) Counts(index int) (sum Counts, err error) {
	var perCPU []bpfCounts
	if err := ignoreMissing(c.maps.DraSharedCounts.Lookup(uint32(index), &perCPU)); err != nil {
		return sum, fmt.Errorf("read the classifier's counts of link %d: %w", index, err)
	}
	for _, n := range perCPU {
		sum.Sent += n.Sent
		sum.Received += n.Received
	}
	return sum, nil
}

// startCounts adds a NIC to the map of counts, unless it is there.
func (c *Classifier) startCounts(index int) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	err = update(c.maps.DraSharedCounts, uint32(index), make([]bpfCounts, cpus), ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) {
		return nil
	}
	return err
}

// Ahead describes the programs and filters that the kernel runs before this
// Classifier's program for a direction of a NIC.
func (c *Classifier) Ahead(index int, sent bool) (found []string, err error) {
	d := ingress()
	if sent {
		d = egress()
	}
	own, err := idOf(c.program(d))
	if err != nil {
		return nil, err
	}
	programs, err := tcxPrograms(index, d)
	if err != nil {
		return nil, err
	}
	for _, id := range programs {
		if id == own {
			return found, nil
		}
		found = append(found, describeTCX(id))
	}
	filters, err := filtersBefore(index, d, filterPriority)
	return append(found, filters...), err
}

// BeforeSteering describes the programs and filters of other owners that the kernel runs before the filter of NIC.Steer
// for frames that leave a NIC. Each can end the processing of a frame (TC_ACT_OK), and the kernel then skips the
// filter.
func (c *Classifier) BeforeSteering(index int) (found []string, err error) {
	d := egress()
	own, err := pinnedProgram(linkPin(c.bpffs, index, d), index)
	if err != nil {
		return nil, err
	}
	programs, err := tcxPrograms(index, d)
	if err != nil {
		return nil, err
	}
	for _, id := range programs {
		if id != own {
			found = append(found, describeTCX(id))
		}
	}
	filters, err := filtersBefore(index, d, steerPriority)
	return append(found, filters...), err
}

// tcxPrograms returns the programs that the kernel runs by TCX for a direction of a NIC, in their order; none if the
// kernel does not have TCX.
func tcxPrograms(index int, d direction) (ids []ebpf.ProgramID, err error) {
	programs, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: d.attach})
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the TCX programs of link %d: %w", index, err)
	}
	for _, p := range programs.Programs {
		ids = append(ids, p.ID)
	}
	return ids, nil
}

func describeTCX(id ebpf.ProgramID) string {
	if name := nameOf(id); name != "" {
		return fmt.Sprintf("TCX program %d (%s)", id, name)
	}
	return fmt.Sprintf("TCX program %d (\"bpftool prog show id %d\" on the node shows its name)", id, id)
}

// filtersBefore describes the filters of other owners for a direction of a NIC that run earlier because their priority
// is less than a number.
func filtersBefore(index int, d direction, priority uint16) (found []string, err error) {
	filters, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}, d.parent)
	if rtnl.IsNotFound(err) {
		return nil, nil // the link or its clsact qdisc does not exist
	}
	for _, f := range filters {
		if f.Attrs().Priority >= priority || f.Attrs().Priority == filterPriority {
			continue
		}
		text := fmt.Sprintf("filter %s of priority %d", f.Type(), f.Attrs().Priority)
		if b, ok := f.(*netlink.BpfFilter); ok {
			text += fmt.Sprintf(" (program %d, %s)", b.Id, b.Name)
		}
		found = append(found, text)
	}
	return found, err
}

// nameOf returns the name of a program, or "" if the kernel does not permit this
// process to open the program, which takes CAP_SYS_ADMIN.
func nameOf(id ebpf.ProgramID) string {
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return ""
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return ""
	}
	return info.Name
}
