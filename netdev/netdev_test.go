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
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.User) }

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

func prefixes(texts ...string) (p []netip.Prefix) {
	for _, text := range texts {
		p = append(p, netip.MustParsePrefix(text))
	}
	return p
}

func mac(n byte) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, n} }

func TestALinkIsMadeInThePodAsAskedFor(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 9000)
	node, pod := newNode(t, nic), nstest.New(t)

	a, err := node.Attach(pod.Pod(), netdev.LinkSpec{
		Parent: nic.Index, Name: "data0", MAC: mac(1), MTU: 4000, Mode: netdev.Private,
		Addresses: prefixes("10.20.0.5/24", "fd00::5/64"),
		Routes: []netdev.Route{
			{Destination: netip.MustParsePrefix("10.30.0.0/16"), Gateway: netip.MustParseAddr("10.20.0.1")},
			{Destination: netip.MustParsePrefix("fd01::/64"), Gateway: netip.MustParseAddr("fd00::1")},
			{Destination: netip.MustParsePrefix("10.40.0.0/16")},
		},
		Alias: "who it is for",
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := node.Read(a)
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(got.Addresses, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	want := netdev.LinkState{Exists: true, Name: "data0", MAC: mac(1), MTU: 4000, Up: true, Carrier: true, Addresses: prefixes("10.20.0.5/24", "fd00::5/64")}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("the link as the kernel has it (-want +got):\n%s", diff)
	}
	pod.Do(func() error {
		link, err := netlink.LinkByName("data0")
		if err != nil {
			return err
		}
		macvlan, ok := link.(*netlink.Macvlan)
		if !ok || link.Attrs().Alias != "who it is for" || macvlan.Mode != netlink.MACVLAN_MODE_PRIVATE {
			t.Errorf("alias %q, link %+v", link.Attrs().Alias, link)
		}
		for _, dst := range []string{"10.30.0.0/16", "10.40.0.0/16", "fd01::/64"} {
			if !hasRoute(t, link, dst) {
				t.Errorf("no route to %s", dst)
			}
		}
		return nil
	})
}

func hasRoute(t *testing.T, link netlink.Link, dst string) bool {
	t.Helper()
	routes, err := netlink.RouteList(link, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Dst != nil && r.Dst.String() == dst })
}

func TestTheLowestFreeNameIsTaken(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	var names []string
	for _, name := range []string{"", "net2", "", ""} {
		a, err := node.Attach(pod.Pod(), netdev.LinkSpec{Parent: nic.Index, Name: name, MAC: mac(byte(len(names))), Mode: netdev.Private})
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, a.Name)
	}
	if diff := cmp.Diff([]string{"net1", "net2", "net3", "net4"}, names); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
}

