// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/test/measure"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.User) }

// newNode returns a Node that manages nics without enforcement.
func newNode(t testing.TB, nics ...netdev.NIC) *netdev.Node {
	t.Helper()
	node, err := netdev.NewNode(netdev.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = node.Close() })
	for _, n := range nics {
		if _, err := node.Manage(netdev.NICConfig{Name: n.Name, Index: n.Index, MAC: n.MAC}); err != nil {
			t.Fatal(err)
		}
	}
	return node
}

func attach(t testing.TB, node *netdev.Node, pod *nstest.Namespace, spec netdev.LinkSpec) netdev.Attachment {
	t.Helper()
	a, err := node.Attach(pod.Pod(), spec)
	if err != nil {
		t.Fatalf("Attach: %v", err)
	}
	return a
}

func read(t testing.TB, node *netdev.Node, a netdev.Attachment) netdev.LinkState {
	t.Helper()
	state, err := node.ReadAndGuard(a)
	if err != nil {
		t.Fatalf("Read: %v", err)
	}
	return state
}

func prefixes(texts ...string) (p []netip.Prefix) {
	for _, text := range texts {
		p = append(p, netip.MustParsePrefix(text))
	}
	return p
}

func mac(n byte) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, n} }

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
func TestNode_Attach_keepsRoutesThatThePodHas(t *testing.T) {
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

func TestNode_Attach_removesRulesIfOneIsRefused(t *testing.T) {
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

func TestNode_Attach_replacesLinkThatHasItsProvisionalName(t *testing.T) {
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

// The kernel gives the ID of a namespace that has ended to another one, in which a link with the same index is
// attached.
func TestNode_Read_linkOfAnotherPodWithSameNamespaceID(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	current := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Bridge})
	ended := current
	ended.MAC, ended.Mode, ended.Cookie = mac(9), netdev.Private, current.Cookie+1
	if got := read(t, node, ended); got.Exists || got.Blocked != "" {
		t.Errorf("Read of an attachment whose namespace has ended returned %+v, want the zero state", got)
	}
	if got, err := node.Presence(ended); got != netdev.NamespaceMissing || err != nil {
		t.Errorf("Presence returned %v and error %v, want %v", got, err, netdev.NamespaceMissing)
	}
	if snapshot, err := node.Snapshot(); err != nil {
		t.Error(err)
	} else if exists, err := snapshot.NamespaceExists(ended); exists || err != nil {
		t.Errorf("the snapshot has its namespace: %t, error %v", exists, err)
	}
	if got := read(t, node, current); !got.Exists {
		t.Errorf("Read of the link returned %+v", got)
	}
	current.Cookie++ // another plugin of the node attached it after the namespace of the other link had ended
	if got, err := node.Presence(current); got != netdev.LinkPresent || err != nil {
		t.Errorf("Presence of a link with its MAC address returned %v and error %v, want %v", got, err, netdev.LinkPresent)
	}
}

func TestNode_Read_showsChangesByPod(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{
		Parent: nic.Index, MAC: mac(1), Mode: netdev.Private,
		Addresses: prefixes("10.20.0.5/24"),
	})
	pod.Do(func() error {
		link, err := netlink.LinkByName(a.Name)
		if err != nil {
			return err
		}
		address, err := netlink.ParseAddr("10.99.0.1/16")
		if err != nil {
			return err
		}
		return errors.Join(
			netlink.LinkSetDown(link),
			netlink.LinkSetHardwareAddr(link, mac(3)),
			netlink.LinkSetMTU(link, 1400),
			netlink.AddrAdd(link, address),
		)
	})
	got := read(t, node, a)
	if got.Up || got.MTU != 1400 || got.MAC.String() != mac(3).String() {
		t.Errorf("Read returned %+v, want a link that is down, with MTU 1400 and address %s", got, mac(3))
	}
	if !slices.Contains(got.Addresses, netip.MustParsePrefix("10.99.0.1/16")) {
		t.Errorf("Read returned addresses %v, want them to contain 10.99.0.1/16", got.Addresses)
	}
}

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

