// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package rtnl sends NETLINK_ROUTE requests through a given socket, which is
// either the process's own or one that another process opened in the network
// namespace of a pod and passed to this process.
//
// A netlink socket acts on the namespace that it was opened in, independently of the process that uses it. The plugin
// therefore does not need CAP_SYS_ADMIN or the host's PID namespace to configure a link in a pod.
//
// Messages and attributes come from vishvananda/netlink. This package adds
// what that library lacks: the choice of the socket, batches of requests in one
// send, the kernel's error messages (extended acknowledgements), and events of
// all namespaces.
package rtnl

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Conn is a NETLINK_ROUTE socket. It is safe for concurrent use; calls wait for
// each other.
type Conn struct {
	mu   sync.Mutex
	file *os.File // owns the descriptor
	fd   int
	seq  uint32
	buf  []byte
	// messages are the result of the last call of receive. Their memory is used again, because a dump of a NIC with
	// thousands of links is taken twice per second.
	messages []syscall.NetlinkMessage
	// timeout is how long a request waits for the kernel's next message.
	timeout time.Duration

	sent, received atomic.Uint64 // messages
}

// receiveBuffer is the size of the largest message that the kernel sends during
// a dump, in bytes.
const receiveBuffer = 64 << 10

// answerTimeout is how long a request waits for the kernel's next message. The kernel executes a request while the
// caller sends it, and continues a dump while the caller receives: it is late only if the message was lost, or if the
// socket's queue does not have room for it.
const answerTimeout = 5 * time.Second

// Open opens a socket in the caller's network namespace.
func Open() (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, errors.Join(os.NewSyscallError("bind", err), unix.Close(fd))
	}
	return New(os.NewFile(uintptr(fd), "rtnetlink"))
}

// New returns a Conn that uses an existing socket. It fails if file is not a
// NETLINK_ROUTE socket. New takes ownership of file and closes it if it fails.
func New(file *os.File) (*Conn, error) {
	fd := int(file.Fd())
	c := &Conn{file: file, fd: fd, buf: make([]byte, receiveBuffer)}
	if err := errors.Join(c.check(), c.setTimeout(answerTimeout)); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	// A socket that is connected to the kernel refuses messages of other processes. A pod with CAP_NET_ADMIN could
	// otherwise keep the queue full, and the kernel continues a dump only while it has room.
	if err := unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, errors.Join(os.NewSyscallError("connect", err), file.Close())
	}
	// Both options are optional. Without the first, errors contain only a
	// number. Without the second, the kernel refuses dumps of other namespaces.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	return c, nil
}

// check returns an error if the descriptor is not a NETLINK_ROUTE socket.
func (c *Conn) check() error {
	domain, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return fmt.Errorf("not a socket: %w", err)
	}
	protocol, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil {
		return err
	}
	if domain != unix.AF_NETLINK || protocol != unix.NETLINK_ROUTE {
		return fmt.Errorf("socket has domain %d and protocol %d, want a NETLINK_ROUTE socket", domain, protocol)
	}
	return nil
}

// setTimeout sets how long a request waits for the kernel's next message.
func (c *Conn) setTimeout(timeout time.Duration) error {
	c.timeout = timeout
	value := unix.NsecToTimeval(timeout.Nanoseconds())
	return os.NewSyscallError("setsockopt", unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &value))
}

// Close closes the socket. Close a socket of a pod's namespace soon, because it
// keeps the namespace alive.
func (c *Conn) Close() error { return c.file.Close() }

// Cookie returns the cookie of the socket's network namespace: a number that
// the kernel does not assign to another namespace until the next boot.
func (c *Conn) Cookie() (uint64, error) {
	cookie, err := unix.GetsockoptUint64(c.fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("read cookie of network namespace: %w: is the kernel older than 5.14?", err)
	}
	return cookie, nil
}

// Error means that the kernel refused a request. errors.Is matches its errno.
type Error struct {
	Index   int           // position of the request in the batch, from 0
	Errno   syscall.Errno // the kernel's error number
	Message string        // the kernel's extended acknowledgement; may be empty
}

// Error implements error.
func (e *Error) Error() string {
	if e.Message == "" {
		return e.Errno.Error()
	}
	return e.Errno.Error() + " (" + e.Message + ")"
}

// Unwrap returns the errno.
func (e *Error) Unwrap() error { return e.Errno }

