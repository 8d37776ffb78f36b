// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package rtnl

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// OwnNamespace is the NSID of events from the Watcher's own network namespace.
const OwnNamespace = -1

// Event is a change of the network state.
type Event struct {
	// NSID identifies the network namespace of the change: OwnNamespace, or the
	// namespace's ID in the Watcher's namespace.
	NSID    int
	Message syscall.NetlinkMessage
}

// Watcher receives the kernel's events about links, addresses, routes, qdiscs,
// classes, filters, and namespaces. The events come from the Watcher's own
// network namespace and from all namespaces that have an ID in it.
type Watcher struct {
	file *os.File
	buf  []byte
	own  int // ID of the Watcher's namespace in itself, or -1 if it is not known
}

// ErrOverflow means that the kernel dropped events because the socket's buffer
// was full. The caller has to read the state again.
var ErrOverflow = errors.New("netlink socket overflowed, events were lost")

// eventBuffer is the size of the socket's receive buffer in bytes. The default
// size overflows at a burst of 92 events.
const eventBuffer = 16 << 20

// Watch subscribes to events. Call it before the first dump of the state, so
// that no change between the two is missed.
func Watch() (*Watcher, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := subscribe(fd); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return &Watcher{file: os.NewFile(uintptr(fd), "rtnetlink-events"), buf: make([]byte, receiveBuffer), own: -1}, nil
}

// subscribe binds a socket and subscribes it to events of all namespaces.
func subscribe(fd int) error {
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("bind", err)
	}
	for _, group := range []int{
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_TC, unix.RTNLGRP_NSID,
	} {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group); err != nil {
			return fmt.Errorf("subscribe to group %d: %w", group, err)
		}
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_LISTEN_ALL_NSID, 1); err != nil {
		return fmt.Errorf("listen to other network namespaces: %w: does the process have CAP_NET_BROADCAST?", err)
	}
	// The kernel refuses this to root of another user namespace. An overflow is
	// then more likely, and only makes the caller read the state again.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventBuffer)
	return nil
}

// Close closes the socket. A pending Receive returns an error.
func (w *Watcher) Close() error { return w.file.Close() }

// Receive waits for the next batch of events. After ErrOverflow, the Watcher is
// still usable. Call it in the network namespace in which Watch was called.
func (w *Watcher) Receive() ([]Event, error) {
	raw, err := w.file.SyscallConn()
	if err != nil {
		return nil, err
	}
	var (
		n, oobn int
		oob     [64]byte
		recvErr error
	)
	err = raw.Read(func(fd uintptr) (done bool) {
		n, oobn, _, _, recvErr = unix.Recvmsg(int(fd), w.buf, oob[:], 0)
		return recvErr != unix.EAGAIN && recvErr != unix.EINTR
	})
	if err != nil {
		return nil, err
	}
	if errors.Is(recvErr, unix.ENOBUFS) {
		return nil, ErrOverflow
	}
	if recvErr != nil {
		return nil, os.NewSyscallError("recvmsg", recvErr)
	}
	messages, err := syscall.ParseNetlinkMessage(append([]byte(nil), w.buf[:n]...))
	if err != nil {
		return nil, fmt.Errorf("parse netlink event: %w", err)
	}
	nsid, err := w.origin(namespaceOf(oob[:oobn]))
	if err != nil {
		return nil, err
	}
	events := make([]Event, len(messages))
	for i, m := range messages {
		events[i] = Event{NSID: nsid, Message: m}
	}
	return events, nil
}

// origin returns OwnNamespace for the ID of the Watcher's own namespace, and any other ID
// unchanged. Some kernels (Debian's 6.1.172, but not its 6.1.192) add the namespace's ID
// in itself to its own events as soon as there is one, and assign one when a process reads
// a link of another namespace whose parent is in this one.
func (w *Watcher) origin(nsid int) (int, error) {
	if nsid != OwnNamespace && w.own < 0 {
		var err error
		if w.own, err = ownNamespaceID(); err != nil {
			return 0, err
		}
	}
	if nsid == w.own {
		return OwnNamespace, nil
	}
	return nsid, nil
}

// ownNamespaceID returns the ID of the process's network namespace in itself, or -1 if
// it has none.
func ownNamespaceID() (int, error) {
	c, err := Open()
	if err != nil {
		return 0, err
	}
	defer c.Close()
	namespace, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return 0, err
	}
	defer namespace.Close()
	return c.namespaceID(namespace)
}

// namespaceOf returns the namespace ID in the control messages of an event.
func namespaceOf(oob []byte) int {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return OwnNamespace
	}
	for _, m := range messages {
		if m.Header.Level == unix.SOL_NETLINK && m.Header.Type == unix.NETLINK_LISTEN_ALL_NSID && len(m.Data) >= 4 {
			return int(int32(nativeUint32(m.Data)))
		}
	}
	return OwnNamespace
}
