// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// KeepRoutes makes the kernel keep the routes of frames until they have left a NIC. qdisc is a classful qdisc of the
// NIC.
//
// The kernel releases a route before a frame waits in a queue, unless a filter of a qdisc may read it. KeepRoutes adds
// such a filter, and removes it again: the NIC keeps the property (netif_keep_dst). The filter does not select a class.
func KeepRoutes(index int, qdisc uint32) error {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "dra_shared_keep", Type: ebpf.SchedCLS, License: "MIT",
		Instructions: asm.Instructions{
			asm.FnGetRouteRealm.Call(), // tells the kernel that the program reads the route
			asm.Mov.Imm(asm.R0, int32(netlink.TC_ACT_UNSPEC)), asm.Return(),
		},
	})
	if err != nil {
		return fmt.Errorf("load a program that reads routes: %w", err)
	}
	defer program.Close()
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: index, Parent: qdisc, Handle: filterHandle, Protocol: unix.ETH_P_ALL, Priority: filterPriority,
		},
		Fd: program.FD(), Name: "dra_shared_keep", DirectAction: true,
	}
	if err := netlink.FilterReplace(filter); err != nil {
		return fmt.Errorf("keep the routes of frames of link %d: %w: does the kernel have cls_bpf?", index, err)
	}
	return netlink.FilterDel(filter)
}
