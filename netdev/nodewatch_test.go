// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

func TestNode_Watch_reportsRemovedNamespace(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node := newNode(t, nic)
	changes := watch(t, node)
	pod := nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	pod.Close()
	changes.expect(t, "the pod's namespace is removed", func(c netdev.Change) bool {
		return slices.Contains(c.NamespacesRemoved, a.NSID)
	})
}

func TestNode_Watch_reportsChangedNamespace(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	changes := watch(t, node)
	changes.expectResync(t)
	pod.Do(func() error {
		link, err := netlink.LinkByName(a.Name)
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(link)
	})
	changes.expect(t, "the pod's namespace changed", func(c netdev.Change) bool {
		return slices.Contains(c.NamespacesChanged, a.NSID)
	})
}

// A pod that changes its addresses in a loop must not occupy the plugin.
func TestNode_Watch_limitsReportsOfNamespaces(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	changes := watch(t, node)
	changes.expectResync(t)
	address, err := netlink.ParseAddr("10.99.0.1/16")
	if err != nil {
		t.Fatal(err)
	}
	const loops = 5000
	start := time.Now()
	pod.Do(func() error {
		link, err := netlink.LinkByName(a.Name)
		for range loops {
			err = errors.Join(err, netlink.AddrAdd(link, address), netlink.AddrDel(link, address))
		}
		return err
	})
	elapsed, reports := time.Since(start), 0
	for range len(changes) {
		if c := <-changes; slices.Contains(c.NamespacesChanged, a.NSID) {
			reports++
		}
	}
	// One report each 100 ms, and those at the beginning and at the end.
	if most := int(elapsed/(100*time.Millisecond)) + 2; reports == 0 || reports > most {
		t.Errorf("%d changes of addresses in %s caused %d reports, want 1 to %d", 2*loops, elapsed, reports, most)
	}
}

// While a pod causes more events than the Node reads, the Node reads few of them, and misses no
// change after the last one.
func TestNode_Watch_pausesWhilePodFloods(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod, other := newNode(t, nic), nstest.New(t), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	quiet := attach(t, node, other, netdev.LinkSpec{Parent: nic.Index, MAC: mac(2), Mode: netdev.Private})
	changes := watch(t, node)
	changes.expectResync(t)
	address, err := netlink.ParseAddr("10.99.0.1/16")
	if err != nil {
		t.Fatal(err)
	}
	const interval, flood = 100 * time.Millisecond, 500 // flood is the number of events in an interval
	// calm are the intervals without a flood, and lastCalm is the number of the last one.
	start, loops, intervals, calm, lastCalm := time.Now(), 0, 0, 0, 0
	pod.Do(func() error {
		link, err := netlink.LinkByName(a.Name)
		for began := start; err == nil && time.Since(start) < 35*interval; began = time.Now() {
			events := 0
			intervals++
			for ; err == nil && time.Since(began) < interval; events += 2 {
				err = errors.Join(netlink.AddrAdd(link, address), netlink.AddrDel(link, address))
				loops++
			}
			if events < 2*flood { // an interval of the Node overlaps two of these
				calm++
				lastCalm = intervals
			}
		}
		return err
	})
	t.Logf("%d loops, %d intervals without a flood", loops, calm)
	reports, missed := 0, 0
	for range len(changes) {
		c := <-changes
		if slices.Contains(c.NamespacesChanged, a.NSID) {
			reports++
		}
		if c.NamespacesMissed {
			missed++
		}
	}
	if perInterval := float64(2*loops) / 35; perInterval < flood {
		t.Skipf("this machine causes %.0f events in 100 ms, fewer than a flood has", perInterval)
	}
	if reports == 0 || reports > 8+calm || missed == 0 {
		t.Errorf("%d loops in 3.5 s caused %d reports of the namespace and %d of missed events, want 1 to %d, and some",
			loops, reports, missed, 8+calm)
	}
	if intervals-lastCalm < 10 {
		t.Skip("the flood paused, so the Node may have reported all namespaces already: is the machine busy?")
	}
	changes.expect(t, "missed events after the flood", func(c netdev.Change) bool { return c.NamespacesMissed })
	changes.expect(t, "all namespaces, because their events were missed", func(c netdev.Change) bool {
		return slices.Contains(c.NamespacesChanged, a.NSID) && slices.Contains(c.NamespacesChanged, quiet.NSID)
	})
	other.Do(func() error {
		link, err := netlink.LinkByName(quiet.Name)
		return errors.Join(err, netlink.AddrAdd(link, address))
	})
	changes.expect(t, "a change after the flood", func(c netdev.Change) bool {
		return slices.Contains(c.NamespacesChanged, quiet.NSID)
	})
}

