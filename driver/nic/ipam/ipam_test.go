// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
	"github.com/dra-shared/dra-driver-shared/driver/lock"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

const waitTimeout = 20 * time.Second

// testNode is a node with its records, which survive its plugins.
type testNode struct {
	t    *testing.T
	api  *fakeAPI
	name string
	zone string
	dir  string

	mu      sync.Mutex
	records map[ipam.Owner]ipam.Assignment
	// unreadable are the names of records that cannot be read.
	unreadable []string
	// claimed are the addresses that prepared claims name.
	claimed map[ipam.Address]bool
	lost    ipam.Lost // nil until OnLost was called
}

func newNode(t *testing.T, api *fakeAPI, name string) *testNode {
	t.Helper()
	return &testNode{t: t, api: api, name: name, dir: t.TempDir(), records: map[ipam.Owner]ipam.Assignment{}}
}

// plugin starts a plugin of the node. It stops with ctx.
func (n *testNode) plugin(ctx context.Context, instance string, wait time.Duration) *ipam.Allocator {
	n.t.Helper()
	return n.pluginWith(ctx, instance, wait, n.api)
}

// pluginWith starts a plugin of the node with an API server. It stops with ctx.
func (n *testNode) pluginWith(
	ctx context.Context, instance string, wait time.Duration, api ipam.API,
) *ipam.Allocator {
	n.t.Helper()
	a, stopped := n.start(ctx, instance, wait, api)
	n.t.Cleanup(stopped)
	return a
}

// start starts a plugin of the node with an API server. It stops with ctx; stopped waits for that.
func (n *testNode) start(
	ctx context.Context, instance string, wait time.Duration, api ipam.API,
) (a *ipam.Allocator, stopped func()) {
	n.t.Helper()
	locks, err := lock.Open(filepath.Join(n.dir, "locks"))
	if err != nil {
		n.t.Fatal(err)
	}
	a = ipam.New(ipam.Options{
		Node: n.name, Instance: instance, API: api, Locks: locks,
		LastPluginFile: filepath.Join(n.dir, "last-plugin"), Wait: wait, OnLost: n.onLost,
		NodeLabels: func(context.Context) (map[string]string, error) { return map[string]string{"zone": n.zone}, nil },
	})
	var group sync.WaitGroup
	group.Go(func() { a.Run(ctx, n.used) })
	return a, group.Wait
}

func (n *testNode) used() (ipam.Used, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	used := ipam.Used{Owners: map[ipam.Address]ipam.Owner{}, Unreadable: n.unreadable, Claimed: maps.Clone(n.claimed)}
	for owner, assignment := range n.records {
		for _, p := range assignment.Addresses {
			used.Owners[ipam.Address{Network: "storage", IP: p.Addr()}] = owner
		}
	}
	return used, nil
}

func (n *testNode) onLost(lost ipam.Lost) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lost = lost
}

// knowsLost reports whether the node knows which addresses it has lost.
func (n *testNode) knowsLost() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lost != nil
}

// notLost returns the addresses in the records of the node that it has not lost.
func (n *testNode) notLost() (addresses []netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, assignment := range n.records {
		for _, p := range assignment.Addresses {
			if _, lost := n.lost[ipam.Address{Network: "storage", IP: p.Addr()}]; !lost {
				addresses = append(addresses, p.Addr())
			}
		}
	}
	return addresses
}

// awaitLost waits until the node knows that it has lost these addresses, and no other.
func (n *testNode) awaitLost(want ipam.Lost) {
	n.t.Helper()
	condition := fmt.Sprintf("node %s knows the addresses that it has lost", n.name)
	eventually.Eventually(n.t, waitTimeout, condition, func() error {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.lost == nil || !maps.Equal(n.lost, want) {
			return fmt.Errorf("got %v, want %v", n.lost, want)
		}
		return nil
	})
}

func owner(i int) ipam.Owner {
	return ipam.Owner{
		Claim: fmt.Sprint("claim", i), Share: "nic", Namespace: uint64(i), Pod: fmt.Sprint("default/p", i),
	}
}

// assign assigns an address of each pool to an attachment and records it.
func (n *testNode) assign(ctx context.Context, a *ipam.Allocator, i int, pools ...string) (ipam.Assignment, error) {
	return n.request(ctx, a, i, ipam.Request{Pools: pools})
}

// assignReserved assigns a reserved address to an attachment and records it.
func (n *testNode) assignReserved(ctx context.Context, a *ipam.Allocator, i int, ip string) (ipam.Assignment, error) {
	return n.request(ctx, a, i, ipam.Request{Network: "storage", Reserved: []netip.Addr{netip.MustParseAddr(ip)}})
}

func (n *testNode) request(ctx context.Context, a *ipam.Allocator, i int, r ipam.Request) (ipam.Assignment, error) {
	var assigned ipam.Assignment
	r.PodNamespace, r.Owner = "default", owner(i)
	err := a.Assign(ctx, r, n.used,
		func(as ipam.Assignment) error {
			n.mu.Lock()
			defer n.mu.Unlock()
			assigned = as
			n.records[owner(i)] = as
			return nil
		})
	return assigned, err
}

// damage makes the record of an attachment unreadable, and returns its address.
func (n *testNode) damage(i int) netip.Addr {
	n.mu.Lock()
	defer n.mu.Unlock()
	address := n.records[owner(i)].Addresses[0].Addr()
	delete(n.records, owner(i))
	n.unreadable = append(n.unreadable, fmt.Sprint("record-", i))
	return address
}

// removeDamaged removes all records that cannot be read.
func (n *testNode) removeDamaged() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.unreadable = nil
}

