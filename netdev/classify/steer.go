// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// A device with an HTB qdisc per transmit queue has a filter at the clsact attach point for frames that leave, behind
// the program that writes their class. The program writes the queue of the class to the hash of a frame, and the
// filter's action takes the frame's transmit queue from there. XPS, the NIC's driver, and the sender's socket then
// cannot choose another queue (Linux 5.19, tried by package trial).

// steerPriority is the priority of the filter, the next after the classifier's.
const steerPriority = filterPriority + 1

// steeredQueues is the number of values of the bits of the hash that name the queue.
const steeredQueues = 16

// Attributes and flags of linux/tc_act/tc_skbedit.h that the netlink library does not have.
const (
	skbeditFlags           = 9    // TCA_SKBEDIT_FLAGS
	skbeditQueueMappingMax = 10   // TCA_SKBEDIT_QUEUE_MAPPING_MAX
	skbeditQueueByHash     = 0x40 // SKBEDIT_F_TXQ_SKBHASH
)

// steer adds the filter to a device, or replaces it.
func steer(index int) error {
	if err := addClsact(index); err != nil {
		return fmt.Errorf("add clsact to link %d: %w: does the kernel have sch_ingress?", index, err)
	}
	r := steerRequest(index, unix.RTM_NEWTFILTER, unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_ACK)
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	options.AddRtAttr(nl.TCA_BPF_OPS_LEN, nl.Uint16Attr(1))
	options.AddRtAttr(nl.TCA_BPF_OPS, everyFrame())
	options.AddRtAttr(nl.TCA_BPF_NAME, nl.ZeroTerminated("dra_shared_queue"))
	action := options.AddRtAttr(nl.TCA_BPF_ACT, nil).AddRtAttr(1, nil)
	action.AddRtAttr(nl.TCA_ACT_KIND, nl.ZeroTerminated("skbedit"))
	edit := action.AddRtAttr(nl.TCA_ACT_OPTIONS, nil)
	next := nl.TcGen{Action: int32(netlink.TC_ACT_UNSPEC)} // with the filters of other owners
	edit.AddRtAttr(nl.TCA_SKBEDIT_PARMS, (&next).Serialize())
	edit.AddRtAttr(nl.TCA_SKBEDIT_QUEUE_MAPPING, nl.Uint16Attr(0))
	edit.AddRtAttr(skbeditQueueMappingMax, nl.Uint16Attr(steeredQueues-1))
	edit.AddRtAttr(skbeditFlags, nl.Uint64Attr(skbeditQueueByHash))
	r.AddData(options)
	if _, err := r.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("steer the frames of link %d: %w: does the kernel have cls_bpf and act_skbedit?", index, err)
	}
	return nil
}

// everyFrame returns a program of classic BPF that selects every frame, "ret #-1", as struct
// sock_filter.
func everyFrame() []byte {
	instruction := make([]byte, 8)
	nl.NativeEndian().PutUint16(instruction, unix.BPF_RET|unix.BPF_K)
	nl.NativeEndian().PutUint32(instruction[4:], 1<<32-1)
	return instruction
}

// steerRequest returns a request that identifies the filter of a device.
func steerRequest(index, messageType, flags int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(messageType, flags)
	r.AddData(&nl.TcMsg{
		Family:  nl.FAMILY_ALL,
		Ifindex: int32(index),
		Handle:  filterHandle,
		Parent:  netlink.HANDLE_MIN_EGRESS,
		Info:    netlink.MakeHandle(steerPriority, nl.Swap16(unix.ETH_P_ALL)),
	})
	r.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("bpf")))
	return r
}

// Steered reports whether the kernel takes the transmit queue of a device's frames from their class.
func Steered(index int) (bool, error) {
	filters, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}},
		netlink.HANDLE_MIN_EGRESS)
	if rtnl.IsNotFound(err) {
		return false, nil // the link or its clsact qdisc does not exist
	}
	if err != nil {
		return false, fmt.Errorf("list filters of link %d: %w", index, err)
	}
	for _, f := range filters {
		if f.Type() == "bpf" && f.Attrs().Priority == steerPriority {
			return true, nil
		}
	}
	return false, nil
}

// setSteered adds the filter to devices, or removes it from them.
func setSteered(wanted bool, failpoints failpoint.Injector, devices ...int) (err error) {
	for _, index := range devices {
		if wanted {
			err = errors.Join(err, failpoints.Do("steer frames", func() error { return steer(index) }))
			continue
		}
		steered, listErr := Steered(index)
		err = errors.Join(err, listErr)
		if !steered {
			continue
		}
		err = errors.Join(err, failpoints.Do("stop steering frames", func() error {
			_, err := steerRequest(index, unix.RTM_DELTFILTER, unix.NLM_F_ACK).Execute(unix.NETLINK_ROUTE, 0)
			return err
		}))
	}
	return err
}