func TestANamesakeOnTheNodeIsNotMistakenForTheLink(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	nstest.NIC(t, "net1", 1400)
	node, pod := newNode(t, nic), nstest.New(t)
	a, err := node.Attach(pod.Pod(), netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	if err != nil {
		t.Fatal(err)
	}
	if link := pod.Interface("net1"); link == nil || link.Index != a.Index || link.MTU != 1500 {
		t.Errorf("the pod's net1 is %+v, the attachment says index %d", link, a.Index)
	}
}

func TestALinkOfAnAttemptThatWasCutOffIsReplaced(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	spec := netdev.LinkSpec{Parent: nic.Index, Name: "net1", MAC: mac(1), Mode: netdev.Private, Addresses: prefixes("10.20.0.5/24")}
	for range 2 {
		if _, err := node.Attach(pod.Pod(), spec); err != nil {
			t.Fatal(err)
		}
	}
	pod.Do(func() error {
		links, err := netlink.LinkList()
		if len(links) != 2 { // lo and net1
			t.Errorf("the pod has %d links, want 2: %v", len(links), links)
		}
		return err
	})
}

func TestARefusalSaysWhatToCheckAndLeavesNothing(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node := newNode(t, nic)
	for _, tc := range []struct {
		name string
		spec netdev.LinkSpec
		want string
	}{
		{"mtu above the NIC's", netdev.LinkSpec{Parent: nic.Index, MTU: 9000}, "is mtu 9000 larger than the NIC's?"},
		{"a name that is taken", netdev.LinkSpec{Parent: nic.Index, Name: "lo"}, "the pod has an interface lo already: choose another interfaceName"},
		{"a gateway that is nowhere", netdev.LinkSpec{Parent: nic.Index, Routes: []netdev.Route{{Destination: netip.MustParsePrefix("10.9.0.0/16"), Gateway: netip.MustParseAddr("10.8.0.1")}}},
			"route to 10.9.0.0/16 by 10.8.0.1: network is unreachable"},
		{"an address twice", netdev.LinkSpec{Parent: nic.Index, Addresses: prefixes("10.20.0.5/24", "10.20.0.5/24")}, "address 10.20.0.5/24: file exists"},
		{"a NIC that is not ours", netdev.LinkSpec{Parent: nic.Index + 1000}, "NIC is not managed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pod := nstest.New(t)
			tc.spec.MAC, tc.spec.Mode = mac(7), netdev.Private
			_, err := node.Attach(pod.Pod(), tc.spec)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got error %v, want one with %q", err, tc.want)
			}
			if link := pod.Interface("net1"); link != nil {
				t.Errorf("%s is left", link.Name)
			}
		})
	}
}

func TestAnAddressThatAnotherPodHoldsIsRefused(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node := newNode(t, nic)
	spec := netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private}
	if _, err := node.Attach(nstest.New(t).Pod(), spec); err != nil {
		t.Fatal(err)
	}
	_, err := node.Attach(nstest.New(t).Pod(), spec)
	if !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("got %v, want EADDRINUSE", err)
	}
}

func TestDetachRemovesTheLinkAndIsIdempotent(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a, err := node.Attach(pod.Pod(), netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := node.Detach(a); err != nil {
			t.Fatal(err)
		}
	}
	if link := pod.Interface(a.Name); link != nil {
		t.Errorf("%s is still there", link.Name)
	}
	if state, err := node.Read(a); err != nil || state.Exists {
		t.Errorf("Read after Detach: %+v, %v", state, err)
	}
}

// The ID of a namespace is given to another when the first is gone; indexes of
// links are small numbers. An old attachment must not reach another pod's link.
func TestDetachSparesTheLinkOfAPodThatTookTheNamespaceID(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a, err := node.Attach(pod.Pod(), netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	if err != nil {
		t.Fatal(err)
	}
	old := a
	old.MAC = mac(9)
	if err := node.Detach(old); err != nil {
		t.Fatal(err)
	}
	if pod.Interface(a.Name) == nil {
		t.Error("the link of another pod was deleted")
	}
}

func TestReadFollowsWhatThePodDoesToItsLink(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a, err := node.Attach(pod.Pod(), netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private, Addresses: prefixes("10.20.0.5/24")})
	if err != nil {
		t.Fatal(err)
	}
	pod.Do(func() error {
		link, err := netlink.LinkByName(a.Name)
		if err != nil {
			return err
		}
		address, err := netlink.ParseAddr("10.99.0.1/16")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetDown(link), netlink.LinkSetHardwareAddr(link, mac(3)), netlink.LinkSetMTU(link, 1400), netlink.AddrAdd(link, address))
	})
	got, err := node.Read(a)
	if err != nil {
		t.Fatal(err)
	}
	if got.Up || got.MTU != 1400 || got.MAC.String() != mac(3).String() || !slices.Contains(got.Addresses, netip.MustParsePrefix("10.99.0.1/16")) {
		t.Errorf("read back %+v", got)
	}
}