// release removes the record of an attachment, and its addresses.
func (n *testNode) release(a *ipam.Allocator, i int) {
	n.mu.Lock()
	assigned := n.records[owner(i)]
	delete(n.records, owner(i))
	n.mu.Unlock()
	for _, p := range assigned.Addresses {
		a.Release(owner(i), ipam.Address{Network: "storage", IP: p.Addr()})
	}
}

func addressPool(name string, change func(*network.AddressPoolSpec)) network.AddressPool {
	p := network.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       network.AddressPoolSpec{Network: "storage", Subnet: "10.20.0.0/16", BlockSize: ptr.To(int32(16))},
	}
	if change != nil {
		change(&p.Spec)
	}
	return p
}

func TestAssign_takesABlockForManyAddresses(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) {
		s.Gateway, s.Routes = "10.20.0.1", []string{"10.30.0.0/16"}
		s.Nameservers = []string{"192.0.2.53"}
	}))
	node := newNode(t, api, "n1")
	a := node.plugin(t.Context(), "p1", time.Second)
	seen := map[netip.Prefix]bool{}
	for i := range 10 {
		got, err := node.assign(t.Context(), a, i, "office")
		if err != nil {
			t.Fatal(err)
		}
		if len(got.Addresses) != 1 || got.Addresses[0].Bits() != 16 || seen[got.Addresses[0]] {
			t.Fatalf("attachment %d: got %v, want one unused address with prefix length 16", i, got.Addresses)
		}
		seen[got.Addresses[0]] = true
		if len(got.Routes) != 1 || got.Routes[0].Gateway != netip.MustParseAddr("10.20.0.1") {
			t.Errorf("attachment %d: got routes %v, want that of the pool", i, got.Routes)
		}
		if want := []netip.Addr{netip.MustParseAddr("192.0.2.53")}; !slices.Equal(got.Nameservers, want) {
			t.Errorf("attachment %d: got nameservers %v, want %v", i, got.Nameservers, want)
		}
	}
	if writes := api.writes(); writes > 2 { // the block of the gateway has one address less
		t.Errorf("10 addresses in blocks of 16: got %d writes, want at most 2", writes)
	}
}

func TestAssign_keepsTheAddressOfAnAttachment(t *testing.T) {
	api := newFakeAPI(addressPool("office", nil))
	node := newNode(t, api, "n1")
	a := node.plugin(t.Context(), "p1", time.Second)
	first, err := node.assign(t.Context(), a, 1, "office")
	if err != nil {
		t.Fatal(err)
	}
	// A plugin that starts later finds the address in the records.
	for _, instance := range []string{"p1", "p2"} {
		again, err := node.assign(t.Context(), node.plugin(t.Context(), instance, time.Second), 1, "office")
		if err != nil || again.Addresses[0] != first.Addresses[0] {
			t.Errorf("plugin %s: got %v, %v, want %v", instance, again.Addresses, err, first.Addresses)
		}
	}
}

func TestAssign_reusesTheAddressThatWasReleasedFirst(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) {
		s.Ranges, s.BlockSize = []string{"10.20.1.0/30"}, ptr.To(int32(4))
	}))
	node := newNode(t, api, "n1")
	a := node.plugin(t.Context(), "p1", time.Second)
	var assigned []netip.Prefix
	for i := range 4 {
		got, err := node.assign(t.Context(), a, i, "office")
		if err != nil {
			t.Fatal(err)
		}
		assigned = append(assigned, got.Addresses[0])
	}
	for _, i := range []int{2, 0, 3} {
		node.release(a, i)
	}
	for i, released := range []int{2, 0, 3} {
		got, err := node.assign(t.Context(), a, 10+i, "office")
		if err != nil || got.Addresses[0] != assigned[released] {
			t.Errorf("got %v, %v, want %v, which was released before the others", got.Addresses, err, assigned[released])
		}
	}
}

// During a rolling update, the older plugin detaches an attachment, and the newer one assigns the address to it again
// before the older plugin has read the records.
func TestAssign_addressThatAnotherPluginAssignedAgain(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) { s.Ranges = []string{"10.20.1.1"} }))
	node := newNode(t, api, "n1")
	ctx, stop := context.WithCancel(t.Context())
	older, stopped := node.start(ctx, "p1", 50*time.Millisecond, api)
	if _, err := node.assign(t.Context(), older, 1, "office"); err != nil {
		t.Fatal(err)
	}
	stop() // maintenance, which would read the records
	stopped()
	node.release(older, 1)
	newer := node.plugin(t.Context(), "p2", 50*time.Millisecond)
	if _, err := node.assign(t.Context(), newer, 1, "office"); err != nil {
		t.Fatal(err)
	}
	if got, err := node.assign(t.Context(), older, 2, "office"); !isRefused(err, "all addresses are assigned") {
		t.Errorf("another attachment: got %v and error %v, want none: the address is in use", got.Addresses, err)
	}
}

func TestAssign_releasesTheAddressIfItCannotBeRecorded(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) { s.Ranges = []string{"10.20.1.1"} }))
	node := newNode(t, api, "n1")
	a := node.plugin(t.Context(), "p1", time.Second)
	diskFull := errors.New("no space left on device")
	err := a.Assign(t.Context(), ipam.Request{Pools: []string{"office"}, Owner: owner(1)}, node.used,
		func(ipam.Assignment) error { return diskFull })
	if !errors.Is(err, diskFull) {
		t.Fatalf("got %v, want %v", err, diskFull)
	}
	if _, err := node.assign(t.Context(), a, 2, "office"); err != nil {
		t.Errorf("the only address of the pool after a failed attachment: %v", err)
	}
}

