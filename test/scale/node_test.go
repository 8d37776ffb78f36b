// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package scale_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.Root) }

// linksPerPod is the number of links in each pod that only fills the node. The kernel
// creates many links in one namespace faster than one link in each of many.
const linksPerPod = 100

// testNode is a node with one NIC of 100 Gbit/s and enforced bandwidth.
type testNode struct {
	*netdev.Node
	t        testing.TB
	nic      netdev.NIC
	crowd    *nstest.Namespace
	attached []netdev.Attachment
	// floor and ifbIndex are for benchmarks.
	floor    *rtnl.Conn
	ifbIndex int
}

func newTestNode(t testing.TB) *testNode {
	t.Helper()
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, err := netdev.NewNode(netdev.Options{BPFFS: nstest.MountBPFFS(t)})
	if err != nil {
		t.Fatal(err)
	}
	n := &testNode{Node: node, t: t, nic: nic}
	t.Cleanup(func() {
		if _, err := node.Unmanage(nic.Name, nic.Index); err != nil {
			t.Error(err)
		}
		_ = node.Close()
	})
	if _, err := node.Manage(n.config()); err != nil {
		t.Fatal(err)
	}
	return n
}

func (n *testNode) config() netdev.NICConfig {
	return netdev.NICConfig{
		Name: n.nic.Name, Index: n.nic.Index, MAC: n.nic.MAC, Enforce: true,
		Rates: shape.NICRates{Line: 100e9, Reserve: 1e9, MinShare: 1e6},
	}
}

// rates are the rates of every share.
var rates = shape.Rates{Floor: 10e6, Ceil: 10e6}

// spec returns the link of a share. Shares are numbered from 0.
func (n *testNode) spec(share int) netdev.LinkSpec {
	mac := append(net.HardwareAddr{2, 0}, binary.BigEndian.AppendUint32(nil, uint32(share))...)
	address := netip.AddrFrom4([4]byte{10, 30, byte(share / 250), byte(1 + share%250)})
	return netdev.LinkSpec{
		Parent: n.nic.Index, MAC: mac, Mode: netdev.Private,
		Addresses: []netip.Prefix{netip.PrefixFrom(address, 16)},
		Minor:     uint16(shape.FirstMinor + share), Rates: rates, SegmentBytes: shape.SegmentBytes(rates.Ceil, 1500),
	}
}

// fill attaches shares until the node has count of them.
func (n *testNode) fill(count int) {
	n.t.Helper()
	for share := len(n.attached); share < count; share++ {
		if share%linksPerPod == 0 {
			n.crowd = nstest.New(n.t)
		}
		spec := n.spec(share)
		spec.Name = fmt.Sprintf("net%d", share)
		n.attached = append(n.attached, n.attach(n.crowd, spec))
	}
}

func (n *testNode) attach(pod *nstest.Namespace, spec netdev.LinkSpec) netdev.Attachment {
	n.t.Helper()
	a, err := n.Attach(pod.Pod(), spec)
	if err != nil {
		n.t.Fatal(err)
	}
	return a
}

// compare returns how many of the shares differ in a Snapshot from what was set up.
func (n *testNode) compare() (differ int) {
	n.t.Helper()
	snapshot, err := n.Snapshot()
	if err != nil {
		n.t.Fatal(err)
	}
	for _, a := range n.attached {
		send, receive, err := snapshot.Rates(a)
		if err != nil {
			n.t.Fatal(err)
		}
		exists, err := snapshot.NamespaceExists(a)
		if err != nil {
			n.t.Fatal(err)
		}
		if !exists || send == nil || *send != rates || receive == nil || *receive != rates {
			differ++
		}
	}
	return differ
}

// messages returns how many netlink messages f sends and receives through the sockets
// of the node and of a pod.
func (n *testNode) messages(pod *nstest.Namespace, f func()) rtnl.Counts {
	n.t.Helper()
	sum := func() rtnl.Counts {
		node, inPod := n.Messages(), pod.Socket.Counts()
		return rtnl.Counts{Sent: node.Sent + inPod.Sent, Received: node.Received + inPod.Received}
	}
	before := sum()
	f()
	after := sum()
	return rtnl.Counts{Sent: after.Sent - before.Sent, Received: after.Received - before.Received}
}
