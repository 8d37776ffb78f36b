// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/measure"
)

func TestNode_Attach_createsLinkFromSpec(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 9000)
	node, pod := newNode(t, nic), nstest.New(t)

	a := attach(t, node, pod, netdev.LinkSpec{
		Parent: nic.Index, Name: "data0", MAC: mac(1), MTU: 4000, Mode: netdev.Private,
		Addresses: prefixes("10.20.0.5/24", "fd00::5/64"),
		Routes: []netdev.Route{
			{Destination: netip.MustParsePrefix("10.30.0.0/16"), Gateway: netip.MustParseAddr("10.20.0.1")},
			{Destination: netip.MustParsePrefix("fd01::/64"), Gateway: netip.MustParseAddr("fd00::1")},
			{Destination: netip.MustParsePrefix("10.40.0.0/16")},
		},
		Alias: "pod default/a",
	})

	got := read(t, node, a)
	slices.SortFunc(got.Addresses, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	want := netdev.LinkState{
		Exists: true, Name: "data0", MAC: mac(1), MTU: 4000, Up: true,
		Addresses: prefixes("10.20.0.5/24", "fd00::5/64"),
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("link state in the kernel (-want +got):\n%s", diff)
	}
	pod.Do(func() error {
		link, err := netlink.LinkByName("data0")
		if err != nil {
			return err
		}
		macvlan, ok := link.(*netlink.Macvlan)
		if !ok || link.Attrs().Alias != "pod default/a" || macvlan.Mode != netlink.MACVLAN_MODE_PRIVATE {
			t.Errorf("got link %+v, want a private macvlan with alias %q", link, "pod default/a")
		}
		for _, dst := range []string{"10.30.0.0/16", "10.40.0.0/16", "fd01::/64"} {
			if !hasRoute(t, link, dst) {
				t.Errorf("route to %s is missing in the pod", dst)
			}
		}
		return nil
	})
}

// The links of a pod on one network have the same routes of pools.
func TestNode_Attach_keepsExistingRoutesOfPod(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	// No address of the link is in the network of the second gateway.
	for n, gateway := range []string{"10.20.0.1", "169.254.1.1"} {
		attach(t, node, pod, netdev.LinkSpec{
			Parent: nic.Index, Name: fmt.Sprintf("data%d", n), MAC: mac(byte(n)), Mode: netdev.Private,
			Addresses: prefixes(fmt.Sprintf("10.20.0.%d/24", 5+n), fmt.Sprintf("fd00::%d/64", 5+n)),
			Routes: []netdev.Route{
				{Destination: netip.MustParsePrefix("10.30.0.0/16"), Gateway: netip.MustParseAddr(gateway), Optional: true},
				{Destination: netip.MustParsePrefix("fd01::/64"), Gateway: netip.MustParseAddr("fd00::1"), Optional: true},
				{Destination: netip.MustParsePrefix(fmt.Sprintf("10.4%d.0.0/16", n)), Gateway: netip.MustParseAddr(gateway)},
			},
		})
	}
	pod.Do(func() error {
		for name, want := range map[string][]bool{"data0": {true, true, true, false}, "data1": {false, false, false, true}} {
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			for i, destination := range []string{"10.30.0.0/16", "fd01::/64", "10.40.0.0/16", "10.41.0.0/16"} {
				if got := hasRoute(t, link, destination); got != want[i] {
					t.Errorf("%s has a route to %s: %t, want %t", name, destination, got, want[i])
				}
			}
		}
		return nil
	})
}

