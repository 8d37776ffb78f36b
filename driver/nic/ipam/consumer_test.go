// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// assignKept assigns the address that a pod of a StatefulSet keeps.
func (n *testNode) assignKept(
	ctx context.Context, a *ipam.Allocator, i int, pod, link string,
) (ipam.Assignment, error) {
	return n.request(ctx, a, i, ipam.Request{Pools: []string{"office"}, Keep: true, Pod: pod, Interface: link})
}

// awaitReturned waits until a node has no block of a kept address.
func awaitReturned(t *testing.T, api *fakeAPI, node string) {
	t.Helper()
	eventually.Eventually(t, waitTimeout, "node "+node+" returns the addresses that pods keep", func() error {
		for _, b := range api.allBlocks() {
			if b.Spec.Pod != "" && b.Spec.Node == node {
				return fmt.Errorf("it has block %s of pod %s", b.Name, b.Spec.Pod)
			}
		}
		return nil
	})
}

func TestAssign_keepsAddressOfPodOfStatefulSet(t *testing.T) {
	api := newFakeAPI(addressPool("office", nil))
	n1, n2 := newNode(t, api, "n1"), newNode(t, api, "n2")
	a1, a2 := n1.plugin(t.Context(), "p1", 50*time.Millisecond), n2.plugin(t.Context(), "p2", 50*time.Millisecond)
	first, err := n1.assignKept(t.Context(), a1, 1, "web-0", "")
	if err != nil {
		t.Fatal(err)
	}
	if writes := api.writes(); writes != 1 {
		t.Errorf("the first address of a pod: got %d writes, want 1", writes)
	}

	_, err = n2.assignKept(t.Context(), a2, 2, "web-0", "")
	if err == nil || !strings.Contains(err.Error(), "n1 has "+first.Addresses[0].Addr().String()) {
		t.Errorf("while node n1 has the address: got error %v, want one that names node n1", err)
	}
	_, err = n1.assignKept(t.Context(), a1, 3, "web-0", "")
	if err == nil || !strings.Contains(err.Error(), "interfaceName") {
		t.Errorf("another link of the pod: got error %v, want one that names interfaceName", err)
	}
	other, err := n1.assignKept(t.Context(), a1, 4, "web-0", "net2")
	if err != nil || other.Addresses[0] == first.Addresses[0] {
		t.Errorf("another interface of the pod: got %v, %v, want another address", other.Addresses, err)
	}

	n1.release(a1, 1)
	n1.release(a1, 4)
	awaitReturned(t, api, "n1")
	writes := api.writes()
	again, err := n2.assignKept(t.Context(), a2, 5, "web-0", "")
	if err != nil || again.Addresses[0] != first.Addresses[0] {
		t.Errorf("on another node: got %v, %v, want %v again", again.Addresses, err, first.Addresses)
	}
	if writes := api.writes() - writes; writes != 1 {
		t.Errorf("the address on another node: got %d writes, want 1", writes)
	}
}

func TestAssign_skipsKeptAddressesOfOtherPods(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) {
		s.Ranges, s.BlockSize = []string{"10.20.1.1-10.20.1.2"}, ptr.To(int32(1))
	}))
	node := newNode(t, api, "n1")
	a := node.plugin(t.Context(), "p1", 50*time.Millisecond)
	first, err := node.assignKept(t.Context(), a, 1, "web-0", "")
	if err != nil {
		t.Fatal(err)
	}
	node.release(a, 1)
	awaitReturned(t, api, "n1")
	if _, err := node.assign(t.Context(), a, 2, "office"); err != nil {
		t.Fatal(err)
	}
	_, err = node.assign(t.Context(), a, 3, "office")
	if err == nil || !strings.Contains(err.Error(), "StatefulSets keep 1 for pods that do not run") {
		t.Errorf("the pool has only a kept address left: got error %v", err)
	}
	again, err := node.assignKept(t.Context(), a, 4, "web-0", "")
	if err != nil || again.Addresses[0] != first.Addresses[0] {
		t.Errorf("got %v, %v, want %v again", again.Addresses, err, first.Addresses)
	}
}

func TestAssign_refusesToKeepAddressesOfOtherPods(t *testing.T) {
	api := newFakeAPI(addressPool("office", nil))
	node := newNode(t, api, "n1")
	a := node.plugin(t.Context(), "p1", time.Second)
	for _, pod := range []string{"web", "web-7d9f", "web-", "-1", "web-01", "web--"} {
		if _, err := node.assignKept(t.Context(), a, 1, pod, ""); err == nil || !strings.Contains(err.Error(), pod) {
			t.Errorf("pod %s: got error %v, want one that names the pod", pod, err)
		}
	}
	if writes := api.writes(); writes != 0 {
		t.Errorf("got %d writes, want none", writes)
	}
}

