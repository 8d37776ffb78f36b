// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// claim makes the records of the node contain a claim that names a reserved address, and acquires the address.
func (n *testNode) claim(ctx context.Context, a *ipam.Allocator, i int, ip string) error {
	address := netip.MustParseAddr(ip)
	n.setNamed(address, true)
	return a.Acquire(ctx, ipam.Request{
		Network: "storage", Reserved: []netip.Addr{address}, PodNamespace: "default",
		Owner: ipam.Owner{Claim: owner(i).Claim},
	}, n.used)
}

// unclaim removes the claim that names an address.
func (n *testNode) unclaim(a *ipam.Allocator, ip string) {
	n.setNamed(netip.MustParseAddr(ip), false)
	a.ClaimsChanged()
}

func (n *testNode) setNamed(ip netip.Addr, namedByClaims bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.namedByClaims == nil {
		n.namedByClaims = map[ipam.Address]bool{}
	}
	n.namedByClaims[ipam.Address{Network: "storage", IP: ip}] = namedByClaims
}

// acquireKept acquires the address that a pod keeps.
func acquireKept(ctx context.Context, n *testNode, a *ipam.Allocator, i int, pod string) error {
	return a.Acquire(ctx, ipam.Request{
		Pools: []string{"office"}, Keep: true, Pod: pod, PodNamespace: "default", Owner: ipam.Owner{Claim: owner(i).Claim},
	}, n.used)
}

func reservedPool() network.AddressPool {
	return addressPool("office", func(s *network.AddressPoolSpec) {
		s.Ranges, s.Reserved = []string{"10.20.1.0/24"}, []string{"10.20.1.1"}
	})
}

func isRefused(err error, want string) bool { return err != nil && strings.Contains(err.Error(), want) }

// A node has a reserved address from the preparation of a claim until the claim is unprepared, also while no
// pod is attached and after the plugin was replaced. No other node can prepare a claim with the address meanwhile.
func TestAcquire_reserved(t *testing.T) {
	const ip = "10.20.1.1"
	api := newFakeAPI(reservedPool())
	n1, n2 := newNode(t, api, "n1"), newNode(t, api, "n2")
	ctx, stop := context.WithCancel(t.Context())
	a1, a2 := n1.plugin(ctx, "p1", 50*time.Millisecond), n2.plugin(t.Context(), "p2", 50*time.Millisecond)
	if err := n1.claim(t.Context(), a1, 1, ip); err != nil {
		t.Fatal(err)
	}
	if _, err := n1.assignReserved(t.Context(), a1, 1, ip); err != nil {
		t.Fatal(err)
	}
	n1.release(a1, 1)
	awaitMaintenance(t, api, "n1")
	stop()
	a1 = n1.plugin(t.Context(), "p3", 50*time.Millisecond)
	awaitMaintenance(t, api, "n1")
	if err := n2.claim(t.Context(), a2, 2, ip); !isRefused(err, "n1 has "+ip) {
		t.Errorf("prepare a claim on node n2: got error %v, want one that names node n1", err)
	}
	if _, err := n1.assignReserved(t.Context(), a1, 1, ip); err != nil {
		t.Errorf("attach a pod again: %v", err)
	}
	if err := n1.claim(t.Context(), a1, 1, ip); err != nil {
		t.Errorf("prepare the claim again while its pod is attached: %v", err)
	}
	if err := n1.claim(t.Context(), a1, 3, ip); !isRefused(err, "default/p1") {
		t.Errorf("prepare another claim on node n1: got error %v, want one that names pod default/p1", err)
	}

	n1.release(a1, 1)
	n1.unclaim(a1, ip)
	eventually.Eventually(t, waitTimeout, "node n2 prepares its claim", func() error {
		return n2.claim(t.Context(), a2, 2, ip)
	})
}

// A claim names an address, but its NIC has been missing since before the plugin started, so the network is unknown.
func TestAcquire_reservedOnUnknownNetwork(t *testing.T) {
	const ip = "10.20.1.1"
	api := newFakeAPI(reservedPool())
	n1, n2 := newNode(t, api, "n1"), newNode(t, api, "n2")
	ctx, stop := context.WithCancel(t.Context())
	if err := n1.claim(t.Context(), n1.plugin(ctx, "p1", 50*time.Millisecond), 1, ip); err != nil {
		t.Fatal(err)
	}
	stop()
	n1.mu.Lock()
	n1.namedByClaims = map[ipam.Address]bool{{IP: netip.MustParseAddr(ip)}: true}
	n1.mu.Unlock()
	n1.plugin(t.Context(), "p2", 50*time.Millisecond)
	awaitMaintenance(t, api, "n1")
	err := n2.claim(t.Context(), n2.plugin(t.Context(), "p3", 50*time.Millisecond), 2, ip)
	if !isRefused(err, "n1 has "+ip) {
		t.Errorf("prepare a claim on node n2: got error %v, want one that names node n1", err)
	}
}

// A pod has the address that it keeps when its claim is prepared.
func TestAcquire_kept(t *testing.T) {
	api := newFakeAPI(addressPool("office", nil))
	n1, n2 := newNode(t, api, "n1"), newNode(t, api, "n2")
	a1, a2 := n1.plugin(t.Context(), "p1", 50*time.Millisecond), n2.plugin(t.Context(), "p2", 50*time.Millisecond)
	if err := acquireKept(t.Context(), n1, a1, 1, "web-0"); err != nil {
		t.Fatal(err)
	}
	if got := api.writes(); got != 1 {
		t.Errorf("prepare: got %d writes, want 1", got)
	}
	if _, err := n1.assignKept(t.Context(), a1, 1, "web-0", ""); err != nil {
		t.Fatal(err)
	}
	if err := acquireKept(t.Context(), n1, a1, 1, "web-0"); err != nil {
		t.Errorf("prepare the claim again while its pod is attached: %v", err)
	}
	if got := api.writes(); got != 1 {
		t.Errorf("attach: got %d writes in total, want 1", got)
	}
	if err := acquireKept(t.Context(), n2, a2, 2, "web-0"); !isRefused(err, "node n1 has") {
		t.Errorf("prepare the claim of the next pod on node n2: got error %v, want one that names node n1", err)
	}
}

// Preparing claims without reserved or kept addresses does not change blocks.
func TestAcquire_withoutReservedOrKeptAddresses(t *testing.T) {
	api := newFakeAPI(addressPool("office", nil))
	node := newNode(t, api, "n1")
	a := node.plugin(t.Context(), "p1", time.Second)
	r := ipam.Request{Pools: []string{"office"}, PodNamespace: "default", Owner: ipam.Owner{Claim: "claim1"}}
	if err := a.Acquire(t.Context(), r, node.used); err != nil || api.writes() > 0 {
		t.Errorf("got error %v and %d writes, want none", err, api.writes())
	}
}

// awaitMaintenance waits until the plugin of a node has maintained all blocks once more: it has returned a block of a
// pool that does not exist.
func awaitMaintenance(t *testing.T, api *fakeAPI, node string) {
	t.Helper()
	name := fmt.Sprintf("gone-%s-%d", node, api.writes())
	api.mustCreate(t, name, network.AddressBlockSpec{
		Network: "storage", Pool: "gone", Node: node, Ranges: []string{"10.20.200.1-10.20.200.1"},
	})
	eventually.Eventually(t, 3*waitTimeout, "node "+node+" maintains its blocks", func() error {
		if blocks := api.nodeBlocks(node); slices.Contains(blocks, name) {
			return fmt.Errorf("it has %v", blocks)
		}
		return nil
	})
}
