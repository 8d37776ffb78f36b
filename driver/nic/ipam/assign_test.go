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
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
)

func TestAssign_takesBlockForManyAddresses(t *testing.T) {
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

func TestAssign_keepsAddressOfAttachment(t *testing.T) {
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

func TestAssign_reusesLeastRecentlyReleasedAddress(t *testing.T) {
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
func TestAssign_addressReassignedByAnotherPlugin(t *testing.T) {
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

func TestAssign_releasesAddressIfRecordFails(t *testing.T) {
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

func TestAssign_namesNodeWithMostAddressesOfExhaustedPool(t *testing.T) {
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

// A user has written a block with invalid ranges. Nodes, including the node of that block, take no address
// that it may mean, but take other addresses of the network.
func TestAssign_skipsBlockWithInvalidRanges(t *testing.T) {
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

// Many nodes assign and release addresses of a small pool at the same time, while
// requests fail, some of them after the API server has carried them out, and plugins
// restart. No two attachments ever have the same address, and at the end every address
// can be assigned.
func TestAssign_parallelNodesWithFaults(t *testing.T) {
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

// The address in a record that cannot be read may be a link's. No other attachment gets it, on any node, until the
// record is gone. Addresses of later blocks are not affected.
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
