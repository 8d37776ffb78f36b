// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// Nodes share a pool, and one node has all of its addresses: once the controller reports that the pool is short, that
// node returns its unused addresses.
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

// A node that no longer uses a pool returns all of it so that the pool can be deleted.
func TestMaintenance_returnsAllBlocksOfUnusedPool(t *testing.T) {
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