func TestAssign_dualStack(t *testing.T) {
	api := newFakeAPI(addressPool("office", nil), addressPool("office6", func(s *network.AddressPoolSpec) {
		s.Subnet = "fd00:20::/64"
	}))
	node := newNode(t, api, "n1")
	got, err := node.assign(t.Context(), node.plugin(t.Context(), "p1", time.Second), 1, "office", "office6")
	if err != nil || len(got.Addresses) != 2 || !got.Addresses[0].Addr().Is4() || !got.Addresses[1].Addr().Is6() {
		t.Errorf("got %v, %v, want an IPv4 and an IPv6 address", got.Addresses, err)
	}
}

// Another host on the network has an address of the pool.
func TestAvoid_addressIsNotAssignedAgain(t *testing.T) {
	pool := addressPool("storage", func(s *network.AddressPoolSpec) { s.Ranges = []string{"10.20.0.1-10.20.0.2"} })
	node := newNode(t, newFakeAPI(pool), "n1")
	a := node.plugin(t.Context(), "p1", time.Second)
	got, err := node.assign(t.Context(), a, 1, "storage")
	if err != nil {
		t.Fatal(err)
	}
	first := got.Addresses[0].Addr()
	a.Avoid(ipam.Address{Network: "storage", IP: first})
	a.Release(owner(1), ipam.Address{Network: "storage", IP: first})
	if got, err = node.assign(t.Context(), a, 1, "storage"); err != nil {
		t.Fatal(err)
	}
	if got.Addresses[0].Addr() == first {
		t.Errorf("the same attachment after Avoid: got address %s again", first)
	}
	_, err = node.assign(t.Context(), a, 2, "storage")
	want := fmt.Sprintf("other hosts on the network have [%s]", first)
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("another attachment: got error %v, want one that contains %q", err, want)
	}
}

// Pools that serve one zone each can all be default pools.
func TestPools_nodeSelector(t *testing.T) {
	inZone := func(zone string) func(*network.AddressPoolSpec) {
		return func(s *network.AddressPoolSpec) {
			s.Default, s.NodeSelector = true, map[string]string{"zone": zone}
			s.Ranges = []string{fmt.Sprintf("10.20.%d.0/24", zone[0])}
		}
	}
	api := newFakeAPI(addressPool("pool-a", inZone("a")), addressPool("pool-b", inZone("b")))
	for zone, want := range map[string]string{"a": "[pool-a]", "b": "[pool-b]", "c": "[]"} {
		node := newNode(t, api, "n"+zone)
		node.zone = zone
		a := node.plugin(t.Context(), "p"+zone, time.Second)
		if got, err := a.Defaults(t.Context(), "storage", "default"); err != nil || fmt.Sprint(got) != want {
			t.Errorf("default pools in zone %s: got %v and error %v, want %s", zone, got, err, want)
		}
		err := a.Check(t.Context(), "storage", "default", []string{"pool-a"})
		wantErr := `addressPools[0]: Invalid value: "pool-a": AddressPool pool-a serves nodes with the labels zone=a, ` +
			"which node n" + zone + " does not have: choose another pool, or label the node"
		if got := fmt.Sprint(err); zone == "a" && err != nil || zone != "a" && got != wantErr {
			t.Errorf("use of pool-a in zone %s: got error %v, want %q only outside of zone a", zone, err, wantErr)
		}
	}
}

// Pools that serve some namespaces can be default pools next to one that serves all, and apply before it. Of several
// pools, the oldest applies.
func TestPools_defaultsOfNamespaces(t *testing.T) {
	pool := func(name string, age time.Duration, namespaces ...string) network.AddressPool {
		p := addressPool(name, func(s *network.AddressPoolSpec) { s.Default, s.Namespaces = true, namespaces })
		p.CreationTimestamp = metav1.NewTime(time.Now().Add(-age))
		return p
	}
	api := newFakeAPI(pool("all", 4*time.Hour), pool("all-younger", time.Hour), pool("team-a", 2*time.Hour, "a"),
		pool("team-b", 3*time.Hour, "b", "c"), pool("team-c", 2*time.Hour, "c"))
	a := newNode(t, api, "n1").plugin(t.Context(), "p1", time.Second)
	for namespace, want := range map[string]string{"a": "[team-a]", "b": "[team-b]", "c": "[team-b]", "d": "[all]"} {
		if got, err := a.Defaults(t.Context(), "storage", namespace); err != nil || fmt.Sprint(got) != want {
			t.Errorf("default pools of namespace %s: got %v and error %v, want %s", namespace, got, err, want)
		}
	}
	want := `addressPools[0]: Invalid value: "team-b": AddressPool team-b does not serve namespace a: ` +
		"spec.namespaces has [b c]: use another pool, or add the namespace to the pool"
	if err := a.Check(t.Context(), "storage", "a", []string{"team-b"}); err == nil || err.Error() != want {
		t.Errorf("claim of namespace a that names team-b: got error %v, want %s", err, want)
	}
	if err := a.Check(t.Context(), "storage", "b", []string{"team-b"}); err != nil {
		t.Errorf("claim of namespace b that names team-b: got error %v, want none", err)
	}
}

