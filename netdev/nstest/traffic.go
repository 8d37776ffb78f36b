// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"cmp"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// MountBPFFS mounts a new BPF file system for the test and returns its path.
func MountBPFFS(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Flow is a TCP connection that sends as fast as it can.
type Flow struct {
	From, To *Namespace
	// Address is the host and the port that To listens on.
	Address string
	// Duration is how long the flow is measured.
	Duration time.Duration
	// Priority is the SO_PRIORITY of the sender's socket.
	Priority int
	// DialTimeout limits the time to set up the connection; default 10 s.
	DialTimeout time.Duration
}

// Run sends the flow and returns the rate of the arriving payload.
func (f Flow) Run() (bitsPerSecond float64, err error) {
	listener, err := f.listen()
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	sender, err := f.dial()
	if err != nil {
		return 0, err
	}
	defer sender.Close()
	receiver, err := listener.Accept()
	if err != nil {
		return 0, err
	}
	defer receiver.Close()
	go writeUntilClosed(sender)
	return f.measure(receiver)
}

func (f Flow) listen() (listener net.Listener, err error) {
	err = f.To.run(func() (err error) {
		listener, err = net.Listen("tcp", f.Address)
		return err
	})
	return listener, err
}

func (f Flow) dial() (sender net.Conn, err error) {
	dialer := net.Dialer{
		Timeout: cmp.Or(f.DialTimeout, 10*time.Second),
		Control: func(_, _ string, raw syscall.RawConn) (err error) {
			return errors.Join(raw.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PRIORITY, f.Priority)
			}), err)
		},
	}
	err = f.From.run(func() (err error) {
		sender, err = dialer.Dial("tcp", f.Address)
		return err
	})
	return sender, err
}

func writeUntilClosed(c net.Conn) {
	buf := make([]byte, 128<<10)
	for {
		if _, err := c.Write(buf); err != nil {
			return // Run has finished the measurement and closed the connection
		}
	}
}

// measure returns the receive rate of c, in bits per second. The clock starts with the first bytes, which do not count.
func (f Flow) measure(c net.Conn) (float64, error) {
	buf := make([]byte, 128<<10)
	if _, err := c.Read(buf); err != nil {
		return 0, err
	}
	start := time.Now()
	if err := c.SetReadDeadline(start.Add(f.Duration)); err != nil {
		return 0, err
	}
	var bytes int
	for {
		n, err := c.Read(buf)
		bytes += n
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, io.EOF) {
			return float64(bytes) * 8 / time.Since(start).Seconds(), nil
		}
		if err != nil {
			return 0, err
		}
	}
}

// run runs f in the namespace and returns its error. Unlike Do, it can run in
// goroutines other than the test's.
func (ns *Namespace) run(f func() error) error { return runIn(ns.File, f) }

// Flood sends a raw Ethernet frame through a link of the namespace repeatedly and returns how many bytes it passed to
// the kernel. The frame can have any source address, because a packet socket is not bound to the link's address.
//
// With bypass, the frames skip the link's qdisc and the programs attached to it.
func (ns *Namespace) Flood(link string, frame []byte, bypass bool, duration time.Duration) (bytes int, err error) {
	err = ns.run(func() error {
		nic, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		fd, err := packetSocket(bypass)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		bytes, err = sendRepeatedly(fd, nic.Index, frame, duration)
		return err
	})
	return bytes, err
}

func packetSocket(bypass bool) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil || !bypass {
		return fd, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

func sendRepeatedly(fd, index int, frame []byte, duration time.Duration) (bytes int, err error) {
	to := &unix.SockaddrLinklayer{Ifindex: index, Halen: 6}
	for end := time.Now().Add(duration); time.Now().Before(end); {
		err := unix.Sendto(fd, frame, unix.MSG_DONTWAIT, to)
		switch {
		case err == nil:
			bytes += len(frame)
		case errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.EAGAIN):
			// The queue is full: try again.
		default:
			return bytes, err
		}
	}
	return bytes, nil
}
