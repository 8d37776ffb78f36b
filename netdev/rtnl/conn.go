// Package rtnl speaks NETLINK_ROUTE over a socket of one's choice: this
// process's own, or one that another process opened in a pod's network
// namespace and passed over.
//
// A socket acts on the namespace it was opened in, whoever holds it. That is
// why the plugin needs neither CAP_SYS_ADMIN nor a host PID namespace to
// configure a link in a pod. Messages and attributes are vishvananda/netlink's;
// only what that library cannot do is here: a given socket, several messages in
// one send, the kernel's own words in an error, and events of every namespace.
package rtnl

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Conn is a NETLINK_ROUTE socket. It is safe for concurrent use: a call holds
// the socket until its last answer is read.
type Conn struct {
	mu   sync.Mutex
	file *os.File // owns the descriptor
	fd   int
	seq  uint32
	buf  []byte
}

// receiveBuffer holds the largest single message the kernel sends for a dump.
const receiveBuffer = 64 << 10

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

// New uses a socket that was opened elsewhere, and owns it from then on. It
// fails if file is not a NETLINK_ROUTE socket.
func New(file *os.File) (*Conn, error) {
	fd := int(file.Fd())
	c := &Conn{file: file, fd: fd, buf: make([]byte, receiveBuffer)}
	if err := c.check(); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	// Neither is essential: without them errors are bare numbers, and dumps
	// of another namespace are refused with a reason of their own.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	return c, nil
}

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
		return fmt.Errorf("socket of domain %d, protocol %d: want a NETLINK_ROUTE socket", domain, protocol)
	}
	return nil
}

// Close closes the socket. A socket of a pod's namespace keeps that namespace
// alive, so it must not be kept.
func (c *Conn) Close() error { return c.file.Close() }

// Cookie returns the cookie of the socket's network namespace: a number that
// no other namespace has until the next boot.
func (c *Conn) Cookie() (uint64, error) {
	cookie, err := unix.GetsockoptUint64(c.fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("cookie of the network namespace (kernel 5.14 or newer): %w", err)
	}
	return cookie, nil
}

// Error is a request that the kernel refused. errors.Is compares the errno.
type Error struct {
	Index   int           // of the request in the batch
	Errno   syscall.Errno // what the kernel said
	Message string        // extended acknowledgement, if any
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

// Do sends the requests in one message and waits until the kernel has answered
// each. It carries them out in order and does not stop at an error; the first
// one is returned.
func (c *Conn) Do(requests ...*nl.NetlinkRequest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := c.seq + 1
	var out []byte
	for _, r := range requests {
		c.seq++
		r.Seq, r.Flags = c.seq, r.Flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK
		out = append(out, r.Serialize()...)
	}
	if err := c.send(out); err != nil {
		return err
	}
	var failed error
	for waiting := len(requests); waiting > 0; {
		messages, err := c.receive()
		if err != nil {
			return err
		}
		for _, m := range messages {
			if m.Header.Type != unix.NLMSG_ERROR || m.Header.Seq < first {
				continue
			}
			waiting--
			if err := parseError(m); err != nil && failed == nil {
				err.Index = int(m.Header.Seq - first)
				failed = err
			}
		}
	}
	return failed
}

// Get sends one request and returns its answer: one message, or all messages
// of a dump.
func (c *Conn) Get(request *nl.NetlinkRequest) ([]syscall.NetlinkMessage, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq++
	request.Seq, request.Flags = c.seq, request.Flags|unix.NLM_F_REQUEST
	if err := c.send(request.Serialize()); err != nil {
		return nil, err
	}
	dump := request.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP
	var answer []syscall.NetlinkMessage
	for {
		messages, err := c.receive()
		if err != nil {
			return nil, err
		}
		for _, m := range messages {
			switch {
			case m.Header.Seq != c.seq:
				continue
			case m.Header.Flags&unix.NLM_F_DUMP_INTR != 0:
				return nil, ErrDumpInterrupted
			case m.Header.Type == unix.NLMSG_DONE:
				return answer, nil
			case m.Header.Type == unix.NLMSG_ERROR:
				if err := parseError(m); err != nil {
					return nil, err
				}
				return answer, nil
			}
			// The buffer is used again for the next receive.
			m.Data = append([]byte(nil), m.Data...)
			answer = append(answer, m)
			if !dump {
				return answer, nil
			}
		}
	}
}

// dumpRetries bounds how often a dump is repeated that changes interrupt.
const dumpRetries = 10

// GetAll dumps, again if a change interrupted it.
func (c *Conn) Dump(dump *nl.NetlinkRequest) (messages []syscall.NetlinkMessage, err error) {
	for range dumpRetries {
		if messages, err = c.Get(dump); !errors.Is(err, ErrDumpInterrupted) {
			break
		}
	}
	return messages, err
}

// Port is what the kernel calls the socket: an event that the socket's own
// request caused bears it.
func (c *Conn) PortID() (uint32, error) {
	address, err := unix.Getsockname(c.fd)
	if err != nil {
		return 0, os.NewSyscallError("getsockname", err)
	}
	own, ok := address.(*unix.SockaddrNetlink)
	if !ok || own.Pid == 0 {
		return 0, errors.New("the netlink socket has no port")
	}
	return own.Pid, nil
}

// ErrInterrupted means that what was dumped changed meanwhile: the answer is
// inconsistent, ask again.
var ErrDumpInterrupted = errors.New("dump interrupted by a change")

func (c *Conn) send(b []byte) error {
	for {
		err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if err != unix.EINTR {
			return os.NewSyscallError("sendto", err)
		}
	}
}

func (c *Conn) receive() ([]syscall.NetlinkMessage, error) {
	for {
		n, from, err := unix.Recvfrom(c.fd, c.buf, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, os.NewSyscallError("recvfrom", err)
		}
		if kernel, ok := from.(*unix.SockaddrNetlink); !ok || kernel.Pid != 0 {
			continue // another process may send to a netlink socket
		}
		return syscall.ParseNetlinkMessage(c.buf[:n])
	}
}

// parseError reads an NLMSG_ERROR; nil means success. Layout: linux/netlink.h,
// struct nlmsgerr, then the request or its header, then attributes.
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
	attrs, err := nl.ParseRouteAttr(m.Data[skip:])
	if err != nil {
		return e
	}
	for _, a := range attrs {
		if a.Attr.Type&nl.NLA_TYPE_MASK == unix.NLMSGERR_ATTR_MSG {
			e.Message = strings.TrimRight(string(a.Value), "\x00")
		}
	}
	return e
}

func nlAlign(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }
