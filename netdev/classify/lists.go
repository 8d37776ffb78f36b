// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"errors"
	"fmt"
	"math"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// errNoMemory is the reason why programs that do not read the kernel's memory do not read lists of senders.
var errNoMemory = errors.New("the kernel does not let the programs read its memory: does the plugin have CAP_PERFMON?")

// FailpointLists is the name of the operation that makes the programs read lists of senders.
const FailpointLists = "set offsets of lists of senders"

// setListOffsets writes the offsets that the programs need to read the lists of senders of links in mode source, and
// the time until which they look for senders that were listed while earlier programs ran.
func setListOffsets(spec *ebpf.CollectionSpec) error {
	port, err := macvlanPort()
	if err != nil {
		return err
	}
	for variable, member := range map[string]string{
		"dra_shared_port_device": "dev", "dra_shared_port_senders": "vlan_source_hash",
	} {
		offset, err := offsetOf(port, member)
		if err != nil {
			return err
		}
		if err := spec.Variables[variable].Set(offset); err != nil {
			return fmt.Errorf("set %s: %w", variable, err)
		}
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("read the clock: %w", err)
	}
	return spec.Variables["dra_shared_last_listed"].Set(uint64(now.Nano()))
}

// macvlanPort returns the type of the kernel's structure of a link with macvlans.
func macvlanPort() (port *btf.Struct, err error) {
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return nil, err
	}
	err = kernel.TypeByName("macvlan_port", &port)
	if !errors.Is(err, btf.ErrNotFound) {
		return port, err
	}
	loadMacvlan()
	module, err := btf.LoadKernelModuleSpec("macvlan")
	if err != nil {
		return nil, fmt.Errorf("read the types of the module macvlan: %w", err)
	}
	return port, module.TypeByName("macvlan_port", &port)
}

// loadMacvlan makes the kernel load the module macvlan, by a request for a link on one that does not exist.
func loadMacvlan() {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = "dra-macvlan", math.MaxInt32
	_ = netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs}) // fails in any case
}

// offsetOf returns the offset of a member in bytes.
func offsetOf(s *btf.Struct, name string) (uint32, error) {
	for _, m := range s.Members {
		if m.Name == name {
			return m.Offset.Bytes(), nil
		}
	}
	return 0, fmt.Errorf("struct %s of the kernel has no member %s", s.Name, name)
}
