// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"

	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// A pod changes the mode of its link in a way that lets it receive other pods' frames. The plugin blocks its frames
// within a second, and unblocks them within a second after the pod reverts the change. Another pod, which changes its
// link as fast as it can, does not delay the plugin.
func TestPlugin_blocksChangedLinkWithinOneSecond(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	pod := e.podWithAddress("changing", "10.20.0.5/16")
	busy := e.podWithAddress("busy", "10.20.0.6/16")
	arrivals := e.observe(pod, "10.20.0.1")
	for _, neighbor := range []string{"calm", "busy"} {
		if neighbor == "busy" {
			busy.flapLink(t)
		}
		for _, mode := range []netlink.MacvlanMode{
			netlink.MACVLAN_MODE_VEPA, netlink.MACVLAN_MODE_BRIDGE, netlink.MACVLAN_MODE_SOURCE,
		} {
			t.Run(fmt.Sprintf("%s neighbor, mode %d", neighbor, mode), func(t *testing.T) {
				changed := time.Now()
				e.must("change the mode", pod.setMode(mode))
				last := arrivals.awaitEnd(t)
				if took := last.Sub(changed); took > time.Second {
					t.Errorf("frames arrived for %s after the change, want at most 1s", took)
				}
				reverted := time.Now()
				e.must("revert the mode", pod.setMode(netlink.MACVLAN_MODE_PRIVATE))
				first := arrivals.awaitNext(t, reverted)
				if took := first.Sub(reverted); took > time.Second {
					t.Errorf("frames arrived %s after the change was reverted, want at most 1s", took)
				}
				t.Logf("blocked after %s, unblocked after %s", last.Sub(changed), first.Sub(reverted))
			})
		}
	}
}

// A pod creates a link on the NIC in a network namespace that the node cannot see. The plugin hides the senders of
// frames within a second.
func TestPlugin_guardsNICWithinOneSecond(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	attacker, other := e.podWithAddress("attacker", "10.20.0.5/16"), e.podWithAddress("other", "10.20.0.6/16")
	sources := e.observeSources(other, "10.20.0.1", "10.20.0.6")
	nested, created := nstest.New(t), time.Time{}
	e.must("create a link that the node cannot see", attacker.do(func() error {
		net1, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex, attrs.Namespace = "more", net1.Attrs().Index, netlink.NsFd(nested.File.Fd())
		return netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE})
	}))
	nested.Do(func() error {
		created = time.Now()
		return nstest.ConfigureLink("more")
	})
	eventually.Eventually(t, timeout, "the source address of a frame is replaced", func() error {
		replaced := sources.replaced.Load()
		if replaced == nil {
			return errors.New("all frames have the address of their sender")
		}
		took := replaced.Sub(created)
		t.Logf("the source address was replaced after %s", took)
		if took > time.Second {
			t.Errorf("the plugin hid senders after %s, want at most 1s", took)
		}
		return nil
	})
}

// sources is the time when the first frame arrived at a pod without its sender's address.
type sources struct{ replaced atomic.Pointer[time.Time] }

// observeSources gives the wire an address, and makes it send a datagram to a pod each millisecond. It returns the
// sources of the datagrams.
func (e *testEnv) observeSources(pod *sandbox, from, to string) *sources {
	e.t.Helper()
	var sender net.Conn
	var source net.HardwareAddr
	e.wire.Do(func() error {
		wire, err := net.InterfaceByName("wire")
		if err != nil {
			return err
		}
		source = wire.HardwareAddr
		if err := nstest.ConfigureLink("wire", from+"/16"); err != nil {
			return err
		}
		sender, err = net.Dial("udp4", to+":4789")
		return err
	})
	frames := -1
	e.must("open a packet socket in the pod", pod.do(func() (err error) {
		net1, err := net.InterfaceByName("net1")
		if err != nil {
			return err
		}
		const protocol = unix.ETH_P_IP<<8&0xff00 | unix.ETH_P_IP>>8 // in the order of the network
		if frames, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol); err != nil {
			return err
		}
		return unix.Bind(frames, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: net1.Index})
	}))
	s, file := &sources{}, os.NewFile(uintptr(frames), "frames")
	e.t.Cleanup(func() { _ = sender.Close() })
	go func() {
		defer file.Close()
		for frame := make([]byte, 2048); ; {
			n, _, err := unix.Recvfrom(frames, frame, 0)
			if err != nil {
				return
			}
			if n >= 14 && !bytes.Equal(frame[6:12], source) {
				now := time.Now()
				s.replaced.Store(&now)
				return
			}
		}
	}()
	go sendRegularly(sender)
	return s
}

