// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// parseNet parses a network, which may be a default route's.
func parseNet(t *testing.T, text string) *net.IPNet {
	t.Helper()
	_, network, err := net.ParseCIDR(text)
	if err != nil {
		t.Fatal(err)
	}
	return network
}

// bridge creates a bridge with an IPv4 address: routes could not have a gateway without it. The bridge does not have an
// IPv6 address, so the kernel does not cause events of its own.
func bridge(t *testing.T, name, address string) {
	t.Helper()
	const generation = "net/ipv6/conf/default/addr_gen_mode"
	if err := nstest.SetSysctl(generation, "1"); err != nil {
		t.Fatal(err)
	}
	nstest.Bridge(t, name)
	if err := nstest.SetSysctl(generation, "0"); err != nil {
		t.Fatal(err)
	}
	if err := nstest.ConfigureLink(name, address); err != nil {
		t.Fatal(err)
	}
}

// route returns a route through a link of the test's own namespace, in the main table. It has a gateway unless that
// is "".
func route(t *testing.T, link, destination, gateway string) *netlink.Route {
	t.Helper()
	found, err := netlink.LinkByName(link)
	if err != nil {
		t.Fatal(err)
	}
	r := &netlink.Route{LinkIndex: found.Attrs().Index, Dst: parseNet(t, destination)}
	if gateway != "" {
		r.Gw, r.Flags = net.ParseIP(gateway), int(netlink.FLAG_ONLINK)
	}
	return r
}

// addRoute adds a route, which ends with the test.
func addRoute(t *testing.T, r *netlink.Route) {
	t.Helper()
	if err := netlink.RouteAdd(r); err != nil {
		t.Fatalf("add route %v: %v", r, err)
	}
	t.Cleanup(func() { _ = netlink.RouteDel(r) }) // the test may have deleted it, or its link
}

// expectNoLinksChangedBeforeEnd ends a namespace, and fails the test if Watch reports changes of links before that.
func (c changes) expectNoLinksChangedBeforeEnd(t *testing.T, namespace *nstest.Namespace) {
	t.Helper()
	id, err := nstest.Current(t).Socket.NamespaceID(namespace.File)
	if err != nil {
		t.Fatal(err)
	}
	namespace.Close()
	c.expect(t, "the end of a namespace, which is the last event", func(c netdev.Change) bool {
		if c.LinksChanged {
			t.Errorf("Watch reported %+v, want no change of links", c)
		}
		return slices.Contains(c.NamespacesRemoved, id)
	})
}

// Routing daemons and network plugins of Kubernetes may add and remove thousands of routes.
func TestNode_Watch_reportsOnlyRelevantRoutes(t *testing.T) {
	bridge(t, "br0", "198.51.100.1/32")
	end, changes := nstest.New(t), watch(t, newNode(t))
	changes.expectResync(t)
	others := []*netlink.Route{
		route(t, "br0", "0.0.0.0/1", ""), route(t, "br0", "128.0.0.0/1", "192.0.2.1"), route(t, "br0", "::/1", ""),
	}
	for _, destination := range []string{"0.0.0.0/0", "::/0"} {
		inTable := route(t, "br0", destination, "")
		inTable.Table = 1000
		others = append(others, inTable)
	}
	for i := range 100 {
		others = append(others,
			route(t, "br0", fmt.Sprintf("10.%d.0.0/16", i), ""), route(t, "br0", fmt.Sprintf("2001:db8:%x::/48", i), ""))
	}
	for _, r := range others {
		addRoute(t, r)
	}
	for _, r := range others {
		if err := netlink.RouteDel(r); err != nil {
			t.Fatal(err)
		}
	}
	changes.expectNoLinksChangedBeforeEnd(t, end)
	for _, destination := range []string{"0.0.0.0/0", "::/0"} {
		r := route(t, "br0", destination, "")
		addRoute(t, r)
		changes.expect(t, "a default route was added", func(c netdev.Change) bool { return c.LinksChanged })
		if err := netlink.RouteDel(r); err != nil {
			t.Fatal(err)
		}
		changes.expect(t, "a default route was removed", func(c netdev.Change) bool { return c.LinksChanged })
	}
}

func TestInventory_List_readsDefaultRoutesOfMainTable(t *testing.T) {
	for name, tc := range map[string]struct {
		routes func(t *testing.T) []*netlink.Route
		want   []string
	}{
		"IPv6": {func(t *testing.T) []*netlink.Route {
			return []*netlink.Route{route(t, "br0", "::/0", "fe80::1")}
		}, []string{"br0"}},
		"several hops": {func(t *testing.T) []*netlink.Route {
			one, other := route(t, "br0", "0.0.0.0/0", "192.0.2.1"), route(t, "br1", "0.0.0.0/0", "192.0.2.2")
			return []*netlink.Route{{Dst: one.Dst, MultiPath: []*netlink.NexthopInfo{
				{LinkIndex: one.LinkIndex, Gw: one.Gw, Flags: one.Flags},
				{LinkIndex: other.LinkIndex, Gw: other.Gw, Flags: other.Flags},
			}}}
		}, []string{"br0", "br1"}},
		"another table": {func(t *testing.T) []*netlink.Route {
			r := route(t, "br0", "0.0.0.0/0", "")
			r.Table = 1000
			return []*netlink.Route{r}
		}, nil},
		"a half": {func(t *testing.T) []*netlink.Route {
			return []*netlink.Route{route(t, "br0", "0.0.0.0/1", "")}
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			bridge(t, "br0", "198.51.100.1/32")
			bridge(t, "br1", "198.51.100.2/32")
			for _, r := range tc.routes(t) {
				addRoute(t, r)
			}
			if diff := cmp.Diff(tc.want, uplinks(t, netdev.NewInventory("/sys"))); diff != "" {
				t.Errorf("uplinks (-want +got):\n%s", diff)
			}
		})
	}
}

func TestNodeAddresses_gateways(t *testing.T) {
	bridge(t, "br0", "198.51.100.1/32")
	bridge(t, "br1", "198.51.100.2/32")
	for i := range 3 {
		addRoute(t, route(t, "br0", fmt.Sprintf("10.%d.0.0/16", i), "192.0.2.1"))
	}
	addRoute(t, route(t, "br0", "2001:db8:1::/48", "fe80::1"))
	addRoute(t, route(t, "br1", "10.9.0.0/16", "192.0.2.9"))
	one, other := route(t, "br0", "10.10.0.0/16", "192.0.2.2"), route(t, "br1", "10.10.0.0/16", "192.0.2.8")
	addRoute(t, &netlink.Route{Dst: one.Dst, MultiPath: []*netlink.NexthopInfo{
		{LinkIndex: one.LinkIndex, Gw: one.Gw, Flags: one.Flags},
		{LinkIndex: other.LinkIndex, Gw: other.Gw, Flags: other.Flags},
	}})
	got, err := netdev.NodeAddresses(netdev.NICConfig{Index: one.LinkIndex})
	if err != nil {
		t.Fatal(err)
	}
	got = slices.DeleteFunc(got, netip.Addr.IsLoopback)
	want := []string{"192.0.2.1", "192.0.2.2", "198.51.100.1", "198.51.100.2", "fe80::1"}
	if diff := cmp.Diff(want, texts(got)); diff != "" {
		t.Errorf("addresses of the node without those of the loopback interface (-want +got):\n%s", diff)
	}
}

func texts(addresses []netip.Addr) (texts []string) {
	for _, a := range addresses {
		texts = append(texts, a.String())
	}
	return texts
}