// Without the address, the pod would start and reach no host.
func TestPools_defaultsNamesInvalidPool(t *testing.T) {
	pool := func(name string, change func(*network.AddressPoolSpec)) network.AddressPool {
		return addressPool(name, func(s *network.AddressPoolSpec) {
			s.Default, s.Ranges = true, []string{"10.99.0.0/24"} // not in the subnet
			change(s)
		})
	}
	api := newFakeAPI(
		pool("wrong", func(*network.AddressPoolSpec) {}),
		pool("of-a-namespace", func(s *network.AddressPoolSpec) { s.Network, s.Namespaces = "lab", []string{"a"} }),
		pool("no-default", func(s *network.AddressPoolSpec) { s.Network, s.Default = "office", false }),
	)
	a := newNode(t, api, "n1").plugin(t.Context(), "p1", time.Second)
	for _, tc := range []struct{ network, namespace, want string }{
		{"storage", "a", "AddressPool wrong, a default pool of network storage: "},
		{"lab", "a", "AddressPool of-a-namespace, a default pool of network lab: "},
		{"lab", "b", ""}, {"office", "a", ""},
	} {
		got, err := a.Defaults(t.Context(), tc.network, tc.namespace)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tc.want)) {
			t.Errorf("network %s, namespace %s: got pools %v and error %v, want error %q",
				tc.network, tc.namespace, got, err, tc.want)
		}
	}
}

func TestAssign_reserved(t *testing.T) {
	const reserved = "10.20.1.1"
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) {
		s.Ranges, s.Reserved, s.BlockSize = []string{"10.20.1.0/30"}, []string{reserved}, ptr.To(int32(4))
	}))
	n1, n2 := newNode(t, api, "n1"), newNode(t, api, "n2")
	a1, a2 := n1.plugin(t.Context(), "p1", time.Second), n2.plugin(t.Context(), "p2", waitTimeout)
	for i := range 3 { // a link with any address never gets it
		got, err := n1.assign(t.Context(), a1, i, "office")
		if err != nil || got.Addresses[0].Addr().String() == reserved {
			t.Fatalf("attachment %d: got %v and error %v, want an address that is not reserved", i, got.Addresses, err)
		}
	}
	if _, err := n1.assign(t.Context(), a1, 3, "office"); err == nil {
		t.Error("another attachment got an address, want an error: only the reserved one is free")
	}
	if _, err := n1.assignReserved(t.Context(), a1, 4, "10.20.9.9"); err != nil {
		t.Errorf("an address that is not in the pool: got error %v, want none", err)
	}
	for range 2 { // the containers restart
		got, err := n1.assignReserved(t.Context(), a1, 5, reserved)
		if err != nil || len(got.Addresses) != 1 || got.Addresses[0].String() != reserved+"/16" {
			t.Fatalf("got %v and error %v, want the reserved address", got.Addresses, err)
		}
	}
	want := "pod default/p5 on this node has 10.20.1.1"
	if _, err := n1.assignReserved(t.Context(), a1, 6, reserved); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("another claim: got error %v, want %q", err, want)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	want = "another node has the reserved address: n1 has 10.20.1.1"
	if _, err := n2.assignReserved(ctx, a2, 7, reserved); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("another node: got error %v, want %q", err, want)
	}
	n1.release(a1, 5) // the node returns it at once
	if got, err := n2.assignReserved(t.Context(), a2, 8, reserved); err != nil || len(got.Addresses) != 1 {
		t.Errorf("after the other node has returned it: got %v and error %v, want the address", got.Addresses, err)
	}
	checkUnique(t, n1, n2)
}

func TestCheckStatic(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) {
		s.Ranges, s.Reserved = []string{"10.20.1.0/30"}, []string{"10.20.1.1"}
	}))
	a := newNode(t, api, "n1").plugin(t.Context(), "p1", time.Second)
	for address, want := range map[string]string{
		"10.20.1.1/16": "", // reserved
		"10.20.9.9/16": "", // not in the pool
		"10.20.1.2/16": `addresses[0]: Invalid value: "10.20.1.2/16": AddressPool office may assign address 10.20.1.2 to ` +
			"another pod: add it to spec.reserved of the pool, or choose an address that is not in the pool",
	} {
		err := a.CheckStatic(t.Context(), "storage", []netip.Prefix{netip.MustParsePrefix(address)})
		if got := fmt.Sprint(err); want == "" && err != nil || want != "" && got != want {
			t.Errorf("%s: got error %v, want %q", address, err, want)
		}
	}
	if err := a.CheckStatic(t.Context(), "other", []netip.Prefix{netip.MustParsePrefix("10.20.1.2/16")}); err != nil {
		t.Errorf("the same address on another network: got error %v, want none", err)
	}
}

func TestAssign_namesTheNodeWithMostAddressesOfAnExhaustedPool(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) { s.Ranges = []string{"10.20.1.0/31"} }))
	node, other := newNode(t, api, "n1"), newNode(t, api, "n2")
	a := node.plugin(t.Context(), "p1", time.Second)
	for i := range 2 {
		if _, err := node.assign(t.Context(), a, i, "office"); err != nil {
			t.Fatal(err)
		}
	}
	_, err := other.assign(t.Context(), other.plugin(t.Context(), "p2", time.Second), 9, "office")
	want := "AddressPool office: all addresses are assigned: it has 2, most of them on n1 with 2"
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got error %v, want %s", err, want)
	}
}

