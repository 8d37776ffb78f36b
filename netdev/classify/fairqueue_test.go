// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"net"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// fairShare is a rate that an emulated machine reaches.
const fairShare = 8 * mega

func newFairQueueEnv(t *testing.T) *testEnv {
	t.Helper()
	e := newTestEnv(t, netdev.NICConfig{})
	if q := e.node.Queue(); q != shape.FairQueue {
		t.Skipf("the queues of shares are %s: the kernel does not have %s", q, shape.FairQueue)
	}
	return e
}

// A pod that floods the network keeps its own TCP connections.
func TestFairQueue_dividesShareBetweenFlows(t *testing.T) {
	e := newFairQueueEnv(t)
	p := e.pod(0, 1, hardCap(fairShare), netdev.Private)
	for name, c := range map[string]struct {
		from *nstest.Namespace
		to   string
		flow func(*pod) nstest.Flow
	}{
		"sending":   {p.Namespace, wireIP, e.fromPod},
		"receiving": {e.wire, p.ip, e.toPod},
	} {
		t.Run(name, func(t *testing.T) {
			stop := flood(t, c.from, c.to, 2*fairShare)
			defer stop()
			flow := c.flow(p)
			flow.Duration = 4 * time.Second
			const least = 0.3 // half of the share, without what the connection needs to find its rate
			got := e.measure(flow)[0]
			for tries := 1; got < least*fairShare && tries < attempts(); tries++ {
				got = e.measure(flow)[0]
			}
			if got < least*fairShare {
				t.Errorf("TCP connection next to a flood of datagrams: got %.1f Mbit/s, want at least %.1f of %d Mbit/s",
					got/mega, least*fairShare/mega, fairShare/mega)
			}
		})
	}
}

// flood sends datagrams at a rate in bits per second until stop is called.
func flood(t *testing.T, from *nstest.Namespace, to string, rate int) (stop func()) {
	t.Helper()
	const size, interval = 1000, 10 * time.Millisecond
	var conn net.Conn
	nstest.RunIn(t, from.File, func() (err error) {
		conn, err = net.Dial("udp", net.JoinHostPort(to, "9"))
		return err
	})
	ticker := time.NewTicker(interval)
	var sender sync.WaitGroup
	done := make(chan struct{})
	sender.Go(func() {
		perInterval := rate / 8 / size * int(interval) / int(time.Second)
		for {
			select {
			case <-done:
				return
			case <-ticker.C:
			}
			for range perInterval {
				_, _ = conn.Write(make([]byte, size)) // full queues, and answers that the port is closed
			}
		}
	})
	return func() {
		close(done)
		sender.Wait()
		ticker.Stop()
		_ = conn.Close()
	}
}

// The kernel refuses to change some parameters of a queue, and its kind.
func TestFairQueue_isSetUpRepeatedly(t *testing.T) {
	e := newFairQueueEnv(t)
	first := e.pod(0, 1, hardCap(fairShare), netdev.Private)
	e.expectQueues(t, 0)
	if err := e.node.Restore(first.attachment, hardCap(2*fairShare)); err != nil {
		t.Fatalf("Restore with another rate: %v", err)
	}
	e.pod(0, 2, hardCap(2*fairShare), netdev.Private)
	e.expectQueues(t, 0)
	ifb, err := netlink.LinkByName(shape.IFBName(e.nic.Name))
	if err != nil {
		t.Fatal(err)
	}
	previous := shape.New(nstest.Current(t).Socket, nil) // sets up FIFOs, because it has tried nothing
	setFIFO := func() {
		err := previous.SetClass(e.nic.Index, ifb.Attrs().Index, shape.OneTree, e.config.Rates,
			shape.FirstMinor+1, hardCap(fairShare))
		if err != nil {
			t.Fatalf("set up the FIFO of a previous release: %v", err)
		}
	}
	setFIFO()
	e.pod(1, 3, hardCap(fairShare), netdev.Private)
	e.expectQueues(t, 1)
	setFIFO()
}

// expectQueues fails the test unless a share has one queue on the NIC and one on its IFB
// device, both fair.
func (e *testEnv) expectQueues(t *testing.T, share int) {
	t.Helper()
	for _, name := range []string{e.nic.Name, shape.IFBName(e.nic.Name)} {
		link, err := netlink.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		qdiscs, err := netlink.QdiscList(link)
		if err != nil {
			t.Fatal(err)
		}
		var kinds []string
		for _, q := range qdiscs {
			if q.Attrs().Parent == netlink.MakeHandle(shape.Major, uint16(shape.FirstMinor+share)) {
				kinds = append(kinds, q.Type())
			}
		}
		if len(kinds) != 1 || kinds[0] != string(shape.FairQueue) {
			t.Errorf("queues of share %d on %s: got %q, want one %s", share, name, kinds, shape.FairQueue)
		}
	}
}
