// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package shape_test

import (
	"net"
	"testing"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.User) }

const mega = 1_000_000

func nicRates() shape.NICRates {
	return shape.NICRates{Line: 1000 * mega, Reserve: 100 * mega, MinShare: mega}
}

// env is a NIC with four transmit queues.
type env struct {
	*testing.T
	htb *shape.HTB
	nic netdev.NIC
	ifb int
}

func newEnv(t *testing.T) *env {
	t.Helper()
	nic, _ := nstest.NICWithQueues(t, "nic0", 1500, 4)
	return &env{T: t, htb: shape.New(nstest.Current(t).Socket, nil), nic: nic}
}

func (e *env) setup(trees shape.Trees) {
	e.Helper()
	var err error
	if e.ifb, err = e.htb.Setup(e.nic.Name, e.nic.Index, trees, nicRates(), false); err != nil {
		e.Fatalf("Setup with %d trees: %v", trees, err)
	}
	intact, err := e.htb.Intact(e.nic.Name, e.nic.Index, e.ifb, trees, nicRates())
	if err != nil || !intact {
		e.Errorf("Intact after Setup with %d trees returned %t and error %v", trees, intact, err)
	}
	for _, other := range []shape.Trees{shape.OneTree, 1, 2, 3, 4} {
		intact, err := e.htb.Intact(e.nic.Name, e.nic.Index, e.ifb, other, nicRates())
		if err != nil || intact != (other == trees) {
			e.Errorf("Intact for %d trees of %d returned %t and error %v", other, trees, intact, err)
		}
	}
}

func (e *env) expectTreesInUse(want shape.Trees, inUse bool) {
	e.Helper()
	trees, used, err := e.htb.TreesInUse(e.nic.Name, e.nic.Index)
	if err != nil || trees != want || used != inUse {
		e.Errorf("TreesInUse returned %d, %t, and error %v, want %d and %t", trees, used, err, want, inUse)
	}
}

// Frames of the kernel itself, which no program classifies, would come to the queues of the IFB device.
func TestHTB_Setup_givesIFBNoAddress(t *testing.T) {
	e := newEnv(t)
	e.setup(4)
	ifb, err := net.InterfaceByIndex(e.ifb)
	if err != nil {
		t.Fatal(err)
	}
	if addresses, err := ifb.Addrs(); err != nil || len(addresses) > 0 {
		t.Errorf("the addresses of %s are %v (error %v), want none", ifb.Name, addresses, err)
	}
}

// The steps are in one test, because each begins with the state that the last one left.
func TestHTB_Setup_changesTrees(t *testing.T) {
	e := newEnv(t)
	e.expectTreesInUse(shape.OneTree, false)
	for _, trees := range []shape.Trees{4, 4, 2, 4, 1, shape.OneTree, shape.OneTree, 3} {
		e.setup(trees)
		e.setup(trees)
		rates := shape.Rates{Floor: mega, Ceil: mega}
		for minor := uint16(shape.FirstMinor); minor < shape.FirstMinor+6; minor++ {
			for range 2 {
				if err := e.htb.SetClass(e.nic.Index, e.ifb, trees, nicRates(), minor, rates); err != nil {
					t.Fatalf("%d trees: SetClass: %v", trees, err)
				}
			}
			for _, dev := range []int{e.nic.Index, e.ifb} {
				got, err := e.htb.ReadClass(dev, trees.Class(minor))
				if err != nil || got == nil || got.Rates != rates {
					t.Errorf("%d trees: ReadClass returned %v and error %v, want %v", trees, got, err, rates)
				}
				all, err := e.htb.ShareClasses(dev)
				if _, listed := all[trees.Class(minor)]; err != nil || !listed {
					t.Errorf("%d trees: ShareClasses returned %v and error %v, want share %#x", trees, all, err, minor)
				}
			}
		}
		e.expectTreesInUse(trees, true)
		for minor := uint16(shape.FirstMinor); minor < shape.FirstMinor+6; minor++ {
			if err := e.htb.RemoveClass(trees.Class(minor), e.nic.Index, e.ifb); err != nil {
				t.Fatalf("%d trees: RemoveClass: %v", trees, err)
			}
		}
		e.expectTreesInUse(shape.OneTree, false)
	}
	if err := e.htb.Teardown(e.nic.Name, e.nic.Index); err != nil {
		t.Fatal(err)
	}
	if owned, err := e.htb.Owned(e.nic.Index); err != nil || owned {
		t.Errorf("Owned after Teardown returned %t and error %v, want false", owned, err)
	}
}

// Setup repairs what another program removed, and keeps the classes of other queues.
func TestHTB_Setup_keepsOtherTrees(t *testing.T) {
	const trees = 4
	e := newEnv(t)
	e.setup(trees)
	rates := shape.Rates{Floor: mega, Ceil: mega}
	for minor := uint16(shape.FirstMinor); minor < shape.FirstMinor+trees; minor++ {
		if err := e.htb.SetClass(e.nic.Index, e.ifb, trees, nicRates(), minor, rates); err != nil {
			t.Fatal(err)
		}
	}
	e.setup(2)
	e.setup(trees)
	classes, err := e.htb.ShareClasses(e.nic.Index)
	if err != nil || len(classes) != 2 {
		t.Errorf("ShareClasses returned %v and error %v, want those of the first two queues", classes, err)
	}
}

// A share costs as many messages with a tree per queue as with one, and with many other shares as alone.
func TestHTB_SetClass_messagesDoNotDependOnTreesOrShares(t *testing.T) {
	e := newEnv(t)
	conn := nstest.Current(t).Socket
	e.htb = shape.New(conn, nil)
	costs := map[rtnl.Counts]bool{}
	for _, trees := range []shape.Trees{shape.OneTree, 4} {
		e.setup(trees)
		for minor := uint16(shape.FirstMinor); minor < shape.FirstMinor+100; minor++ {
			before := conn.Counts()
			rates := shape.Rates{Floor: mega, Ceil: mega}
			if err := e.htb.SetClass(e.nic.Index, e.ifb, trees, nicRates(), minor, rates); err != nil {
				t.Fatal(err)
			}
			after := conn.Counts()
			costs[rtnl.Counts{Sent: after.Sent - before.Sent, Received: after.Received - before.Received}] = true
		}
	}
	if len(costs) != 1 {
		t.Errorf("the numbers of messages for a share are %v, want the same for all", costs)
	}
}