func TestAssign_refuses(t *testing.T) {
	ready := func(status metav1.ConditionStatus, message string) network.AddressPoolStatus {
		return network.AddressPoolStatus{Conditions: []metav1.Condition{
			{Type: network.ConditionReady, Status: status, Message: message},
		}}
	}
	overlapping := addressPool("overlapping", nil)
	overlapping.Status = ready(metav1.ConditionFalse, "overlaps pool office")
	deleted := addressPool("deleted", nil)
	deleted.DeletionTimestamp = ptr.To(metav1.Now())
	api := newFakeAPI(overlapping, deleted,
		addressPool("other-namespace", func(s *network.AddressPoolSpec) { s.Namespaces = []string{"team-a", "team-b"} }),
		addressPool("invalid", func(s *network.AddressPoolSpec) { s.Ranges = []string{"x"} }))
	node := newNode(t, api, "n1")
	a := node.plugin(t.Context(), "p1", time.Second)
	for name, want := range map[string]string{
		"missing":     "AddressPool missing does not exist: create it, or remove it from addressPools",
		"overlapping": "AddressPool overlapping is not ready: overlaps pool office",
		"deleted":     "AddressPool deleted is being deleted: wait until it is deleted, or name another pool",
		"other-namespace": "AddressPool other-namespace does not serve namespace default: " +
			"spec.namespaces has [team-a team-b]: use another pool",
		"invalid": `AddressPool invalid: spec.ranges[0]: Invalid value: "x"`,
	} {
		if _, err := node.assign(t.Context(), a, 1, name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("pool %s: got error %v, want %s", name, err, want)
		}
	}
}

// Nodes share a pool of which one node has all addresses: once the controller reports
// that the pool is short, that node returns its unused addresses.
func TestShortPool_nodesReturnUnusedAddresses(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) { s.Ranges = []string{"10.20.1.0/28"} }))
	api.reportShort = true
	first, second := newNode(t, api, "n1"), newNode(t, api, "n2")
	a, b := first.plugin(t.Context(), "p1", waitTimeout), second.plugin(t.Context(), "p2", waitTimeout)
	if _, err := first.assign(t.Context(), a, 1, "office"); err != nil {
		t.Fatal(err)
	}
	for i := range 15 { // 16 addresses for 16 attachments on two nodes
		node, allocator := first, a
		if i%2 == 0 {
			node, allocator = second, b
		}
		if _, err := node.assign(t.Context(), allocator, 100+i, "office"); err != nil {
			t.Fatalf("attachment %d of 16: %v", i+2, err)
		}
	}
	checkUnique(t, first, second)
}

// A plugin that was killed between the creation of its block and the check leaves a
// block that may overlap another. Its successor does not use it.
func TestLoad_deletesAnUnusedBlockThatOverlapsAnother(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) { s.Ranges = []string{"10.20.1.0/30"} }))
	for name, node := range map[string]string{"storage-4-0a140100": "n1", "storage-4-0a140101": "n2"} {
		_, err := api.CreateBlock(t.Context(), &network.AddressBlock{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: network.AddressBlockSpec{
				Network: "storage", Pool: "office", Node: node, Ranges: []string{"10.20.1.0-10.20.1.2"},
			},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	node := newNode(t, api, "n2")
	got, err := node.assign(t.Context(), node.plugin(t.Context(), "p2", time.Second), 1, "office")
	if want := netip.MustParseAddr("10.20.1.3"); err != nil || got.Addresses[0].Addr() != want {
		t.Errorf("got %v, %v, want %s, which is in no other node's block", got.Addresses, err, want)
	}
}

// Two nodes chose overlapping blocks at the same time. The plugin of n1 was killed before it could
// compare its block with the others, and n2 uses the address: the creation times do not show which
// node was first.
func TestLoad_returnsUnusedAddressesThatAnotherBlockHas(t *testing.T) {
	for _, name := range []string{"storage-4-0a140108", "storage-4-0a140110"} {
		t.Run(name, func(t *testing.T) {
			api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) {
				s.Ranges, s.BlockSize = []string{"10.20.1.8/30"}, ptr.To(int32(4))
			}))
			n1, n2 := newNode(t, api, "n1"), newNode(t, api, "n2")
			api.mustCreate(t, "storage-4-0a140109", network.AddressBlockSpec{
				Network: "storage", Pool: "office", Node: "n2", Namespace: "default", Pod: "web-0",
				Ranges: []string{"10.20.1.9-10.20.1.9"},
			})
			plugin := n2.plugin(t.Context(), "p2", time.Second)
			if _, err := n2.assignKept(t.Context(), plugin, 1, "web-0", ""); err != nil {
				t.Fatal(err)
			}
			api.mustCreate(t, name, network.AddressBlockSpec{
				Network: "storage", Pool: "office", Node: "n1", Ranges: []string{"10.20.1.8-10.20.1.11"},
			})
			plugin = n1.plugin(t.Context(), "p1", 50*time.Millisecond)
			for i := range 4 {
				if _, err := n1.assign(t.Context(), plugin, 10+i, "office"); (err == nil) != (i < 3) {
					t.Errorf("address %d of the 3 that n2 does not have: got error %v", i+1, err)
				}
			}
			checkUnique(t, n1, n2)
			n2.plugin(t.Context(), "p3", time.Second)
			n2.awaitLost(ipam.Lost{})
		})
	}
}

// n1 uses an address of its block. The plugin of n2 was killed before it could compare its block,
// which overlaps that of n1. Node n1 keeps the address that it uses, even if it reads its blocks first.
func TestLoad_keepsUsedAddressesThatAnotherBlockHas(t *testing.T) {
	api := newFakeAPI(addressPool("office", nil))
	n1, n2 := newNode(t, api, "n1"), newNode(t, api, "n2")
	got, err := n1.assign(t.Context(), n1.plugin(t.Context(), "p1", time.Second), 1, "office")
	if err != nil {
		t.Fatal(err)
	}
	ranges := api.allBlocks()[0].Spec.Ranges
	api.mustCreate(t, "other", network.AddressBlockSpec{Network: "storage", Pool: "office", Node: "n2", Ranges: ranges})
	n1.onLost(nil)
	n1.plugin(t.Context(), "p2", time.Second)
	n1.awaitLost(ipam.Lost{})
	if _, err := n2.assign(t.Context(), n2.plugin(t.Context(), "p3", time.Second), 2, "office"); err != nil {
		t.Fatal(err)
	}
	used := got.Addresses[0].Addr()
	var holders []string
	for _, b := range api.allBlocks() {
		if set, err := addresspool.ParseRanges(b.Spec.Ranges); err != nil || set.Contains(used) {
			holders = append(holders, b.Spec.Node)
		}
	}
	if !slices.Equal(holders, []string{"n1"}) {
		t.Errorf("blocks with %s: got those of %v, want one of n1", used, holders)
	}
}

