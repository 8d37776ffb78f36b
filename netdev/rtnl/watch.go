// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package rtnl

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
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
	fd, err := subscribe(unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_TC, unix.RTNLGRP_NSID)
	if err != nil {
		return nil, err
	}
	return &Watcher{file: os.NewFile(uintptr(fd), "rtnetlink-events"), buf: make([]byte, receiveBuffer)}, nil
}

// subscribe returns a socket that receives the events of groups in the caller's
// namespace.
func subscribe(groups ...int) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return fd, os.NewSyscallError("socket", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fd, errors.Join(os.NewSyscallError("bind", err), unix.Close(fd))
	}
	for _, group := range groups {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group); err != nil {
			return fd, errors.Join(fmt.Errorf("subscribe to group %d: %w", group, err), unix.Close(fd))
		}
	}
	// The kernel refuses this to root of another user namespace. An overflow is
	// then more likely, and only makes the caller read the state again.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventBuffer)
	return fd, nil
}

// Close closes the socket. A pending Receive returns an error.
func (w *Watcher) Close() error { return w.file.Close() }

// Receive waits for the next batch of events. After ErrOverflow, the Watcher is
// still usable.
func (w *Watcher) Receive() ([]syscall.NetlinkMessage, error) {
	raw, err := w.file.SyscallConn()
	if err != nil {
		return nil, err
	}
	var n int
	var received error
	err = raw.Read(func(fd uintptr) (done bool) {
		n, _, received = unix.Recvfrom(int(fd), w.buf, 0)
		return !isTemporary(received)
	})
	if err = errors.Join(err, describeReceive(received)); err != nil {
		return nil, err
	}
	messages, err := syscall.ParseNetlinkMessage(append([]byte(nil), w.buf[:n]...))
	if err != nil {
		return nil, fmt.Errorf("parse netlink event: %w", err)
	}
	return messages, nil
}

// isTemporary reports whether an error means that no event has arrived yet.
func isTemporary(err error) bool { return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) }

// describeReceive describes an error of receiving an event.
func describeReceive(err error) error {
	if errors.Is(err, unix.ENOBUFS) {
		return ErrOverflow
	}
	return os.NewSyscallError("receive netlink event", err)
}

// NamespaceWatcher reports other network namespaces with changing links or addresses. They must have an ID in its own
// namespace.
//
// It is separate from Watcher because it must not receive the routes that the kernel adds and removes with each address
// of a pod, and must not copy events: a pod can cause more than 20,000 per second.
type NamespaceWatcher struct {
	mu sync.Mutex // held while fd is in use
	fd int
	// Close ends wait through a pipe, because the runtime's poller would wake a thread for
	// each event, even while no call of Receive waits.
	end, ended *os.File
	// header receives the beginning of each event. The kernel discards the rest.
	header  [unix.SizeofNlMsghdr]byte
	control [unix.SizeofCmsghdr + 8]byte // a control message of four bytes, aligned
}

// WatchNamespaces subscribes to the events.
func WatchNamespaces() (*NamespaceWatcher, error) {
	fd, err := subscribe(unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return nil, err
	}
	err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_LISTEN_ALL_NSID, 1)
	if err != nil {
		return nil, errors.Join(fmt.Errorf(
			"listen to other network namespaces: %w: does the process have CAP_NET_BROADCAST?", err), unix.Close(fd))
	}
	w := &NamespaceWatcher{fd: fd}
	if w.ended, w.end, err = os.Pipe(); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return w, nil
}

// Close closes the socket. A pending Receive returns an error that wraps os.ErrClosed. More calls do nothing.
func (w *NamespaceWatcher) Close() error {
	if err := w.end.Close(); err != nil {
		return nil // an earlier call has closed it
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	err := errors.Join(unix.Close(w.fd), w.ended.Close())
	w.fd = -1
	return err
}

// maxEvents limits the events that one call of Receive reads. Reading one takes about 2 µs.
const maxEvents = 500

// Receive waits for an event, and returns the IDs of the namespaces of the events that the
// kernel has, in any order. more reports whether it has more than maxEvents. After ErrOverflow,
// the NamespaceWatcher is still usable.
func (w *NamespaceWatcher) Receive() (ids []int, more bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := map[int]bool{}
	for n := 0; n < maxEvents; n++ {
		id, known, err := w.receive()
		switch {
		case isTemporary(err) && len(seen) > 0:
			return slices.Collect(maps.Keys(seen)), false, nil
		case isTemporary(err):
			if err := w.wait(); err != nil {
				return nil, false, err
			}
			n = 0 // only events that are there at the same time are many
		case err != nil:
			return nil, false, describeReceive(err)
		case known:
			seen[id] = true
		}
	}
	return slices.Collect(maps.Keys(seen)), true, nil
}

// receive reads an event, and returns the ID of its namespace. known is false if it has none.
func (w *NamespaceWatcher) receive() (id int, known bool, err error) {
	_, n, _, _, err := unix.Recvmsg(w.fd, w.header[:], w.control[:], 0)
	if err != nil {
		return 0, false, err
	}
	id, known = namespaceOf(w.control[:n])
	return id, known, nil
}

// wait waits for an event, or for Close.
func (w *NamespaceWatcher) wait() error {
	if w.fd < 0 {
		return os.ErrClosed
	}
	fds := []unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLIN}, {Fd: int32(w.ended.Fd()), Events: unix.POLLIN}}
	_, err := unix.Poll(fds, -1)
	switch {
	case fds[1].Revents != 0:
		return os.ErrClosed
	case errors.Is(err, unix.EINTR):
		return nil
	default:
		return os.NewSyscallError("poll", err)
	}
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