// Two addresses with different peers can have the same local address.
func TestNode_Read_returnsEachAddressOnce(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	pod.Do(func() error {
		link, err := netlink.LinkByName(a.Name)
		for _, peer := range []string{"10.99.0.2/32", "10.99.0.3/32"} {
			address := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 99, 0, 1), Mask: net.CIDRMask(32, 32)}}
			_, address.Peer, _ = net.ParseCIDR(peer)
			err = errors.Join(err, netlink.AddrAdd(link, address))
		}
		return err
	})
	state, err := node.ReadAndGuard(a)
	if want := []netip.Prefix{netip.MustParsePrefix("10.99.0.1/32")}; err != nil || !slices.Equal(state.Addresses, want) {
		t.Errorf("Read returned the addresses %v and error %v, want %v", state.Addresses, err, want)
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

// A pod with CAP_NET_RAW can change the promiscuous mode of its link, and thereby that of the NIC. A pod with
// CAP_NET_ADMIN can make the node reset the broadcast cutoff. If the Node reported such events, the plugin would
// read the state of the node's links again and again.
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

// countLinkEvents counts the events of a link, and those of other links, until the namespace with an ID ends.
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

func TestInventory_List(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	nstest.NIC(t, "mgmt", 1500)
	node := newNode(t, nic)
	attach(t, node, nstest.New(t), netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	nstest.DefaultRoute(t, "mgmt")
	nics, err := netdev.NewInventory("/sys").List()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range nics {
		got = append(got, fmt.Sprintf("%s uplink=%t", n.Name, n.Uplink))
	}
	if diff := cmp.Diff([]string{"mgmt uplink=true", "nic0 uplink=false"}, got); diff != "" {
		t.Errorf("NICs without lo and macvlans (-want +got):\n%s", diff)
	}
}

// uplinks returns the names of the uplinks that the Inventory lists.
func uplinks(t *testing.T, i *netdev.Inventory) (names []string) {
	t.Helper()
	nics, err := i.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nics {
		if n.Uplink {
			names = append(names, n.Name)
		}
	}
	return names
}

func TestInventory_List_followsDefaultRouteThroughStackedLinks(t *testing.T) {
	for _, tc := range []struct {
		name   string
		stack  func(t *testing.T)
		routed string
		want   []string
	}{
		{"a bridge", func(t *testing.T) { nstest.Bridge(t, "br0", "nic0") }, "br0", []string{"br0", "nic0"}},
		{"a VLAN", func(t *testing.T) { nstest.VLAN(t, "nic0", "nic0.100", 100) }, "nic0.100",
			[]string{"nic0", "nic0.100"}},
		{"a bond", func(t *testing.T) { nstest.Bond(t, "bond0", netlink.BOND_MODE_ACTIVE_BACKUP, "nic0", "nic1") },
			"bond0", []string{"bond0", "nic0", "nic1"}},
		{"a bridge on a VLAN on a bond", func(t *testing.T) {
			nstest.Bond(t, "bond0", netlink.BOND_MODE_802_3AD, "nic0")
			nstest.VLAN(t, "bond0", "bond0.100", 100)
			nstest.Bridge(t, "br0", "bond0.100")
		}, "br0", []string{"bond0", "bond0.100", "br0", "nic0"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, name := range []string{"nic0", "nic1", "nic2"} {
				nstest.NIC(t, name, 1500)
			}
			tc.stack(t)
			inventory := netdev.NewInventory("/sys")
			if got := uplinks(t, inventory); got != nil {
				t.Errorf("without a default route, the uplinks are %v, want none", got)
			}
			remove := nstest.DefaultRoute(t, tc.routed)
			if diff := cmp.Diff(tc.want, uplinks(t, inventory)); diff != "" {
				t.Errorf("uplinks with a default route through %s (-want +got):\n%s", tc.routed, diff)
			}
			remove()
			if diff := cmp.Diff(tc.want, uplinks(t, inventory)); diff != "" {
				t.Errorf("uplinks after the default route was removed (-want +got):\n%s", diff)
			}
			next := netdev.NewInventory("/sys")
			next.RememberUplinks(inventory.Uplinks())
			if diff := cmp.Diff(tc.want, uplinks(t, next)); diff != "" {
				t.Errorf("uplinks of the next Inventory (-want +got):\n%s", diff)
			}
		})
	}
}

func TestActiveFeatures(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	features, err := netdev.ActiveFeatures(nic.Index)
	if err != nil {
		t.Fatal(err)
	}
	if !features["tx-checksum-ip-generic"] || features["l2-fwd-offload"] {
		t.Errorf("active features of a veth: %v; want tx-checksum-ip-generic, not l2-fwd-offload", features)
	}
	if _, err := netdev.ActiveFeatures(nic.Index + 1000); !errors.Is(err, unix.ENODEV) {
		t.Errorf("features of a link that does not exist: error %v, want ENODEV", err)
	}
}

func TestMAC(t *testing.T) {
	base := netdev.MAC("claim", "device", "share", "pod", 1)
	if base[0] != 0x02 || len(base) != 6 {
		t.Errorf("MAC returned %s, want a locally administered unicast address", base)
	}
	if again := netdev.MAC("claim", "device", "share", "pod", 1); again.String() != base.String() {
		t.Errorf("MAC returned %s and then %s for the same arguments", base, again)
	}
	for _, other := range []net.HardwareAddr{
		netdev.MAC("claimd", "evice", "share", "pod", 1),
		netdev.MAC("claim", "device", "share", "pod", 2),
		netdev.MAC("claim", "device", "", "sharepod", 1),
	} {
		if other.String() == base.String() {
			t.Errorf("MAC returned %s for different arguments", base)
		}
	}
}

// The driver cannot recreate a link that a running pod has lost, because the
// kernel does not permit this request. See docs/dev/limits.md.
func TestKernel_doesNotSetAddressesByNamespaceID(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private, Name: "data0"})
	conn, err := rtnl.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	refused := netdev.AddressByNamespaceID(conn, a.NSID, a.Index, prefixes("10.20.0.5/16")[0])
	state := read(t, node, a)
	t.Logf("RTM_NEWADDR with IFA_TARGET_NETNSID %d and index %d returned %v; the link has addresses %v",
		a.NSID, a.Index, refused, state.Addresses)
	if len(state.Addresses) > 0 {
		t.Error("this kernel sets addresses by namespace ID: the driver could recreate links that pods have lost")
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