// Do sends a batch of requests in one message and waits until the kernel has
// acknowledged each of them. The kernel executes the requests in order and does
// not stop at an error. Do returns the first error, as an *Error if the kernel
// refused a request.
func (c *Conn) Do(requests ...*nl.NetlinkRequest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := c.seq + 1
	var batch []byte
	for _, r := range requests {
		c.seq++
		r.Seq, r.Flags = c.seq, r.Flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK
		batch = append(batch, r.Serialize()...)
	}
	c.sent.Add(uint64(len(requests)))
	if err := c.send(batch); err != nil {
		return err
	}
	return c.receiveAcks(first, len(requests))
}

// receiveAcks receives the acknowledgements of count requests with sequence
// numbers from first, and returns the first error in them.
func (c *Conn) receiveAcks(first uint32, count int) error {
	var refused error
	for pending := count; pending > 0; {
		messages, err := c.receive()
		if err != nil {
			return err
		}
		for _, m := range messages {
			if m.Header.Type != unix.NLMSG_ERROR || m.Header.Seq < first {
				continue
			}
			pending--
			if err := parseError(m); err != nil && refused == nil {
				err.Index = int(m.Header.Seq - first)
				refused = err
			}
		}
	}
	return refused
}

// Get sends one request and returns the kernel's answer: one message, or all
// messages of a dump, or all before the acknowledgement if the request asks for one.
// It returns ErrDumpInterrupted if the dumped objects changed during the dump; see
// Dump.
func (c *Conn) Get(request *nl.NetlinkRequest) (answer []syscall.NetlinkMessage, err error) {
	err = c.Visit(request, func(m syscall.NetlinkMessage) {
		m.Data = append([]byte(nil), m.Data...)
		answer = append(answer, m)
	})
	if err != nil {
		return nil, err
	}
	return answer, nil
}

// Visit is like Get, but passes each message of the answer to visit instead of keeping them all. A message is valid
// until visit returns; visit must not use the Conn.
func (c *Conn) Visit(request *nl.NetlinkRequest, visit func(syscall.NetlinkMessage)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq++
	request.Seq, request.Flags = c.seq, request.Flags|unix.NLM_F_REQUEST
	c.sent.Add(1)
	if err := c.send(request.Serialize()); err != nil {
		return err
	}
	dump := request.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP
	interrupted := false
	for {
		messages, err := c.receive()
		if err != nil {
			return err
		}
		for _, m := range messages {
			if m.Header.Seq != c.seq {
				continue
			}
			// The rest of the answer must be read, too: the kernel refuses another dump before.
			interrupted = interrupted || m.Header.Flags&unix.NLM_F_DUMP_INTR != 0
			switch {
			case m.Header.Type == unix.NLMSG_DONE && interrupted:
				return ErrDumpInterrupted
			case m.Header.Type == unix.NLMSG_DONE:
				return nil
			case m.Header.Type == unix.NLMSG_ERROR:
				if err := parseError(m); err != nil {
					return err
				}
				return nil
			}
			visit(m)
			if !dump && request.Flags&unix.NLM_F_ACK == 0 {
				return nil
			}
		}
	}
}

// MaxDumpAttempts is the maximum number of attempts at a dump. The kernel interrupts a dump when the dumped objects
// change.
const MaxDumpAttempts = 10

// Dump sends a dump request and returns all messages of the answer. It repeats
// the request if a change of the dumped objects interrupts the dump.
func (c *Conn) Dump(dump *nl.NetlinkRequest) (messages []syscall.NetlinkMessage, err error) {
	for range MaxDumpAttempts {
		if messages, err = c.Get(dump); !errors.Is(err, ErrDumpInterrupted) {
			break
		}
	}
	return messages, err
}

