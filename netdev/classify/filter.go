// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// filterPriority is the priority of this driver's filters at the attach points of clsact.
// It also identifies them, so it is a number that other programs are unlikely
// to use.
const filterPriority = 0xd5a

// filterHandle is the handle of this driver's filters. It is constant, so a new filter replaces an earlier process's
// filter.
const filterHandle = 1

// filter is a filter of type bpf at an attach point of clsact on a link.
type filter struct {
	link    int    // interface index
	parent  uint32 // netlink.HANDLE_MIN_EGRESS or netlink.HANDLE_MIN_INGRESS
	program *ebpf.Program
	// redirectTo is the interface index of the link that gets the frames that the program selects. If it is 0, the result
	// of the program is the verdict on the frame (direct action).
	redirectTo int
}

// tcaBPFAct is TCA_BPF_ACT of linux/pkt_cls.h: the actions of a filter.
const tcaBPFAct = 1

// addClsact adds the clsact qdisc, which has the attach points, unless the link has it.
func addClsact(link int) error {
	err := netlink.QdiscAdd(&netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: link, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}})
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// replace creates the filter, or replaces an earlier process's filter in one step. It builds the request itself because
// netlink.BpfFilter does not have actions.
func (f filter) replace() error {
	r := f.request(unix.RTM_NEWTFILTER, unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_ACK)
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	options.AddRtAttr(nl.TCA_BPF_FD, nl.Uint32Attr(uint32(f.program.FD())))
	options.AddRtAttr(nl.TCA_BPF_NAME, nl.ZeroTerminated("dra_shared"))
	if f.redirectTo == 0 {
		options.AddRtAttr(nl.TCA_BPF_FLAGS, nl.Uint32Attr(nl.TCA_BPF_FLAG_ACT_DIRECT))
	} else {
		actions := options.AddRtAttr(tcaBPFAct, nil)
		if err := netlink.EncodeActions(actions, []netlink.Action{netlink.NewMirredAction(f.redirectTo)}); err != nil {
			return err
		}
	}
	r.AddData(options)
	_, err := r.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// remove removes the filter.
func (f filter) remove() error {
	_, err := f.request(unix.RTM_DELTFILTER, unix.NLM_F_ACK).Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// request returns a request that identifies the filter.
func (f filter) request(messageType, flags int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(messageType, flags)
	r.AddData(&nl.TcMsg{
		Family:  nl.FAMILY_ALL,
		Ifindex: int32(f.link),
		Handle:  filterHandle,
		Parent:  f.parent,
		Info:    netlink.MakeHandle(filterPriority, nl.Swap16(unix.ETH_P_ALL)),
	})
	r.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("bpf")))
	return r
}

// attachedAt reports whether this driver's filter at an attach point of a NIC runs
// program, or any program if program is nil.
func attachedAt(index int, parent uint32, program *ebpf.Program) (bool, error) {
	filters, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}, parent)
	if rtnl.IsNotFound(err) {
		return false, nil // the link or its clsact qdisc does not exist
	}
	if err != nil {
		return false, fmt.Errorf("list filters of link %d: %w", index, err)
	}
	var id ebpf.ProgramID
	if program != nil {
		if id, err = idOf(program); err != nil {
			return false, err
		}
	}
	for _, f := range filters {
		b, ok := f.(*netlink.BpfFilter)
		if !ok || b.Priority != filterPriority {
			continue
		}
		if program == nil || b.Id == int(id) {
			return true, nil
		}
	}
	return false, nil
}

// removeFilter removes this driver's filter at an attach point of a NIC, and reports whether it
// found one.
func removeFilter(index int, parent uint32, failpoints failpoint.Injector) (found bool, err error) {
	if found, err = attachedAt(index, parent, nil); !found {
		return false, err
	}
	return true, failpoints.Do("detach program", filter{link: index, parent: parent}.remove)
}

// idOf returns the ID that the kernel has assigned to a program.
func idOf(program *ebpf.Program) (ebpf.ProgramID, error) {
	info, err := program.Info()
	if err != nil {
		return 0, err
	}
	id, _ := info.ID()
	return id, nil
}