// A pod with CAP_NET_RAW can change the promiscuous mode of its link, which also changes the NIC's. A pod with
// CAP_NET_ADMIN can make the node reset the broadcast cutoff. If the Node reported such events, the plugin would read
// the state of the node's links again and again.
func TestNode_Watch_ignoresChangesByPodsToNIC(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	nstest.SetDown(t, "nic0") // a NIC that does not filter unicast is otherwise promiscuous while a macvlan is up
	node, pod, other := newNode(t, nic), nstest.New(t), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	ended := attach(t, node, other, netdev.LinkSpec{Parent: nic.Index, MAC: mac(2), Mode: netdev.Private})
	changes := watch(t, node)
	changes.expectResync(t)
	events, err := rtnl.Watch()
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	var toggled, reset int
	var counted sync.WaitGroup
	t.Cleanup(counted.Wait) // if the test fails before
	counted.Go(func() { toggled, reset = countLinkEvents(t, events, nic.Index, ended.NSID) })
	const loops = 50
	for range loops {
		togglePromiscuous(t, pod, a.Name)
		if err := netdev.ResetCutoff(node, nic.Index); err != nil {
			t.Fatal(err)
		}
	}
	other.Close()
	reports := 0
	changes.expect(t, "the end of a namespace, which is the last event", func(c netdev.Change) bool {
		if c.LinksChanged {
			reports++
		}
		return slices.Contains(c.NamespacesRemoved, ended.NSID)
	})
	if reports > 5 { // the first event of a link counts, as do the links of ended namespaces
		t.Errorf("Watch reported %d changes of the node's links, want few", reports)
	}
	if counted.Wait(); toggled < 2*loops || reset < 2*loops {
		t.Errorf("the kernel sent %d events of the NIC and %d of others, want %d of each: does the test attack?",
			toggled, reset, 2*loops)
	}
	if err := nstest.ConfigureLink("nic0"); err != nil { // brings it up
		t.Fatal(err)
	}
	changes.expect(t, "links changed", func(c netdev.Change) bool { return c.LinksChanged })
}

// togglePromiscuous makes a pod's link promiscuous and reverts that, as a program with CAP_NET_RAW can.
func togglePromiscuous(t *testing.T, pod *nstest.Namespace, name string) {
	t.Helper()
	pod.Do(func() error {
		link, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		request := unix.PacketMreq{Ifindex: int32(link.Index), Type: unix.PACKET_MR_PROMISC}
		err = unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &request)
		return errors.Join(err, unix.Close(fd))
	})
}

// countLinkEvents counts the events of a link, and of other links, until the namespace with an ID ends.
func countLinkEvents(t *testing.T, w *rtnl.Watcher, index, nsid int) (own, others int) {
	t.Helper()
	for {
		messages, err := w.Receive()
		if err != nil {
			t.Error(err)
			return own, others
		}
		for _, m := range messages {
			switch isLink := m.Header.Type == unix.RTM_NEWLINK || m.Header.Type == unix.RTM_DELLINK; {
			case m.Header.Type == unix.RTM_DELNSID:
				if id, ok := rtnl.NamespaceIDOf(m.Data); ok && id == nsid {
					return own, others
				}
			case isLink && int(nl.DeserializeIfInfomsg(m.Data).Index) == index:
				own++
			case isLink:
				others++
			}
		}
	}
}

func TestNode_Watch_reportsNewNIC(t *testing.T) {
	changes := watch(t, newNode(t))
	changes.expectResync(t)
	nstest.NIC(t, "nic7", 1500)
	changes.expect(t, "links changed", func(c netdev.Change) bool { return c.LinksChanged })
}

// Some kernels add the ID that a namespace has in itself to its own events.
func TestNode_Watch_reportsNewNICWhenNamespaceHasID(t *testing.T) {
	own, node := nstest.Current(t), newNode(t)
	if id, err := own.Socket.NamespaceID(own.File); err != nil || id < 0 {
		t.Fatalf("NamespaceID of the namespace in itself returned %d and error %v, want an ID", id, err)
	}
	changes := watch(t, node)
	changes.expectResync(t)
	nstest.NIC(t, "nic7", 1500)
	changes.expect(t, "links changed", func(c netdev.Change) bool { return c.LinksChanged })
}

// changes receives the changes that Node.Watch reports.
type changes chan netdev.Change

// watch runs Node.Watch until the test ends.
func watch(t *testing.T, node *netdev.Node) changes {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	c := make(changes, 1000)
	var done sync.WaitGroup
	done.Go(func() {
		if err := node.Watch(ctx, func(change netdev.Change) { c <- change }); err != nil {
			t.Errorf("Watch: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); done.Wait() })
	return c
}

func (c changes) expectResync(t *testing.T) {
	t.Helper()
	c.expect(t, "resync", func(c netdev.Change) bool { return c.Resync })
}

// expect waits for a change that matches; condition describes it.
func (c changes) expect(t *testing.T, condition string, match func(netdev.Change) bool) {
	t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		select {
		case change := <-c:
			if match(change) {
				return
			}
		case <-timeout:
			t.Fatalf("Watch did not report the change within 20 s: %s", condition)
		}
	}
}