func TestWatchTellsOfPodsThatChangeAndGo(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node := newNode(t, nic)
	changes := watch(t, node)
	pod := nstest.New(t)
	a, err := node.Attach(pod.Pod(), netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	if err != nil {
		t.Fatal(err)
	}
	pod.Close()
	changes.await(t, func(c netdev.Change) bool { return slices.Contains(c.NamespacesRemoved, a.NSID) })
}

func TestWatchTellsOfWhatAPodDoesToItsLink(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a, err := node.Attach(pod.Pod(), netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private})
	if err != nil {
		t.Fatal(err)
	}
	changes := watch(t, node)
	changes.await(t, func(c netdev.Change) bool { return c.Resync })
	pod.Do(func() error {
		link, err := netlink.LinkByName(a.Name)
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(link)
	})
	changes.await(t, func(c netdev.Change) bool { return slices.Contains(c.NamespacesChanged, a.NSID) })
}

func TestWatchTellsOfNICs(t *testing.T) {
	changes := watch(t, newNode(t))
	changes.await(t, func(c netdev.Change) bool { return c.Resync })
	nstest.NIC(t, "nic7", 1500)
	changes.await(t, func(c netdev.Change) bool { return c.LinksChanged })
}

type changes chan netdev.Change

func watch(t *testing.T, node *netdev.Node) changes {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	c := make(changes, 1000)
	var done sync.WaitGroup
	done.Go(func() {
		if err := node.Watch(ctx, func(change netdev.Change) { c <- change }); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); done.Wait() })
	return c
}

func (c changes) await(t *testing.T, match func(netdev.Change) bool) {
	t.Helper()
	timeout := time.After(10 * time.Second)
	for {
		select {
		case change := <-c:
			if match(change) {
				return
			}
		case <-timeout:
			t.Fatal("no such change was announced")
		}
	}
}

func TestInventoryKnowsTheDefaultRouteAndLeavesOutWhatIsOnTopOfOthers(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	nstest.NIC(t, "mgmt", 1500)
	node := newNode(t, nic)
	if _, err := node.Attach(nstest.New(t).Pod(), netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private}); err != nil {
		t.Fatal(err)
	}
	mgmt, err := netlink.LinkByName("mgmt")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: mgmt.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}}); err != nil {
		t.Fatal(err)
	}
	nics, err := netdev.NewInventory("/sys").List()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range nics {
		got = append(got, fmt.Sprintf("%s default=%t", n.Name, n.DefaultRoute))
	}
	if diff := cmp.Diff([]string{"mgmt default=true", "nic0 default=false"}, got); diff != "" {
		t.Errorf("NICs (-want +got):\n%s", diff)
	}
}

func TestMACIsStableAndKeepsInputsApart(t *testing.T) {
	base := netdev.MAC("claim", "device", "share", "pod", 1)
	if base[0] != 0x02 || len(base) != 6 {
		t.Errorf("%s is not a locally administered unicast address", base)
	}
	if again := netdev.MAC("claim", "device", "share", "pod", 1); again.String() != base.String() {
		t.Errorf("%s, then %s", base, again)
	}
	for _, other := range []net.HardwareAddr{
		netdev.MAC("claimd", "evice", "share", "pod", 1), netdev.MAC("claim", "device", "share", "pod", 2), netdev.MAC("claim", "device", "", "sharepod", 1),
	} {
		if other.String() == base.String() {
			t.Errorf("%s twice", base)
		}
	}
}

// Why a link that its pod has lost is not made anew while the pod runs: see
// docs/dev/limits.md.
func TestAddressesCannotBeSetByNamespaceID(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a, err := node.Attach(pod.Pod(), netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private, Name: "data0"})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := rtnl.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	refused := netdev.AddressByNamespaceID(conn, a.NSID, a.Index, prefixes("10.20.0.5/16")[0])
	state, err := node.Read(a)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("RTM_NEWADDR with IFA_TARGET_NETNSID %d, index %d: %v; the link has %v", a.NSID, a.Index, refused, state.Addresses)
	if len(state.Addresses) > 0 {
		t.Error("this kernel can set addresses by namespace ID: links that pods have lost can be made anew")
	}
}
