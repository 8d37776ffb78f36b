// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// mortalAPI is the API server of one plugin, which may be killed before and after each request.
type mortalAPI struct {
	*fakeAPI
	mu     sync.Mutex
	random *rand.Rand // nil: it is never killed
	killed bool
}

var errKilled = errors.New("the plugin was killed")

func (m *mortalAPI) isKilled() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.killed
}

func (m *mortalAPI) kill() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.killed = true
}

// step lets other plugins make requests, and kills the plugin from time to time.
func (m *mortalAPI) step() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.random != nil {
		until := m.requests.Load() + m.random.Int64N(6)
		for n := 0; n < 500 && m.requests.Load() < until; n++ {
			runtime.Gosched()
		}
		m.killed = m.killed || m.random.IntN(30) == 0
	}
	if m.killed {
		return errKilled
	}
	return nil
}

// do carries out a request unless the plugin is killed before, and returns the response unless it
// is killed afterward.
func do[T any](m *mortalAPI, request func() (T, error)) (response T, err error) {
	if err := m.step(); err != nil {
		return response, err
	}
	m.requests.Add(1)
	if response, err = request(); err != nil {
		return response, err
	}
	return response, m.step()
}

func (m *mortalAPI) ListBlocks(ctx context.Context, o metav1.ListOptions) (*network.AddressBlockList, error) {
	return do(m, func() (*network.AddressBlockList, error) { return m.fakeAPI.ListBlocks(ctx, o) })
}

func (m *mortalAPI) CreateBlock(ctx context.Context, b *network.AddressBlock) (*network.AddressBlock, error) {
	return do(m, func() (*network.AddressBlock, error) { return m.fakeAPI.CreateBlock(ctx, b) })
}

func (m *mortalAPI) UpdateBlock(ctx context.Context, b *network.AddressBlock) (*network.AddressBlock, error) {
	return do(m, func() (*network.AddressBlock, error) { return m.fakeAPI.UpdateBlock(ctx, b) })
}

func (m *mortalAPI) DeleteBlock(ctx context.Context, b *network.AddressBlock) error {
	_, err := do(m, func() (struct{}, error) { return struct{}{}, m.fakeAPI.DeleteBlock(ctx, b) })
	return err
}

// ledger knows which link has each address, of all nodes.
type ledger struct {
	t       *testing.T
	mu      sync.Mutex
	holders map[netip.Addr]string
}

func (l *ledger) use(address netip.Addr, holder string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if other, taken := l.holders[address]; taken && other != holder {
		l.t.Errorf("address %s: assigned to %s, and %s has it", address, holder, other)
	}
	l.holders[address] = holder
}

func (l *ledger) free(address netip.Addr, holder string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holders[address] == holder {
		delete(l.holders, address)
	}
}

// faultyNode is a node with plugins that are killed at random. Its records survive them.
type faultyNode struct {
	*testNode
	ledger *ledger
	random *rand.Rand
	api    *mortalAPI
	plugin *ipam.Allocator
	stop   func() // waits until the plugin has stopped
	pods   int
	// kept are the pods of a StatefulSet; the node locks the pods that run on it.
	kept    []sync.Mutex
	running map[ipam.Owner]int // the owner's index in kept
}

func (n *faultyNode) restart(ctx context.Context, mortal bool) {
	if n.stop != nil {
		n.api.kill()
		n.stop()
	}
	ctx, cancel := context.WithCancel(ctx)
	n.api = &mortalAPI{fakeAPI: n.testNode.api}
	if mortal {
		n.api.random = rand.New(rand.NewPCG(n.random.Uint64(), 5))
	}
	n.pods++
	var stopped func()
	n.plugin, stopped = n.start(ctx, fmt.Sprint("p", n.pods), 20*time.Millisecond, n.api)
	n.stop = func() { cancel(); stopped() }
}

func (n *faultyNode) holder(o ipam.Owner) string { return n.name + "/" + o.Claim }