// A plugin was killed before it could compare its block, which it created to take lost addresses
// again, with that of n2. Both blocks have an address that a link of n1 uses, and perhaps one of n2.
func TestLoad_losesAddressesOfAnUncheckedBlockThatAnotherBlockHas(t *testing.T) {
	api := newFakeAPI(addressPool("office", nil))
	node := newNode(t, api, "n1")
	ctx, stop := context.WithCancel(t.Context())
	plugin, stopped := node.start(ctx, "p1", time.Second, api)
	got, err := node.assign(t.Context(), plugin, 1, "office")
	if err != nil {
		t.Fatal(err)
	}
	first := got.Addresses[0].Addr()
	node.awaitLost(ipam.Lost{})
	stop()
	stopped()
	api.deleteBlocksOf("n1")
	ranges := []string{fmt.Sprintf("%s-%s", first, first)}
	for name, node := range map[string]string{"block-1": "n2", "block-2": "n1"} {
		api.mustCreate(t, name, network.AddressBlockSpec{Network: "storage", Pool: "office", Node: node, Ranges: ranges})
	}
	api.change("block-2", func(b *network.AddressBlock) {
		b.Annotations = map[string]string{network.UncheckedAnnotation: "true"}
	})
	node.plugin(t.Context(), "p2", time.Second)
	node.awaitLost(ipam.Lost{ipam.Address{Network: "storage", IP: first}: "n2"})
	if blocks := api.nodeBlocks("n1"); len(blocks) > 0 {
		t.Errorf("node n1 still has %v", blocks)
	}
}

// The plugin did not get the response to the request that ends the check of the block.
func TestLoad_checksAnUncheckedBlock(t *testing.T) {
	api := newFakeAPI(addressPool("office", nil))
	node := newNode(t, api, "n1")
	ctx, stop := context.WithCancel(t.Context())
	plugin, stopped := node.start(ctx, "p1", time.Second, api)
	if _, err := node.assign(t.Context(), plugin, 1, "office"); err != nil {
		t.Fatal(err)
	}
	node.awaitLost(ipam.Lost{})
	stop()
	stopped()
	api.change(api.nodeBlocks("n1")[0], func(b *network.AddressBlock) {
		b.Annotations = map[string]string{network.UncheckedAnnotation: "true"}
	})
	node.onLost(nil)
	node.plugin(t.Context(), "p2", time.Second)
	node.awaitLost(ipam.Lost{})
	for _, b := range api.allBlocks() {
		if len(b.Annotations) > 0 {
			t.Errorf("block %s: got annotations %v, want none", b.Name, b.Annotations)
		}
	}
}

// A user has written a block with invalid ranges. Nodes, including the node of that block, take no address
// that it may mean, but take other addresses of the network.
func TestAssign_besideABlockWithInvalidRanges(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) {
		s.Ranges, s.BlockSize = []string{"10.20.1.0/29"}, ptr.To(int32(4))
	}))
	api.mustCreate(t, "invalid", network.AddressBlockSpec{
		Network: "storage", Pool: "office", Node: "n1", Ranges: []string{"10.20.1.6-10.20.1.2", "all"},
	})
	n2 := newNode(t, api, "n2")
	a2 := n2.plugin(t.Context(), "p2", 50*time.Millisecond)
	var got []string
	for i := range 4 {
		assigned, err := n2.assign(t.Context(), a2, i, "office")
		if err == nil {
			got = append(got, assigned.Addresses[0].Addr().String())
		}
	}
	slices.Sort(got)
	if want := []string{"10.20.1.0", "10.20.1.1", "10.20.1.7"}; !slices.Equal(got, want) {
		t.Errorf("node n2: got %v, want %v", got, want)
	}
	n1 := newNode(t, api, "n1")
	assigned, err := n1.assign(t.Context(), n1.plugin(t.Context(), "p1", time.Second), 9, "office")
	if err != nil || !netip.MustParsePrefix("10.20.1.0/29").Contains(assigned.Addresses[0].Addr()) {
		t.Errorf("node n1: got %v and error %v, want an address of its block", assigned.Addresses, err)
	}
	checkUnique(t, n1, n2)
}

