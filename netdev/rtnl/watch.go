package rtnl

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// OwnNamespace is the namespace ID of an event that comes from the watcher's
// own network namespace.
const OwnNamespace = -1

// Event is a change that the kernel announced.
type Event struct {
	// NSID tells the network namespace: OwnNamespace, or the ID that this
	// namespace has given it.
	NSID    int
	Message syscall.NetlinkMessage
}

// Watcher receives the kernel's announcements of changed links, addresses,
// routes, traffic classes and namespaces, of its own network namespace and of
// every one that has an ID there.
type Watcher struct {
	file *os.File
	buf  []byte
}

// ErrOverflow means that events were lost: read the state again.
var ErrOverflow = errors.New("events lost")

// eventBuffer is what keeps a burst of events: the default overflows at 92.
const eventBuffer = 16 << 20

// Watch subscribes. Do so before the first dump, or a change in between is missed.
func Watch() (*Watcher, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := subscribe(fd); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return &Watcher{file: os.NewFile(uintptr(fd), "rtnetlink-events"), buf: make([]byte, receiveBuffer)}, nil
}

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
		return fmt.Errorf("listen to other network namespaces: %w: has the process CAP_NET_BROADCAST?", err)
	}
	// Root of another user namespace may not: then an overflow is likelier,
	// and costs a look at everything.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventBuffer)
	return nil
}

// Close ends a Receive that waits.
func (w *Watcher) Close() error { return w.file.Close() }

// Receive waits for the next events. After ErrOverflow the watcher goes on.
func (w *Watcher) Receive() ([]Event, error) {
	raw, err := w.file.SyscallConn()
	if err != nil {
		return nil, err
	}
	var (
		n, oobn int
		oob     [64]byte
		rerr    error
	)
	if err := raw.Read(func(fd uintptr) bool {
		n, oobn, _, _, rerr = unix.Recvmsg(int(fd), w.buf, oob[:], 0)
		return rerr != unix.EAGAIN && rerr != unix.EINTR
	}); err != nil {
		return nil, err
	}
	if errors.Is(rerr, unix.ENOBUFS) {
		return nil, ErrOverflow
	}
	if rerr != nil {
		return nil, os.NewSyscallError("recvmsg", rerr)
	}
	messages, err := syscall.ParseNetlinkMessage(append([]byte(nil), w.buf[:n]...))
	if err != nil {
		return nil, fmt.Errorf("parse event: %w", err)
	}
	nsid := namespaceOf(oob[:oobn])
	events := make([]Event, len(messages))
	for i, m := range messages {
		events[i] = Event{NSID: nsid, Message: m}
	}
	return events, nil
}

// namespaceOf reads the namespace ID that comes beside an event.
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
