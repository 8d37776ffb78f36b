// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package shape

import (
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

func TestTrees_home(t *testing.T) {
	for _, tc := range []struct {
		trees Trees
		want  []int // of the shares, from FirstMinor
	}{
		{OneTree, []int{0, 0, 0, 0}},
		{1, []int{0, 0, 0, 0}},
		{2, []int{0, 1, 0, 1, 0, 1}},
		{3, []int{0, 1, 2, 1, 0, 1, 2, 1}},
		{4, []int{0, 1, 2, 3, 0, 1, 2, 3}},
		{6, []int{0, 1, 2, 3, 4, 5, 2, 3, 0}},
		{16, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0}},
	} {
		var got []int
		for i := range tc.want {
			got = append(got, tc.trees.home(FirstMinor+uint16(i)))
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%d trees: the homes are %v, want %v", tc.trees, got, tc.want)
		}
		if home := tc.trees.home(UnidentifiedMinor); home != 0 {
			t.Errorf("%d trees: the base classes are at home in queue %d, want 0", tc.trees, home)
		}
	}
}

// A NIC that loses queues moves only the shares of those.
func TestTrees_home_staysIfQueueRemains(t *testing.T) {
	for many := Trees(1); many <= MaxTrees; many++ {
		for few := Trees(1); few <= many; few++ {
			for minor := uint16(FirstMinor); minor < FirstMinor+3000; minor++ {
				before, after := many.home(minor), few.home(minor)
				if after >= int(few) || before < int(few) && before != after {
					t.Fatalf("share %#x: home %d of %d queues, and %d of %d", minor, before, many, after, few)
				}
			}
		}
	}
}

func TestTrees_Class(t *testing.T) {
	for _, tc := range []struct {
		trees Trees
		minor uint16
		want  uint32
	}{
		{OneTree, FirstMinor + 5, 0x0d5a0015},
		{OneTree, UnidentifiedMinor, 0x0d5a0004},
		{4, FirstMinor, 0x5d500010},
		{4, FirstMinor + 5, 0x5d510015},
		{4, UnidentifiedMinor, 0x5d500004},
		{MaxTrees, FirstMinor + 15, 0x5d5f001f},
	} {
		got := tc.trees.Class(tc.minor)
		if got != tc.want {
			t.Errorf("%d trees: class %#x is %#x, want %#x", tc.trees, tc.minor, got, tc.want)
		}
		if isShare(got) != (tc.minor >= FirstMinor) {
			t.Errorf("class %#x: isShare returns %t", got, isShare(got))
		}
	}
}

func TestIsShare(t *testing.T) {
	for class, want := range map[uint32]bool{
		netlink.MakeHandle(0x5d60, FirstMinor):       false, // of another owner
		netlink.MakeHandle(mqMajor, 1):               false,
		netlink.MakeHandle(queueMajor, classNode):    false,
		netlink.MakeHandle(queueMajor+1, classStray): false,
		netlink.MakeHandle(queueMajor+15, 0xd59):     true,
	} {
		if got := isShare(class); got != want {
			t.Errorf("class %s: isShare returns %t, want %t", netlink.HandleStr(class), got, want)
		}
	}
}