func TestNode_Attach_addsTablesRulesAndNeighbors(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	spec := netdev.LinkSpec{
		Parent: nic.Index, Name: "data0", MAC: mac(1), Mode: netdev.Private,
		Addresses: prefixes("10.20.0.5/24", "fd00::5/64"),
		Routes: []netdev.Route{
			{Destination: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.20.0.1"), Table: 100},
			{Destination: netip.MustParsePrefix("::/0"), Gateway: netip.MustParseAddr("fd00::1"), Table: 1000},
		},
		Rules: []netdev.Rule{
			{Table: 100, Priority: 90},
			{Source: netip.MustParsePrefix("10.20.0.0/16"), Destination: netip.MustParsePrefix("10.50.0.0/16"), Table: 1000,
				Priority: 80},
		},
		Neighbors: []netdev.Neighbor{
			{Address: netip.MustParseAddr("10.20.0.1"), MAC: mac(9)}, {Address: netip.MustParseAddr("fd00::1"), MAC: mac(9)},
		},
	}
	// The rules of an interrupted attempt are left over.
	for range 2 {
		attach(t, node, pod, spec)
	}
	pod.Do(func() error {
		var got []string
		rules, err := netlink.RuleList(netlink.FAMILY_ALL)
		for _, r := range rules {
			if r.Table == 100 || r.Table == 1000 {
				got = append(got, fmt.Sprintf("from %v to %v table %d", r.Src, r.Dst, r.Table))
			}
		}
		slices.Sort(got)
		want := []string{
			"from 10.20.0.0/16 to 10.50.0.0/16 table 1000", "from 10.20.0.5/32 to <nil> table 100",
			"from fd00::5/128 to <nil> table 100",
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("rules (-want +got):\n%s", diff)
		}
		return err
	})
	pod.Do(func() error {
		link, err := netlink.LinkByName("data0")
		if err != nil {
			return err
		}
		for table, family := range map[int]int{100: netlink.FAMILY_V4, 1000: netlink.FAMILY_V6} {
			filter := &netlink.Route{Table: table}
			routes, err := netlink.RouteListFiltered(family, filter, netlink.RT_FILTER_TABLE)
			if err != nil || len(routes) != 1 || routes[0].LinkIndex != link.Attrs().Index {
				t.Errorf("table %d has the routes %v, %v, want one through data0", table, routes, err)
			}
		}
		neighbors, err := netlink.NeighList(link.Attrs().Index, netlink.FAMILY_ALL)
		permanent := 0
		for _, n := range neighbors {
			if n.State == netlink.NUD_PERMANENT && n.HardwareAddr.String() == mac(9).String() {
				permanent++
			}
		}
		if permanent != 2 {
			t.Errorf("got neighbors %v, want two permanent ones", neighbors)
		}
		return err
	})
}

func TestNode_Attach_removesRulesAfterFailure(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	_, err := node.Attach(pod.Pod(), netdev.LinkSpec{
		Parent: nic.Index, Name: "data0", MAC: mac(1), Mode: netdev.Private,
		Rules: []netdev.Rule{
			{Source: netip.MustParsePrefix("10.20.0.0/16"), Table: 100, Priority: 90},
			// The kernel refuses a destination of another family.
			{Source: netip.MustParsePrefix("10.21.0.0/16"), Destination: netip.MustParsePrefix("fd00::/64"), Table: 100,
				Priority: 90},
		},
	})
	if err == nil || !strings.Contains(err.Error(), "policy rule from 10.21.0.0/16 to fd00::/64 to table 100") {
		t.Errorf("got error %v, want one that names the rule", err)
	}
	pod.Do(func() error {
		rules, err := netlink.RuleList(netlink.FAMILY_V4)
		for _, r := range rules {
			if r.Table == 100 {
				t.Errorf("rule %v is left over", r)
			}
		}
		return err
	})
}

// hasRoute reports whether the current namespace has a route to dst through link.
func hasRoute(t *testing.T, link netlink.Link, dst string) bool {
	t.Helper()
	routes, err := netlink.RouteList(link, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Dst != nil && r.Dst.String() == dst })
}

func TestNode_Attach_choosesLowestFreeName(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	var names []string
	for _, name := range []string{"", "net2", "", ""} {
		spec := netdev.LinkSpec{Parent: nic.Index, Name: name, MAC: mac(byte(len(names))), Mode: netdev.Private}
		names = append(names, attach(t, node, pod, spec).Name)
	}
	if diff := cmp.Diff([]string{"net1", "net2", "net3", "net4"}, names); diff != "" {
		t.Errorf("names of the links (-want +got):\n%s", diff)
	}
}

func TestNode_Attach_ignoresLinkOfSameNameOnNode(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	nstest.NIC(t, "net1", 1400)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	if link := pod.Interface("net1"); link == nil || link.Index != a.Index || link.MTU != 1500 {
		t.Errorf("net1 in the pod is %+v, want index %d of the attachment and MTU 1500", link, a.Index)
	}
}

