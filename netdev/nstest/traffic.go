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

// BPFFS mounts a BPF file system that only this test has.
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

// Flow is one TCP connection as fast as it goes.
type Flow struct {
	From, To *Namespace
	// Address of To, host and port.
	Address  string
	Duration time.Duration
	// Priority is the sender's SO_PRIORITY.
	Priority int
	// DialFor is how long the connection may take; default 10 s.
	DialTimeout time.Duration
}

// Run returns what arrived, in bits per second of payload.
func (f Flow) Run() (bitsPerSecond float64, err error) {
	var listener net.Listener
	if err := f.To.try(func() (err error) {
		listener, err = net.Listen("tcp", f.Address)
		return err
	}); err != nil {
		return 0, err
	}
	defer listener.Close()
	var sender net.Conn
	if err := f.From.try(func() (err error) {
		dialer := net.Dialer{Timeout: cmp.Or(f.DialTimeout, 10*time.Second), Control: func(_, _ string, raw syscall.RawConn) (err error) {
			return errors.Join(raw.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PRIORITY, f.Priority)
			}), err)
		}}
		sender, err = dialer.Dial("tcp", f.Address)
		return err
	}); err != nil {
		return 0, err
	}
	defer sender.Close()
	receiver, err := listener.Accept()
	if err != nil {
		return 0, err
	}
	defer receiver.Close()
	go f.push(sender)
	return f.count(receiver)
}

func (f Flow) push(c net.Conn) {
	buf := make([]byte, 128<<10)
	for {
		if _, err := c.Write(buf); err != nil {
			return // the receiver has seen enough
		}
	}
}

func (f Flow) count(c net.Conn) (float64, error) {
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

// try is Do for use beside the test's goroutine.
func (ns *Namespace) try(f func() error) error {
	return runOnThread(func() error {
		if err := unix.Setns(int(ns.File.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// Flood sends raw Ethernet frames through a link of the namespace for a while,
// and returns how many bytes were handed to the kernel. The frame's addresses
// are the caller's choice: who may open such a socket may send as anybody.
//
// With bypass they go past the link's own queue, and past what is attached there.
func (ns *Namespace) Flood(link string, frame []byte, bypass bool, duration time.Duration) (bytes int, err error) {
	err = ns.try(func() error {
		nic, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if bypass {
			if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
				return err
			}
		}
		to := &unix.SockaddrLinklayer{Ifindex: nic.Index, Halen: 6}
		for end := time.Now().Add(duration); time.Now().Before(end); {
			switch err := unix.Sendto(fd, frame, unix.MSG_DONTWAIT, to); {
			case err == nil:
				bytes += len(frame)
			case errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EAGAIN):
			default:
				return err
			}
		}
		return nil
	})
	return bytes, err
}
