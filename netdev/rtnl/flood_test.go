// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package rtnl_test

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.User) }

// links is the number of links in the namespace: a dump of them has more messages than the socket can queue.
const links = 400

func newCrowdedNamespace(t *testing.T) *nstest.Namespace {
	t.Helper()
	ns := nstest.New(t)
	ns.Do(func() error {
		for i := range links {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = fmt.Sprintf("bridge%d", i)
			if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
				return err
			}
		}
		return nil
	})
	return ns
}

// flood sends messages from processes in a namespace to a netlink socket until the test ends. It returns when the
// kernel has accepted or refused some, with the error of the last one.
func flood(t *testing.T, ns *nstest.Namespace, port uint32) error {
	t.Helper()
	var (
		group   sync.WaitGroup
		stopped atomic.Bool
	)
	started := make(chan error, 2)
	t.Cleanup(func() { stopped.Store(true); group.Wait() })
	for range cap(started) {
		var fd int
		ns.Do(func() (err error) {
			fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
			return err
		})
		group.Go(func() {
			defer unix.Close(fd)
			to, message := &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: port}, make([]byte, unix.SizeofNlMsghdr)
			var last error
			for i := 0; !stopped.Load(); i++ {
				if err := unix.Sendto(fd, message, 0, to); !errors.Is(err, unix.EAGAIN) {
					last = err
				}
				if i == 100 {
					started <- last
				}
			}
		})
	}
	return errors.Join(<-started, <-started)
}

// dump lists the links of the namespace of a Conn. It fails the test if that does not end within a time.
func dump(t *testing.T, conn *rtnl.Conn, within time.Duration) (messages []syscall.NetlinkMessage, err error) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		request := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
		request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		messages, err = conn.Dump(request)
	}()
	select {
	case <-done:
		return messages, err
	case <-time.After(within):
		t.Fatalf("the dump has not ended after %s", within)
		return nil, nil
	}
}

// A pod with CAP_NET_ADMIN can send messages to the socket that the hook opened in its namespace. The kernel
// continues a dump only while the socket has room.
func TestConn_Dump_whilePodFloodsSocket(t *testing.T) {
	ns := newCrowdedNamespace(t)
	port, err := ns.Socket.PortID()
	if err != nil {
		t.Fatal(err)
	}
	if err := flood(t, ns, port); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("sending to the socket: got error %v, want %v", err, unix.ECONNREFUSED)
	}
	messages, err := dump(t, ns.Socket, 10*time.Second)
	if err != nil || len(messages) != links+1 { // and lo
		t.Errorf("got %d links and error %v, want %d", len(messages), err, links+1)
	}
}

// If the socket accepts such messages, requests end all the same.
func TestConn_Dump_endsIfSocketAcceptsFlood(t *testing.T) {
	ns := newCrowdedNamespace(t)
	port, err := ns.Socket.PortID()
	if err != nil {
		t.Fatal(err)
	}
	const timeout = 500 * time.Millisecond
	if err := ns.Socket.AcceptFromAll(timeout); err != nil {
		t.Fatal(err)
	}
	if err := flood(t, ns, port); err != nil {
		t.Fatalf("sending to the socket: %v", err)
	}
	for range 10 {
		messages, err := dump(t, ns.Socket, 10*time.Second)
		if err == nil && len(messages) != links+1 {
			t.Errorf("got %d links without an error, want %d", len(messages), links+1)
		}
	}
}

// The kernel answers each request, unless its answers are lost.
func TestConn_Get_endsWithoutAnswer(t *testing.T) {
	ns := nstest.New(t)
	if err := ns.Socket.AcceptFromAll(50 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	noop := nl.NewNetlinkRequest(unix.NLMSG_NOOP, 0) // a message that the kernel does not answer
	if _, err := ns.Socket.Get(noop); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got error %v, want %v", err, os.ErrDeadlineExceeded)
	}
}