func TestNode_Attach_replacesLinkOfInterruptedAttempt(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node := newNode(t, nic)
	for i, tc := range []struct {
		name string
		// interrupt leaves what an attempt that was interrupted may leave.
		interrupt func(pod *nstest.Namespace, spec netdev.LinkSpec) error
	}{
		{"after all", func(pod *nstest.Namespace, spec netdev.LinkSpec) error {
			_, err := node.Attach(pod.Pod(), spec)
			return err
		}},
		{"and the link has been renamed", func(pod *nstest.Namespace, spec netdev.LinkSpec) error {
			a, err := node.Attach(pod.Pod(), spec)
			if err != nil {
				return err
			}
			pod.Do(func() error { // before Linux 6.2, the kernel renames only links that are down
				link, err := netlink.LinkByName(a.Name)
				if err != nil {
					return err
				}
				configure := netdev.ConfigureRequest(a.Index, "other", spec)
				return errors.Join(netlink.LinkSetDown(link), pod.Socket.Do(configure), netlink.LinkSetUp(link))
			})
			return nil
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pod := nstest.New(t)
			spec := netdev.LinkSpec{
				Parent: nic.Index, Name: "net1", MAC: mac(byte(i)), Mode: netdev.Private,
				Addresses: prefixes("10.20.0.5/24"),
			}
			if err := tc.interrupt(pod, spec); err != nil {
				t.Fatal(err)
			}
			attach(t, node, pod, spec)
			pod.Do(func() error {
				links, err := netlink.LinkList()
				if len(links) != 2 || links[1].Attrs().Name != "net1" {
					t.Errorf("the pod has %d links, %+v: want lo and net1", len(links), links)
				}
				return err
			})
		})
	}
}

func TestNode_Attach_replacesLinkWithProvisionalName(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private}) // net1
	spec := netdev.LinkSpec{Parent: nic.Index, MAC: mac(2), Mode: netdev.Private}
	leftover := netdev.CreateRequest(spec, spec.Mode, netdev.ProvisionalName(spec.MAC), int(pod.File.Fd()))
	if err := nstest.Current(t).Socket.Do(leftover); err != nil {
		t.Fatal(err)
	}
	if a := attach(t, node, pod, spec); a.Name != "net2" || pod.Interface(netdev.ProvisionalName(spec.MAC)) != nil {
		t.Errorf("the link has the name %s, want net2 and no link of the interrupted attempt", a.Name)
	}
}

func TestNode_Attach_errors(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node := newNode(t, nic)
	for _, tc := range []struct {
		name string
		spec netdev.LinkSpec
		want string
	}{
		{
			name: "the MTU is larger than the NIC's",
			spec: netdev.LinkSpec{Parent: nic.Index, MTU: 9000},
			want: "is mtu 9000 larger than the NIC's?",
		},
		{
			name: "the pod has a link of that name",
			spec: netdev.LinkSpec{Parent: nic.Index, Name: "lo"},
			want: "the pod already has an interface lo: choose another interfaceName",
		},
		{
			name: "the gateway is unreachable",
			spec: netdev.LinkSpec{Parent: nic.Index, Routes: []netdev.Route{
				{Destination: netip.MustParsePrefix("10.9.0.0/16"), Gateway: netip.MustParseAddr("10.8.0.1")},
			}},
			want: "route to 10.9.0.0/16 via 10.8.0.1: network is unreachable",
		},
		{
			name: "an address is given twice",
			spec: netdev.LinkSpec{Parent: nic.Index, Addresses: prefixes("10.20.0.5/24", "10.20.0.5/24")},
			want: "address 10.20.0.5/24: file exists",
		},
		{
			name: "the pod has the route through another link",
			spec: netdev.LinkSpec{Parent: nic.Index, Addresses: prefixes("10.20.0.5/24"), Routes: []netdev.Route{
				{Destination: netip.MustParsePrefix("10.9.0.0/16"), Optional: true}, // added after the others
				{Destination: netip.MustParsePrefix("10.8.0.0/16")}, {Destination: netip.MustParsePrefix("10.8.0.0/16")},
			}},
			want: "route to 10.8.0.0/16: file exists: the pod already has this route, from its cluster network or another link",
		},
		{
			name: "the MTU is too small for IPv6",
			spec: netdev.LinkSpec{Parent: nic.Index, MTU: 1000, Addresses: prefixes("10.20.0.5/24", "fd00::5/64")},
			want: "address fd00::5/64: invalid argument: is the MTU of the link at least 1280, which IPv6 needs?",
		},
		{
			name: "the NIC is not managed",
			spec: netdev.LinkSpec{Parent: nic.Index + 1000},
			want: "NIC is not managed",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pod := nstest.New(t)
			tc.spec.MAC, tc.spec.Mode = mac(7), netdev.Private
			_, err := node.Attach(pod.Pod(), tc.spec)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("Attach returned error %v, want one that contains %q", err, tc.want)
			}
			if link := pod.Interface("net1"); link != nil {
				t.Errorf("the failed Attach left link %s in the pod", link.Name)
			}
		})
	}
}

