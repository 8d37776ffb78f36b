// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package rtnl

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// Watcher receives the kernel's events about links, addresses, routes, qdiscs,
// classes, filters, and IDs of namespaces in its own network namespace.
type Watcher struct {
	file *os.File
	buf  []byte
}

// ErrOverflow means that the kernel dropped events because the socket's buffer
// was full. The caller has to read the state again.
var ErrOverflow = errors.New("netlink socket overflowed, events were lost")

// eventBuffer is the size of a socket's receive buffer in bytes. The default
// size overflows at a burst of 92 events.
const eventBuffer = 16 << 20

// Watch subscribes to events. Call it before the first dump of the state, so
// that no change between the two is missed.
func Watch() (*Watcher, error) {
	file, err := subscribe(unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_TC, unix.RTNLGRP_NSID)
	if err != nil {
		return nil, err
	}
	return &Watcher{file: file, buf: make([]byte, receiveBuffer)}, nil
}

// subscribe returns a socket that receives the events of groups in the caller's
// namespace.
func subscribe(groups ...int) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	file := os.NewFile(uintptr(fd), "rtnetlink-events")
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, errors.Join(os.NewSyscallError("bind", err), file.Close())
	}
	for _, group := range groups {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group); err != nil {
			return nil, errors.Join(fmt.Errorf("subscribe to group %d: %w", group, err), file.Close())
		}
	}
	// The kernel refuses this to root of another user namespace. An overflow is
	// then more likely, and only makes the caller read the state again.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventBuffer)
	return file, nil
}

// Close closes the socket. A pending Receive returns an error.
func (w *Watcher) Close() error { return w.file.Close() }

// Receive waits for the next batch of events. After ErrOverflow, the Watcher is
// still usable.
func (w *Watcher) Receive() ([]syscall.NetlinkMessage, error) {
	var n int
	err := wait(w.file, func(fd int) (err error) {
		n, _, err = unix.Recvfrom(fd, w.buf, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	messages, err := syscall.ParseNetlinkMessage(append([]byte(nil), w.buf[:n]...))
	if err != nil {
		return nil, fmt.Errorf("parse netlink event: %w", err)
	}
	return messages, nil
}

// wait calls receive until it returns another result than EAGAIN.
func wait(file *os.File, receive func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var received error
	err = raw.Read(func(fd uintptr) (done bool) {
		received = receive(int(fd))
		return !errors.Is(received, unix.EAGAIN) && !errors.Is(received, unix.EINTR)
	})
	switch {
	case err != nil:
		return err
	case errors.Is(received, unix.ENOBUFS):
		return ErrOverflow
	default:
		return os.NewSyscallError("receive netlink event", received)
	}
}

// NamespaceWatcher reports in which other network namespaces links or addresses change:
// among those that have an ID in its own namespace.
//
// It is separate from Watcher, so that it neither receives the routes that the kernel
// adds and removes with each address of a pod, nor copies events: a pod can cause more
// than 20,000 per second.
type NamespaceWatcher struct {
	file *os.File
	// header receives the beginning of each event. The kernel discards the rest.
	header  [unix.SizeofNlMsghdr]byte
	control [unix.SizeofCmsghdr + 8]byte // a control message of four bytes, aligned
}

// WatchNamespaces subscribes to the events.
func WatchNamespaces() (*NamespaceWatcher, error) {
	file, err := subscribe(unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return nil, err
	}
	err = unix.SetsockoptInt(int(file.Fd()), unix.SOL_NETLINK, unix.NETLINK_LISTEN_ALL_NSID, 1)
	if err != nil {
		return nil, errors.Join(fmt.Errorf(
			"listen to other network namespaces: %w: does the process have CAP_NET_BROADCAST?", err), file.Close())
	}
	return &NamespaceWatcher{file: file}, nil
}

// Close closes the socket. A pending Receive returns an error.
func (w *NamespaceWatcher) Close() error { return w.file.Close() }

// maxEvents limits the events that one call of Receive reads. Reading one takes about 2 µs.
const maxEvents = 1000

// Receive waits for an event, and returns the IDs of the namespaces of the events that the
// kernel has, in any order. more reports that it has more than maxEvents. After ErrOverflow,
// the NamespaceWatcher is still usable.
func (w *NamespaceWatcher) Receive() (ids []int, more bool, err error) {
	seen := map[int]bool{}
	err = wait(w.file, func(fd int) error {
		for range maxEvents {
			_, n, _, _, err := unix.Recvmsg(fd, w.header[:], w.control[:], 0)
			switch {
			case errors.Is(err, unix.EAGAIN) && len(seen) > 0:
				return nil
			case err != nil:
				return err
			}
			if id, ok := namespaceOf(w.control[:n]); ok {
				seen[id] = true
			}
		}
		more = true
		return nil
	})
	return slices.Collect(maps.Keys(seen)), more, err
}

// namespaceOf returns the namespace ID in the control message of an event. Events of the
// caller's own namespace have none, except on some kernels (Debian's 6.1.172, but not its
// 6.1.192) if it has an ID in itself.
func namespaceOf(control []byte) (id int, ok bool) {
	if len(control) < unix.SizeofCmsghdr {
		return 0, false
	}
	header, data, _, err := unix.ParseOneSocketControlMessage(control)
	if err != nil || header.Level != unix.SOL_NETLINK || header.Type != unix.NETLINK_LISTEN_ALL_NSID || len(data) < 4 {
		return 0, false
	}
	return int(int32(nativeUint32(data))), true
}