// A node that needs only a reserved address takes no other addresses.
func TestMaintenance_takesNoBlockForReservedAddressOnly(t *testing.T) {
	api := newFakeAPI(
		addressPool("office", func(s *network.AddressPoolSpec) {
			s.Ranges, s.Reserved = []string{"10.20.1.0/24"}, []string{"10.20.1.1"}
		}),
		addressPool("unused", func(s *network.AddressPoolSpec) { s.Ranges = []string{"10.20.2.0/24"} }))
	node := newNode(t, api, "n1")
	ctx, stop := context.WithCancel(t.Context())
	if _, err := node.assignReserved(t.Context(), node.plugin(ctx, "p1", time.Second), 1, "10.20.1.1"); err != nil {
		t.Fatal(err)
	}
	stop()
	// When maintenance has returned this block, it has maintained pool office, too.
	if _, err := api.CreateBlock(t.Context(), &network.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{Name: "unused"},
		Spec: network.AddressBlockSpec{
			Network: "storage", Pool: "unused", Node: "n1", Ranges: []string{"10.20.2.0-10.20.2.15"},
		},
	}); err != nil {
		t.Fatal(err)
	}
	a := node.plugin(t.Context(), "p2", time.Second)
	hasBlocks := func(n int) func() error {
		return func() error {
			if blocks := api.nodeBlocks("n1"); len(blocks) != n {
				return fmt.Errorf("it has %v", blocks)
			}
			return nil
		}
	}
	eventually.Eventually(t, waitTimeout, "the node has only the block with the reserved address", hasBlocks(1))
	node.release(a, 1)
	eventually.Eventually(t, waitTimeout, "the node has no block", hasBlocks(0))
	if got := api.writes(); got != 4 {
		t.Errorf("got %d writes, want 4: two for the pod, and two for the other block", got)
	}
}

// Many nodes assign and release addresses of a small pool at the same time, while
// requests fail, some of them after the API server has carried them out, and plugins
// restart. No two attachments ever have the same address, and at the end every address
// can be assigned.
func TestAssign_underFaultsNeverGivesAnAddressTwice(t *testing.T) {
	const nodes, attachments = 6, 60
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) {
		s.Ranges, s.BlockSize = []string{"10.20.1.0/26"}, ptr.To(int32(8))
	}))
	api.reportShort, api.faults = true, rand.New(rand.NewPCG(1, 2))
	all := make([]*testNode, nodes)
	for i := range all {
		all[i] = newNode(t, api, fmt.Sprint("n", i))
	}
	var group sync.WaitGroup
	var assigned atomic.Int32
	for i, node := range all {
		group.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 3))
			ctx, stop := context.WithCancel(t.Context())
			a := node.plugin(ctx, "p0", 200*time.Millisecond)
			for k := range attachments {
				if random.IntN(10) == 0 { // another plugin of the node takes over
					stop()
					ctx, stop = context.WithCancel(t.Context())
					a = node.plugin(ctx, fmt.Sprint("p", k), 200*time.Millisecond)
				}
				if _, err := node.assign(ctx, a, 1000*i+k, "office"); err == nil {
					assigned.Add(1)
					if random.IntN(3) > 0 {
						node.release(a, 1000*i+k)
					}
				}
				checkUnique(t, all...)
			}
			stop()
		})
	}
	group.Wait()
	checkUnique(t, all...)
	if got := assigned.Load(); got < nodes*attachments/4 {
		t.Errorf("%d of %d attachments got an address, want at least a quarter", got, nodes*attachments)
	}

	// All pods end. The nodes return their unused addresses, so one node can use all addresses.
	api.setFaults(nil)
	last := all[0].plugin(t.Context(), "last", waitTimeout)
	for i, node := range all {
		a := last
		if i > 0 {
			a = node.plugin(t.Context(), "last", time.Second)
		}
		for k := range attachments {
			node.release(a, 1000*i+k)
		}
	}
	for k := range 64 {
		if _, err := all[0].assign(t.Context(), last, 10000+k, "office"); err != nil {
			t.Fatalf("address %d of 64: %v", k+1, err)
		}
	}
	checkUnique(t, all...)
}

// checkUnique fails the test if two attachments have the same address.
func checkUnique(t *testing.T, nodes ...*testNode) {
	t.Helper()
	attachments := map[netip.Addr]string{}
	for _, n := range nodes {
		n.mu.Lock()
		for owner, assignment := range n.records {
			for _, p := range assignment.Addresses {
				attachment := n.name + "/" + owner.Claim
				if other, taken := attachments[p.Addr()]; taken {
					t.Errorf("address %s: assigned to %s and to %s", p.Addr(), other, attachment)
				}
				attachments[p.Addr()] = attachment
			}
		}
		n.mu.Unlock()
	}
}

func TestCleanup_leavesNoFile(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	n := newNode(t, newFakeAPI(addressPool("storage", nil)), "n1")
	a := n.plugin(ctx, "1", time.Second)
	if _, err := n.assign(ctx, a, 1, "storage"); err != nil {
		t.Fatal(err)
	}
	n.release(a, 1)
	for range 2 { // the second call finds nothing to remove
		if err := a.Cleanup(); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(filepath.Join(n.dir, "last-plugin")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file of the last plugin after Cleanup: got error %v, want %v", err, os.ErrNotExist)
	}
}

func TestMaintenance_returnsUnusedBlocks(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) { s.BlockSize = ptr.To(int32(2)) }))
	node := newNode(t, api, "n1")
	ctx, stop := context.WithCancel(t.Context())
	a := node.plugin(ctx, "p1", time.Second)
	for i := range 8 {
		if _, err := node.assign(t.Context(), a, i, "office"); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 7 {
		node.release(a, i)
	}
	stop()
	node.plugin(t.Context(), "p2", time.Second) // maintains blocks once it knows the pools
	eventually.Eventually(t, waitTimeout, "the node keeps the block that it uses and another", func() error {
		if n := len(api.nodeBlocks("n1")); n != 2 {
			return fmt.Errorf("it has %d blocks", n)
		}
		return nil
	})
}