// attach assigns an address to a pod. kept is the index of a pod of the StatefulSet, or -1.
func (n *faultyNode) attach(ctx context.Context, kept int) {
	n.pods++
	r := ipam.Request{Pools: []string{"office"}, PodNamespace: "default", Owner: owner(n.pods)}
	if kept >= 0 {
		r.Keep, r.Pod = true, fmt.Sprint("web-", kept)
	}
	_ = n.plugin.Assign(ctx, r, n.used, func(as ipam.Assignment) error {
		if n.api.isKilled() {
			return errKilled
		}
		for _, p := range as.Addresses {
			n.ledger.use(p.Addr(), n.holder(r.Owner))
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		n.records[r.Owner] = as
		return nil
	})
	n.mu.Lock()
	defer n.mu.Unlock()
	_, attached := n.records[r.Owner]
	if kept >= 0 && attached {
		n.running[r.Owner] = kept
	} else if kept >= 0 {
		n.kept[kept].Unlock()
	}
}

// detach ends a pod.
func (n *faultyNode) detach(o ipam.Owner) {
	n.mu.Lock()
	addresses := n.records[o].Addresses
	for _, p := range addresses {
		n.ledger.free(p.Addr(), n.holder(o))
	}
	delete(n.records, o)
	kept, isKept := n.running[o]
	delete(n.running, o)
	n.mu.Unlock()
	for _, p := range addresses {
		n.plugin.Release(o, ipam.Address{Network: "storage", IP: p.Addr()})
	}
	if isKept {
		n.kept[kept].Unlock()
	}
}

func (n *faultyNode) owners() []ipam.Owner {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.SortedFunc(maps.Keys(n.records), func(a, b ipam.Owner) int {
		return cmp.Compare(a.Namespace, b.Namespace)
	})
}

// lose does what the controller does with a lost node.
func (n *faultyNode) lose() {
	n.testNode.api.returnKept(n.name)
	n.testNode.api.deleteBlocksOf(n.name)
}

// act lets one thing happen on the node.
func (n *faultyNode) act(ctx context.Context) {
	if n.api.isKilled() {
		n.restart(ctx, true)
	}
	switch action := n.random.IntN(40); {
	case action < 16:
		n.attach(ctx, -1)
	case action < 24:
		if kept := n.random.IntN(len(n.kept)); n.kept[kept].TryLock() {
			n.attach(ctx, kept)
		}
	case action < 37:
		if owners := n.owners(); len(owners) > 0 {
			n.detach(owners[n.random.IntN(len(owners))])
		}
	case action < 38: // the machine fails, and reboots after its blocks have returned
		n.api.kill()
		for _, o := range n.owners() {
			n.detach(o)
		}
		n.lose()
	case action < 39: // the machine is cut off, and returns after its blocks have returned
		n.api.kill()
		for _, o := range n.owners() { // other nodes may get the addresses; see the end of the test
			for _, p := range n.records[o].Addresses {
				n.ledger.free(p.Addr(), n.holder(o))
			}
		}
		n.lose()
	default: // another plugin takes over
		n.restart(ctx, true)
	}
}

// Nodes assign single addresses and blocks of a small pool at the same time. Requests fail, some of them
// after the API server has carried them out, plugins are killed before and after requests, and
// nodes are lost. No two links ever have the same address, and at the end every address can be assigned.
func TestAssign_randomFaults(t *testing.T) {
	const addresses = 16
	for seed := range uint64(8) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) {
				s.Ranges, s.BlockSize = []string{"10.20.1.0/28"}, ptr.To(int32(4))
			}))
			api.reportShort, api.faults = true, rand.New(rand.NewPCG(seed, 1))
			ledger := &ledger{t: t, holders: map[netip.Addr]string{}}
			kept := make([]sync.Mutex, 6)
			var nodes []*faultyNode
			var group sync.WaitGroup
			for i := range 4 {
				n := &faultyNode{
					testNode: newNode(t, api, fmt.Sprint("n", i)), ledger: ledger, kept: kept,
					random: rand.New(rand.NewPCG(seed, uint64(10+i))), running: map[ipam.Owner]int{}, pods: 1000 * i,
				}
				nodes = append(nodes, n)
				n.restart(t.Context(), true)
				group.Go(func() {
					for range 200 {
						n.act(t.Context())
					}
				})
			}
			group.Wait()

			api.setFaults(nil)
			for _, n := range nodes {
				n.stop()
				n.onLost(nil)
				n.restart(t.Context(), false)
				t.Cleanup(func() { n.stop() })
			}
			eventually.Eventually(t, waitTimeout, "the nodes know which addresses they have lost", func() error {
				for _, n := range nodes {
					if !n.knowsLost() {
						return errors.New(n.name + " does not")
					}
				}
				return nil
			})
			holders := map[netip.Addr]string{}
			for _, n := range nodes {
				for _, address := range n.notLost() {
					if other, taken := holders[address]; taken {
						t.Errorf("nodes %s and %s have address %s", other, n.name, address)
					}
					holders[address] = n.name
				}
			}

			for _, n := range nodes {
				for _, o := range n.owners() {
					n.detach(o)
				}
				if n != nodes[0] {
					n.restart(t.Context(), false) // it no longer knows which addresses it had
				}
			}
			eventually.Eventually(t, waitTimeout, "every address can be assigned", func() error {
				api.deleteReturned() // the StatefulSet is deleted
				nodes[0].attach(t.Context(), -1)
				if n := len(nodes[0].owners()); n < addresses {
					return fmt.Errorf("%d of %d are assigned", n, addresses)
				}
				return nil
			})
		})
	}
}