// A NIC has macvlans or ipvlans.
func TestNode_Attach_namesIPVLANOnNIC(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	nstest.IPVLAN(t, "nic0", "ipvlan0")
	node, pod := newNode(t, nic), nstest.New(t)
	_, err := node.Attach(pod.Pod(), netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	want := "does another driver use the NIC (a bridge, ipvlan)?"
	if !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), want) {
		t.Errorf("Attach returned error %v, want EBUSY and %q", err, want)
	}
}

func TestNode_Attach_rejectsMACOfAnotherPod(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node := newNode(t, nic)
	spec := netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private}
	attach(t, node, nstest.New(t), spec)
	_, err := node.Attach(nstest.New(t).Pod(), spec)
	if !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("Attach returned %v, want EADDRINUSE", err)
	}
}

func TestNode_Detach_isIdempotent(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	for range 2 {
		if err := node.Detach(a); err != nil {
			t.Fatalf("Detach: %v", err)
		}
	}
	if link := pod.Interface(a.Name); link != nil {
		t.Errorf("link %s still exists after Detach", link.Name)
	}
	if state := read(t, node, a); state.Exists {
		t.Errorf("Read after Detach returned %+v, want a link that does not exist", state)
	}
}

// The kernel reuses namespace IDs, and interface indexes are small numbers, so
// an old attachment may identify a link of another pod, except for the MAC
// address.
func TestNode_Detach_keepsLinkWithAnotherMAC(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	old := a
	old.MAC = mac(9)
	if err := node.Detach(old); err != nil {
		t.Fatalf("Detach: %v", err)
	}
	if pod.Interface(a.Name) == nil {
		t.Error("Detach deleted the link of another pod")
	}
}

// The kernel waits for about 20 ms after it has deleted a link. The pods of a node often end
// together, and other pods start meanwhile.
func TestNode_detachInParallel(t *testing.T) {
	const links = 16
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node := newNode(t, nic)
	next := 0
	attachments := func() (attached []netdev.Attachment) {
		for range links {
			next++
			spec := netdev.LinkSpec{Parent: nic.Index, MAC: net.HardwareAddr{2, 0, 0, 0, 0, byte(next)}, Mode: netdev.Private}
			attached = append(attached, attach(t, node, nstest.New(t), spec))
		}
		return attached
	}
	detach := func(parallel int) time.Duration {
		attached := attachments()
		start := time.Now()
		err := measure.InParallel(parallel, links, func(i int) error { return node.Detach(attached[i]) })
		if err != nil {
			t.Fatal(err)
		}
		return time.Since(start)
	}
	var ratio float64
	for range 5 { // the kernel may have much to do for other tests
		alone, together := detach(1), detach(links)
		if ratio = float64(together) / float64(alone); ratio < 0.6 {
			return
		}
	}
	t.Errorf("detaching %d links in parallel takes %.2f times as long as one after the other, want less than 0.6",
		links, ratio)
}

// Linux 6.18 lists only the namespaces that fit into one message, about 1,160. This test is the last
// one of the file, because the kernel removes the namespaces long after the test has ended, and removes no
// others meanwhile.
func TestNode_manyNamespaces(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node := newNode(t, nic)
	own := nstest.Current(t).Socket
	last := 0
	for range 1300 {
		var err error
		if last, err = own.NamespaceID(nstest.New(t).File); err != nil {
			t.Fatal(err)
		}
	}
	pod := nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	links, err := node.Links()
	if err != nil || !links[netdev.NewLinkKey(nic.Index, mac(1))] {
		t.Errorf("Links returned %v and error %v, want the link of the pod", links, err)
	}
	snapshot, err := node.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	if exists, err := snapshot.NamespaceExists(a); err != nil || !exists {
		t.Errorf("NamespaceExists returned %t and error %v, want true", exists, err)
	}
	pod.Do(func() error {
		link, err := netlink.LinkByName(a.Name)
		return errors.Join(err, netlink.LinkDel(link))
	})
	if presence, err := node.Presence(a); err != nil || presence != netdev.LinkMissing {
		t.Errorf("Presence after the pod removed its link returned %d and error %v, want %d",
			presence, err, netdev.LinkMissing)
	}
	a.NSID = last + 100
	if presence, err := node.Presence(a); err != nil || presence != netdev.NamespaceMissing {
		t.Errorf("Presence in no namespace returned %d and error %v, want %d", presence, err, netdev.NamespaceMissing)
	}
	if exists, err := snapshot.NamespaceExists(a); err != nil || exists {
		t.Errorf("NamespaceExists for no namespace returned %t and error %v, want false", exists, err)
	}
}