// A node that no longer uses a pool returns all of it, so that the pool can be deleted.
func TestMaintenance_returnsAllBlocksOfAnUnusedPool(t *testing.T) {
	api := newFakeAPI(addressPool("office", nil))
	node := newNode(t, api, "n1")
	ctx, stop := context.WithCancel(t.Context())
	a := node.plugin(ctx, "p1", time.Second)
	if _, err := node.assign(t.Context(), a, 1, "office"); err != nil {
		t.Fatal(err)
	}
	node.release(a, 1)
	stop()
	node.plugin(t.Context(), "p2", time.Second)
	eventually.Eventually(t, waitTimeout, "the node has no block", func() error {
		if n := len(api.nodeBlocks("n1")); n != 0 {
			return fmt.Errorf("it has %d blocks", n)
		}
		return nil
	})
}

// The controller returns the blocks of a node that is gone. The node is only cut off: its
// pods still have the addresses when it comes back.
func TestMaintenance_takesBackOrReportsLostAddresses(t *testing.T) {
	small := addressPool("office", func(s *network.AddressPoolSpec) {
		s.Ranges, s.BlockSize = []string{"10.20.1.0/31"}, ptr.To(int32(2))
	})
	address := func(text string) ipam.Address {
		return ipam.Address{Network: "storage", IP: netip.MustParseAddr(text)}
	}
	// lose makes node n1 lose the addresses of attachments 0 and 1 to node n2.
	lose := func(t *testing.T) (*testNode, *ipam.Allocator) {
		t.Helper()
		api := newFakeAPI(small)
		n1 := newNode(t, api, "n1")
		plugin := n1.plugin(t.Context(), "p1", time.Second)
		for i := range 2 {
			if _, err := n1.assign(t.Context(), plugin, i, "office"); err != nil {
				t.Fatal(err)
			}
		}
		n1.awaitLost(ipam.Lost{})
		api.moveBlocks("n1", "n2")
		return n1, plugin
	}
	toN2 := ipam.Lost{address("10.20.1.0"): "n2", address("10.20.1.1"): "n2"}
	t.Run("the plugin learns of addresses that another node has", func(t *testing.T) {
		n1, plugin := lose(t)
		n1.awaitLost(toN2)
		_, err := n1.assign(t.Context(), plugin, 1, "office") // its containers restart
		if err == nil || !strings.Contains(err.Error(), "node n2 has the address now: delete the pod") {
			t.Errorf("got error %v, want one that names node n2 and the remedy", err)
		}
		n1.release(plugin, 0)
		n1.release(plugin, 1)
		n1.awaitLost(ipam.Lost{}) // a later link with the address is not blocked
		if _, err := n1.assign(t.Context(), plugin, 3, "office"); err == nil || !strings.Contains(err.Error(), "n2 with 2") {
			t.Errorf("got error %v, want one that says that node n2 has all addresses", err)
		}
	})
	t.Run("its successor learns of them", func(t *testing.T) {
		n1, _ := lose(t)
		n1.awaitLost(toN2)
		n1.onLost(nil)
		n1.plugin(t.Context(), "p2", time.Second)
		n1.awaitLost(toN2)
	})
	t.Run("the plugin takes addresses again that no other node has", func(t *testing.T) {
		api := newFakeAPI(small)
		n1 := newNode(t, api, "n1")
		a1 := n1.plugin(t.Context(), "p1", time.Second)
		if _, err := n1.assign(t.Context(), a1, 1, "office"); err != nil {
			t.Fatal(err)
		}
		api.deleteBlocksOf("n1")
		eventually.Eventually(t, waitTimeout, "the node has a block again", func() error {
			if len(api.nodeBlocks("n1")) == 0 {
				return errors.New("it has none")
			}
			return nil
		})
		n1.awaitLost(ipam.Lost{})
		if got, err := n1.assign(t.Context(), a1, 1, "office"); err != nil || len(got.Addresses) != 1 {
			t.Errorf("got %v, %v, want the address of the attachment", got, err)
		}
	})
}

// The address in a record that cannot be read may be that of a link. No other attachment gets it, on any node, until
// the record is gone. Addresses of later blocks are not affected.
func TestAssign_withholdsAddressesOfUnreadableRecords(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) {
		s.Ranges, s.BlockSize = []string{"10.20.1.0/29"}, ptr.To(int32(4))
	}))
	api.reportShort = true
	node, other := newNode(t, api, "n1"), newNode(t, api, "n2")
	first := node.plugin(t.Context(), "p1", time.Second)
	for i := range 2 {
		if _, err := node.assign(t.Context(), first, i, "office"); err != nil {
			t.Fatal(err)
		}
	}
	damaged := node.damage(0)
	a := node.plugin(t.Context(), "p2", time.Second)
	elsewhere := other.plugin(t.Context(), "p3", time.Second)
	assigned := map[netip.Addr]bool{}
	assignAll := func() {
		t.Helper()
		for i := range 8 {
			on, plugin := node, a
			if i%2 > 0 {
				on, plugin = other, elsewhere
			}
			got, err := on.assign(t.Context(), plugin, 10+i, "office")
			if err != nil {
				continue
			}
			assigned[got.Addresses[0].Addr()] = true
		}
	}
	assignAll()
	if len(assigned) != 4 { // the node withholds three of its first four addresses, and uses the fourth
		t.Errorf("got the addresses %v, want the four of the second block", slices.Collect(maps.Keys(assigned)))
	}
	if assigned[damaged] {
		t.Errorf("address %s is in a record that cannot be read, and was assigned to another attachment", damaged)
	}
	checkUnique(t, node)

	node.removeDamaged()
	a = node.plugin(t.Context(), "p4", time.Second)
	assignAll()
	if len(assigned) != 7 || !assigned[damaged] {
		t.Errorf("after the record is gone: got the addresses %v, want all but that of the second attachment",
			slices.Collect(maps.Keys(assigned)))
	}
}