// podWithAddress returns a pod with a link that has an address.
func (e *testEnv) podWithAddress(name, address string) *sandbox {
	e.t.Helper()
	c := newClaim(name)
	c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
		Source: resourceapi.AllocationConfigSourceClaim, Requests: []string{"nic"},
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driverName, Parameters: apiruntime.RawExtension{Raw: fmt.Appendf(nil,
				`{"apiVersion": "dra-shared.dev/v1alpha1", "kind": "NetworkAttachment", "addresses": [%q]}`, address)},
		}},
	}}
	e.addClaim(c)
	e.must("prepare the claim", e.prepare(e.t.Context(), c))
	pod := e.sandbox(name)
	e.must("attach the claim", pod.hook(e.t.Context(), e.dir, c, 10*time.Second))
	return pod
}

// setMode changes the mode of the pod's link.
func (s *sandbox) setMode(mode netlink.MacvlanMode) error {
	return s.do(func() error {
		link, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		return netlink.LinkSetMacvlanMode(link, mode)
	})
}

// flap sets the pod's link down and up, again and again, until ctx ends.
func (s *sandbox) flap(ctx context.Context) error {
	return s.do(func() error {
		link, err := netlink.LinkByName("net1")
		for err == nil && ctx.Err() == nil {
			if err = netlink.LinkSetDown(link); err == nil {
				err = netlink.LinkSetUp(link)
			}
		}
		return err
	})
}

// flapLink runs flap until the test ends.
func (s *sandbox) flapLink(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- s.flap(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("set the link of pod %s down and up: %v", s.name, err)
		}
	})
}

// arrivals is the time when the last frame of a pod arrived on the wire.
type arrivals struct{ last atomic.Pointer[time.Time] }

// observe gives the wire an address and makes the pod send a datagram to it each
// millisecond. It returns the arrivals of the datagrams.
func (e *testEnv) observe(pod *sandbox, address string) *arrivals {
	e.t.Helper()
	var wire net.PacketConn
	e.wire.Do(func() (err error) {
		if err := nstest.ConfigureLink("wire", address+"/16"); err != nil {
			return err
		}
		wire, err = net.ListenPacket("udp4", address+":4789")
		return err
	})
	var sender net.Conn
	if err := pod.do(func() (err error) {
		sender, err = net.Dial("udp4", address+":4789")
		return err
	}); err != nil {
		e.t.Fatalf("open a socket in the pod: %v", err) // the goroutine below needs the socket
	}
	e.t.Cleanup(func() { _, _ = wire.Close(), sender.Close() })
	a := &arrivals{}
	go func() {
		for buffer := make([]byte, 16); ; {
			if _, _, err := wire.ReadFrom(buffer); err != nil {
				return // the test has closed the socket
			}
			now := time.Now()
			a.last.Store(&now)
		}
	}()
	go sendRegularly(sender)
	a.awaitNext(e.t, time.Time{})
	return a
}

// sendRegularly sends a datagram each millisecond until the socket is closed.
func sendRegularly(sender net.Conn) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for range tick.C {
		// The kernel refuses to send while the network is unreachable.
		if _, err := sender.Write([]byte("frame")); errors.Is(err, net.ErrClosed) {
			return
		}
	}
}

// silence is how long a link must be without frames to count as blocked.
const silence = time.Second

// awaitEnd waits until no frame has arrived for a while, and returns the arrival of the last one.
func (a *arrivals) awaitEnd(t testing.TB) (last time.Time) {
	t.Helper()
	eventually.Eventually(t, timeout, "no frame of the pod arrives", func() error {
		last = *a.last.Load()
		if pause := time.Since(last); pause < silence {
			return fmt.Errorf("the last frame arrived %s ago", pause)
		}
		return nil
	})
	return last
}

// awaitNext waits until a frame has arrived after a time, and returns its arrival.
func (a *arrivals) awaitNext(t testing.TB, after time.Time) (next time.Time) {
	t.Helper()
	eventually.Eventually(t, timeout, "a frame of the pod arrives", func() error {
		last := a.last.Load()
		if last == nil || !last.After(after) {
			return errors.New("no frame has arrived")
		}
		next = *last
		return nil
	})
	return next
}