// The kernel identifies a qdisc by its major number, and an HTB qdisc needs its default class.
func TestNICRates_base_perQueue(t *testing.T) {
	l := NICRates{Line: 1000 * mega, Reserve: 100 * mega, Forwarded: Rates{Floor: 50 * mega, Ceil: 1000 * mega}}
	for _, trees := range []Trees{1, 2, MaxTrees} {
		classes := append(l.base(trees), l.share(trees, FirstMinor, Rates{Floor: mega, Ceil: mega}),
			l.share(trees, FirstMinor+1, Rates{Floor: mega, Ceil: mega}))
		handles, leaves := map[uint32]bool{}, map[uint16]bool{}
		for _, c := range classes {
			if handles[c.handle()] {
				t.Errorf("%d trees: class %s is there twice", trees, netlink.HandleStr(c.handle()))
			}
			handles[c.handle()] = true
			if c.parent != 0 && !handles[netlink.MakeHandle(c.major, c.parent)] {
				t.Errorf("%d trees: class %s comes before its parent %x", trees, netlink.HandleStr(c.handle()), c.parent)
			}
			for _, major := range []uint16{c.minor, c.minor + fairQueueMajor} {
				if c.queue > 0 && (leaves[major] || major >= queueMajor || major == mqMajor || major == Major) {
					t.Errorf("%d trees: class %s has a leaf qdisc with the number %x of another",
						trees, netlink.HandleStr(c.handle()), major)
				}
				leaves[major] = c.queue > 0
			}
		}
		for queue := range int(trees) {
			if !handles[netlink.MakeHandle(trees.major(queue), defaultMinor(queue))] {
				t.Errorf("%d trees: queue %d has no default class", trees, queue)
			}
		}
	}
}

// The rates that shares can be granted, and the rates of the other classes, add up to the line.
func TestNICRates_sumOfQueuesIsAtMostLine(t *testing.T) {
	l := NICRates{Line: 1000 * mega, Reserve: 100 * mega, Forwarded: Rates{Floor: 50 * mega, Ceil: 1000 * mega}}
	const trees Trees = 4
	sum := uint64(0)
	for _, c := range l.base(trees) {
		switch {
		case c.minor == classNode || c.parent == classRoot && c.major != trees.major(0):
			sum += c.ceil
		case c.minor != classRoot && c.parent != classNode:
			t.Errorf("class %s is not below the class for what does not belong to shares", netlink.HandleStr(c.handle()))
		}
	}
	const grant = 850 * mega / 8
	for i := range 8 {
		share := l.share(trees, FirstMinor+uint16(i), Rates{Floor: grant, Ceil: l.Line})
		sum += share.ceil
	}
	if most := l.Line + uint64(trees-1)*bitsPerByte; sum > most {
		t.Errorf("the classes can send %d bit/s, want at most %d", sum, most)
	}
}

func TestTreesRequests(t *testing.T) {
	const dev = 7
	htb := func(parent uint32, major uint16) string {
		return "add " + netlink.HandleStr(netlink.MakeHandle(major, 0)) + " to " + netlink.HandleStr(parent)
	}
	queue := func(n uint16) string { return htb(netlink.MakeHandle(mqMajor, n+1), queueMajor+n) }
	remove := func(n uint16) string {
		return "remove " + netlink.HandleStr(netlink.MakeHandle(queueMajor+n, 0)) + " from " +
			netlink.HandleStr(netlink.MakeHandle(mqMajor, n+1))
	}
	mq := htb(netlink.HANDLE_ROOT, mqMajor)
	for _, tc := range []struct {
		name    string
		trees   Trees
		present uint
		want    []string
	}{
		{"one tree", OneTree, 0, []string{htb(netlink.HANDLE_ROOT, Major)}},
		{"one tree instead of several", OneTree, 0b11, []string{htb(netlink.HANDLE_ROOT, Major)}},
		{"new", 2, 0, []string{mq, queue(0), queue(1)}},
		{"present", 2, 0b11, nil},
		{"interrupted", 3, 0b1, []string{queue(1), queue(2)}},
		{"one was removed", 3, 0b101, []string{queue(1)}},
		{"fewer", 1, 0b111, []string{remove(1), remove(2)}},
	} {
		var got []string
		for _, r := range treesRequests(dev, tc.trees, tc.present) {
			msg := nl.DeserializeTcMsg(r.Data[0].Serialize())
			text := "add " + netlink.HandleStr(msg.Handle) + " to " + netlink.HandleStr(msg.Parent)
			if r.Type == unix.RTM_DELQDISC {
				text = "remove " + netlink.HandleStr(msg.Handle) + " from " + netlink.HandleStr(msg.Parent)
			}
			if msg.Ifindex != dev {
				t.Errorf("%s: a request is for link %d", tc.name, msg.Ifindex)
			}
			got = append(got, text)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}
