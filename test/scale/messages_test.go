// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package scale_test

import (
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// operations are what the plugin does with one share, or with a NIC.
var operations = []struct {
	name string
	// most is the number of messages that the operation may send and receive.
	most rtnl.Counts
	do   func(n *testNode, pod *nstest.Namespace, a *netdev.Attachment) error
}{
	{"attach", rtnl.Counts{Sent: 11, Received: 12}, attachShare},
	{"read", rtnl.Counts{Sent: 5, Received: 11}, readShare},
	{"presence", rtnl.Counts{Sent: 1, Received: 1}, func(n *testNode, _ *nstest.Namespace, a *netdev.Attachment) error {
		_, err := n.Presence(*a)
		return err
	}},
	// Eight requests are for the classes of the senders of multicast.
	{"manage", rtnl.Counts{Sent: 22, Received: 44}, func(n *testNode, _ *nstest.Namespace, _ *netdev.Attachment) error {
		_, err := n.Manage(n.config())
		return err
	}},
	{"traffic", rtnl.Counts{Sent: 3, Received: 6}, func(n *testNode, _ *nstest.Namespace, _ *netdev.Attachment) error {
		_, err := n.Traffic(n.nic.Index)
		return err
	}},
	{"orphan IFBs", rtnl.Counts{Sent: 2, Received: 4}, func(n *testNode, _ *nstest.Namespace, _ *netdev.Attachment) error {
		_, err := n.OrphanIFBs()
		return err
	}},
	{"detach", rtnl.Counts{Sent: 2, Received: 2}, func(n *testNode, _ *nstest.Namespace, a *netdev.Attachment) error {
		return n.Detach(*a)
	}},
}

func attachShare(n *testNode, pod *nstest.Namespace, a *netdev.Attachment) (err error) {
	*a, err = n.Attach(pod.Pod(), n.spec(len(n.attached)))
	return err
}

func readShare(n *testNode, _ *nstest.Namespace, a *netdev.Attachment) error {
	_, err := n.ReadAndBlock(*a)
	return err
}

func TestNode_messages_doNotDependOnShareCount(t *testing.T) {
	node := newTestNode(t)
	first := map[string]rtnl.Counts{}
	for _, shares := range []int{10, 3000} {
		node.fill(shares)
		pod, a := nstest.New(t), netdev.Attachment{}
		for _, o := range operations {
			var err error
			got := node.messages(pod, func() { err = o.do(node, pod, &a) })
			if err != nil {
				t.Fatalf("%s with %d shares: %v", o.name, shares, err)
			}
			if _, known := first[o.name]; !known {
				first[o.name] = got
				t.Logf("%s: %d sent, %d received", o.name, got.Sent, got.Received)
			}
			if got != first[o.name] {
				t.Errorf("%s with %d shares: %+v messages, with 10 shares %+v", o.name, shares, got, first[o.name])
			}
			if got.Sent > o.most.Sent || got.Received > o.most.Received {
				t.Errorf("%s with %d shares: %+v messages, want at most %+v", o.name, shares, got, o.most)
			}
		}
	}
}

func TestHTB_Owned_whenLinkHasNeverBeenUp(t *testing.T) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "ifb-down"
	ifb := &netlink.Ifb{LinkAttrs: attrs}
	if err := netlink.LinkAdd(ifb); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(ifb) })
	if owned, err := shape.New(nstest.Current(t).Socket, nil).Owned(ifb.Attrs().Index); owned || err != nil {
		t.Errorf("Owned returned %t and error %v, want false", owned, err)
	}
}

func TestNode_Snapshot_takesOneDumpPerDevice(t *testing.T) {
	node := newTestNode(t)
	pod := nstest.New(t)
	for _, shares := range []int{10, 100, 1000} {
		node.fill(shares)
		var differ int
		ids := namespaces(t) // some may end in the meantime
		got := node.messages(pod, func() { differ = node.compare() })
		if differ != 0 {
			t.Errorf("%d of %d shares differ from what was set up", differ, shares)
		}
		// The IDs of the namespaces, and the classes of the NIC and of its IFB device. Besides the classes of shares, a
		// device has a few for the node, and the IFB device has classes for multicast senders. The answer to a dump ends with
		// a separate message.
		const classesOfNode, classesOfSenders = 8, 8
		most := rtnl.Counts{Sent: 3, Received: uint64(2*(shares+classesOfNode+1) + classesOfSenders + ids + 1)}
		if got.Sent > most.Sent || got.Received > most.Received {
			t.Errorf("comparing %d shares: %+v messages, want at most %+v", shares, got, most)
		}
	}
	if err := node.RemoveClass(node.nic.Index, node.attached[500].Minor); err != nil {
		t.Fatal(err)
	}
	if differ := node.compare(); differ != 1 {
		t.Errorf("%d shares differ after the class of one was removed, want 1", differ)
	}
}

// The plugin inspects each NIC twice per second.
func TestNode_Inspect_allocatesNothingPerShare(t *testing.T) {
	node := newTestNode(t)
	const shares, most = 300, 60
	node.fill(shares)
	got := testing.AllocsPerRun(3, func() {
		if unknown, _, err := node.Inspect(node.nic.Index); err != nil || len(unknown) > 0 {
			t.Errorf("Inspect found %v, error %v", unknown, err)
		}
	})
	if got > most {
		t.Errorf("inspecting a NIC with %d shares allocates %.0f objects, want at most %d", shares, got, most)
	}
}

// A pod that sets its link down and up in a loop must not make the node list the links of all namespaces.
func TestNode_Inspect_linkThatWasDown(t *testing.T) {
	node := newTestNode(t)
	node.fill(300)
	pod := nstest.New(t)
	spec := node.spec(300)
	spec.Name = "net1"
	a := node.attach(pod, spec)
	setLink := func(set func(netlink.Link) error) {
		pod.Do(func() error {
			link, err := netlink.LinkByName("net1")
			if err != nil {
				return err
			}
			return set(link)
		})
	}
	setLink(netlink.LinkSetDown)
	if err := node.UpdateBlocking(a); err != nil {
		t.Fatal(err)
	}
	setLink(netlink.LinkSetUp) // and the node has not read the event yet
	got := node.messages(pod, func() {
		if unknown, _, err := node.Inspect(node.nic.Index); err != nil || len(unknown) > 0 {
			t.Errorf("Inspect found %v, error %v", unknown, err)
		}
	})
	if got.Sent > 3 {
		t.Errorf("Inspect sent %d requests, want two for the addresses of the NIC and one for the link", got.Sent)
	}
}

// namespaces returns the number of namespaces that have an ID.
func namespaces(t *testing.T) int {
	t.Helper()
	ids, err := nstest.Current(t).Socket.NamespaceIDs()
	if err != nil {
		t.Fatal(err)
	}
	return len(ids)
}
