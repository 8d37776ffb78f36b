// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam_test

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
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
	// namedByClaims are the addresses that prepared claims name.
	namedByClaims map[ipam.Address]bool
	lost          ipam.Lost // nil until OnLost was called
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
	used := ipam.Used{
		Owners: map[ipam.Address]ipam.Owner{}, Unreadable: n.unreadable, NamedByClaims: maps.Clone(n.namedByClaims),
	}
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
