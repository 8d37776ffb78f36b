// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package capability reads and drops Linux capabilities of this process.
package capability

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Has reports whether the current thread has a capability, such as
// unix.CAP_PERFMON, in its effective set.
func Has(capability int) (bool, error) {
	_, sets, err := get()
	return err == nil && sets[capability/32].Effective&mask(capability) != 0, err
}

// Drop removes a capability from the permitted, effective, inheritable, and ambient
// sets of all threads. If the process has CAP_SETPCAP, Drop also removes it from the
// bounding sets. Without the capability in the permitted set, the process cannot get
// it back. A program that it executes can get it back only if the process may gain
// privileges (no_new_privs is not set) and the capability is in the bounding set.
//
// Drop requires a program built without cgo.
func Drop(capability int) error {
	header, sets, err := get()
	if err != nil {
		return err
	}
	if err := dropBounding(capability); err != nil {
		return err
	}
	set := &sets[capability/32]
	set.Effective &^= mask(capability)
	set.Permitted &^= mask(capability)
	set.Inheritable &^= mask(capability) // the kernel also removes it from the ambient set
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET,
		uintptr(unsafe.Pointer(header)), uintptr(unsafe.Pointer(&sets[0])), 0)
	if errno != 0 {
		return fmt.Errorf("drop capability %d: %w", capability, os.NewSyscallError("capset", errno))
	}
	return nil
}

// dropBounding removes a capability from the bounding sets. It does nothing
// without CAP_SETPCAP.
func dropBounding(capability int) error {
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uintptr(capability), 0)
	if errno != 0 && !errors.Is(errno, unix.EPERM) {
		return fmt.Errorf("drop capability %d from bounding set: %w", capability, os.NewSyscallError("prctl", errno))
	}
	return nil
}

// get returns the sets of the current thread.
func get() (*unix.CapUserHeader, *[2]unix.CapUserData, error) {
	header := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	sets := &[2]unix.CapUserData{}
	if err := unix.Capget(header, &sets[0]); err != nil {
		return nil, nil, os.NewSyscallError("capget", err)
	}
	return header, sets, nil
}

func mask(capability int) uint32 { return 1 << (capability % 32) }