// A node that was cut off takes the addresses that its pods keep again, unless another node has
// them: the controller has returned them.
func TestLost_takesKeptAddressesAgain(t *testing.T) {
	api := newFakeAPI(addressPool("office", nil))
	n1, n2 := newNode(t, api, "n1"), newNode(t, api, "n2")
	ctx, stop := context.WithCancel(t.Context())
	assigned, err := n1.assignKept(t.Context(), n1.plugin(ctx, "p1", time.Second), 1, "web-0", "")
	if err != nil {
		t.Fatal(err)
	}
	n1.awaitLost(ipam.Lost{})
	api.returnKept("n1")
	eventually.Eventually(t, waitTimeout, "node n1 takes the address again", func() error {
		if blocks := api.nodeBlocks("n1"); len(blocks) != 1 {
			return fmt.Errorf("it has the blocks %v", blocks)
		}
		return nil
	})
	n1.awaitLost(ipam.Lost{})

	stop()
	api.returnKept("n1")
	moved, err := n2.assignKept(t.Context(), n2.plugin(t.Context(), "p2", time.Second), 2, "web-0", "")
	if err != nil || moved.Addresses[0] != assigned.Addresses[0] {
		t.Fatalf("node n2: got %v, %v, want %v", moved.Addresses, err, assigned.Addresses)
	}
	n1.plugin(t.Context(), "p3", time.Second)
	n1.awaitLost(ipam.Lost{{Network: "storage", IP: assigned.Addresses[0].Addr()}: "n2"})
}

func TestAssign_limitsAddressesOfNamespace(t *testing.T) {
	const limit = 5
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) { s.NamespaceLimit = ptr.To(int32(limit)) }))
	var assigned atomic.Int32
	var attempts sync.WaitGroup
	var nodes []*testNode
	var plugins []*ipam.Allocator
	var mu sync.Mutex
	var refused error
	for n := range 3 {
		nodes = append(nodes, newNode(t, api, fmt.Sprint("n", n)))
		plugins = append(plugins, nodes[n].plugin(t.Context(), "p", 500*time.Millisecond))
	}
	for i := range 3 * limit {
		attempts.Go(func() {
			_, err := nodes[i%3].assign(t.Context(), plugins[i%3], i, "office")
			if err == nil {
				assigned.Add(1)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			refused = err
		})
	}
	attempts.Wait()
	if assigned.Load() != limit {
		t.Errorf("got %d addresses, want as many as the limit, %d; the last error is: %v", assigned.Load(), limit, refused)
	}
	if refused == nil || !strings.Contains(refused.Error(), "spec.namespaceLimit is 5, and namespace default has 5, "+
		"most of them on n") {
		t.Errorf("got error %v, want one with the limit and the nodes", refused)
	}
	for i := range 3 * limit { // the address of one pod makes room for another
		if len(nodes[i%3].records[owner(i)].Addresses) > 0 {
			nodes[i%3].release(plugins[i%3], i)
			break
		}
	}
	eventually.Eventually(t, waitTimeout, "another pod gets an address", func() error {
		_, err := nodes[0].assign(t.Context(), plugins[0], 100, "office")
		return err
	})
}

func TestAssign_returnsUnusedAddressesOfLimitedPool(t *testing.T) {
	api := newFakeAPI(addressPool("office", nil))
	node := newNode(t, api, "n1")
	a := node.plugin(t.Context(), "p1", time.Second)
	if _, err := node.assign(t.Context(), a, 1, "office"); err != nil {
		t.Fatal(err)
	}
	api.changePool("office", func(s *network.AddressPoolSpec) { s.NamespaceLimit = ptr.To(int32(1)) })
	if _, err := node.assign(t.Context(), a, 2, "office"); err != nil {
		t.Fatal(err)
	}
	eventually.Eventually(t, waitTimeout, "the node keeps only the addresses of its two pods", func() error {
		total := 0
		for _, b := range api.allBlocks() {
			for _, r := range b.Spec.Ranges {
				if first, last, _ := strings.Cut(r, "-"); first == last {
					total++
					continue
				}
				return fmt.Errorf("block %s has %v", b.Name, b.Spec.Ranges)
			}
		}
		if total != 2 {
			return fmt.Errorf("it has %d addresses", total)
		}
		return nil
	})
}

// Pods move between nodes while requests fail and plugins are replaced. Each keeps its address.
func TestAssign_keepsAddressesDespiteFaults(t *testing.T) {
	const pods, moves = 6, 120
	api := newFakeAPI(addressPool("office", nil))
	api.faults = rand.New(rand.NewPCG(1, 2))
	random := rand.New(rand.NewPCG(3, 4))
	nodes := []*testNode{newNode(t, api, "n1"), newNode(t, api, "n2")}
	plugins := make([]*ipam.Allocator, len(nodes))
	stops := make([]context.CancelFunc, len(nodes))
	start := func(n, i int) {
		var ctx context.Context
		ctx, stops[n] = context.WithCancel(t.Context())
		plugins[n] = nodes[n].plugin(ctx, fmt.Sprint("p", i), 20*time.Millisecond)
	}
	start(0, 0)
	start(1, 0)
	addresses := map[int]netip.Prefix{}
	moved := 0
	for i := range moves {
		pod, n := random.IntN(pods), random.IntN(len(nodes))
		if random.IntN(10) == 0 {
			stops[n]()
			start(n, i+1)
		}
		for o, node := range nodes { // the pod is deleted before it is created again
			node.release(plugins[o], pod)
		}
		got, err := nodes[n].assignKept(t.Context(), plugins[n], pod, fmt.Sprint("web-", pod), "")
		if err != nil {
			continue
		}
		if known, ok := addresses[pod]; ok && known != got.Addresses[0] {
			t.Fatalf("move %d: pod web-%d got %v, want %v", i, pod, got.Addresses[0], known)
		}
		addresses[pod] = got.Addresses[0]
		moved++
		checkUnique(t, nodes...)
	}
	if moved < moves/4 {
		t.Errorf("%d of %d pods got an address, want at least a quarter", moved, moves)
	}
}
