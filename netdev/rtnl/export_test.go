// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package rtnl

import (
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// AppendMessages is appendMessages.
var AppendMessages = appendMessages

// ParseError is parseError.
var ParseError = parseError

// AcceptFromAll makes the socket accept messages of other processes, as sockets do before New has connected them,
// and changes how long requests wait for the kernel.
func (c *Conn) AcceptFromAll(timeout time.Duration) error {
	address := unix.RawSockaddr{Family: unix.AF_UNSPEC} // ends the connection
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(c.fd), uintptr(unsafe.Pointer(&address)), unsafe.Sizeof(address))
	if errno != 0 {
		return os.NewSyscallError("connect", errno)
	}
	return c.setTimeout(timeout)
}