// Collect sends a dump request as Dump does, and returns the results of parse for the payloads of the messages of the
// answer, except those that it refuses. A payload is valid until parse returns; parse must not use the Conn.
func Collect[T any](c *Conn, dump *nl.NetlinkRequest, parse func(payload []byte) (T, bool)) (found []T, err error) {
	for range MaxDumpAttempts {
		found = found[:0]
		err = c.Visit(dump, func(m syscall.NetlinkMessage) {
			if value, ok := parse(m.Data); ok {
				found = append(found, value)
			}
		})
		if !errors.Is(err, ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	return found, nil
}

// Counts are numbers of netlink messages.
type Counts struct{ Sent, Received uint64 }

// Add returns the sum of c and d.
func (c Counts) Add(d Counts) Counts { return Counts{c.Sent + d.Sent, c.Received + d.Received} }

// Counts returns how many messages the Conn has sent and received. It counts each
// message of a batch and of a dump, and acknowledgements.
func (c *Conn) Counts() Counts { return Counts{Sent: c.sent.Load(), Received: c.received.Load()} }

// PortID returns the port ID of the socket. Events that a request through the
// socket causes have this ID in their header.
func (c *Conn) PortID() (uint32, error) {
	address, err := unix.Getsockname(c.fd)
	if err != nil {
		return 0, os.NewSyscallError("getsockname", err)
	}
	own, ok := address.(*unix.SockaddrNetlink)
	if !ok || own.Pid == 0 {
		return 0, errors.New("netlink socket has no port ID")
	}
	return own.Pid, nil
}

// ErrDumpInterrupted means that the dumped objects changed during the dump, so
// the answer is inconsistent. Repeat the request.
var ErrDumpInterrupted = errors.New("dump interrupted by a change")

// send sends one message, which may contain several requests, to the kernel.
func (c *Conn) send(b []byte) error {
	for {
		err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if err != unix.EINTR {
			return os.NewSyscallError("sendto", err)
		}
	}
}

// receive receives one message from the kernel and splits it. The result is valid until the next call. The error wraps
// os.ErrDeadlineExceeded if the kernel does not send one within c.timeout.
func (c *Conn) receive() ([]syscall.NetlinkMessage, error) {
	for start := time.Now(); ; {
		n, from, err := unix.Recvfrom(c.fd, c.buf, 0)
		switch {
		case errors.Is(err, unix.EAGAIN): // SO_RCVTIMEO
			return nil, c.describeNoAnswer(os.ErrDeadlineExceeded)
		case errors.Is(err, unix.ENOBUFS):
			return nil, c.describeNoAnswer(os.NewSyscallError("recvfrom", err))
		case err != nil && !errors.Is(err, unix.EINTR):
			return nil, os.NewSyscallError("recvfrom", err)
		}
		// Messages that arrived before New connected the socket may come from other processes.
		if kernel, ok := from.(*unix.SockaddrNetlink); err != nil || !ok || kernel.Pid != 0 {
			if time.Since(start) > c.timeout {
				return nil, c.describeNoAnswer(os.ErrDeadlineExceeded)
			}
			continue
		}
		c.messages, err = appendMessages(c.messages[:0], c.buf[:n])
		c.received.Add(uint64(len(c.messages)))
		return c.messages, err
	}
}

// appendMessages appends the messages in b, and they share its data. It does what syscall.ParseNetlinkMessage does,
// without allocating a new slice.
func appendMessages(messages []syscall.NetlinkMessage, b []byte) ([]syscall.NetlinkMessage, error) {
	native := nl.NativeEndian()
	for len(b) >= unix.SizeofNlMsghdr {
		h := syscall.NlMsghdr{
			Len: native.Uint32(b), Type: native.Uint16(b[4:]), Flags: native.Uint16(b[6:]),
			Seq: native.Uint32(b[8:]), Pid: native.Uint32(b[12:]),
		}
		padded := (int(h.Len) + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1)
		if h.Len < unix.SizeofNlMsghdr || padded > len(b) {
			return messages, unix.EINVAL
		}
		messages = append(messages, syscall.NetlinkMessage{Header: h, Data: b[unix.SizeofNlMsghdr:h.Len]})
		b = b[padded:]
	}
	return messages, nil
}

// describeNoAnswer adds what to check to the reason why the kernel's answer is missing.
func (c *Conn) describeNoAnswer(reason error) error {
	return fmt.Errorf("wait for the kernel's answer to a netlink request: %w: does a process in the network namespace "+
		"send messages to this socket?", reason)
}

// parseError parses an NLMSG_ERROR message; nil means success. The payload is
// struct nlmsgerr of linux/netlink.h, which ends with the request or only its
// header, followed by attributes.
func parseError(m syscall.NetlinkMessage) *Error {
	if len(m.Data) < 4 {
		return &Error{Errno: unix.EBADMSG}
	}
	code := int32(nl.NativeEndian().Uint32(m.Data))
	if code == 0 {
		return nil
	}
	e := &Error{Errno: syscall.Errno(-code)}
	if m.Header.Flags&unix.NLM_F_ACK_TLVS == 0 || len(m.Data) < 4+unix.SizeofNlMsghdr {
		return e
	}
	skip := 4 + unix.SizeofNlMsghdr
	if m.Header.Flags&unix.NLM_F_CAPPED == 0 {
		skip = 4 + nlAlign(int(nl.NativeEndian().Uint32(m.Data[4:])))
	}
	if skip > len(m.Data) {
		return e
	}
	e.Message = AttributeText(m.Data[skip:], unix.NLMSGERR_ATTR_MSG)
	return e
}

// nlAlign is the macro NLMSG_ALIGN of linux/netlink.h.
func nlAlign(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }
