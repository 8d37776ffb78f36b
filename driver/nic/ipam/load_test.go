// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
)

// A plugin that was killed between the creation of its block and the check leaves a
// block that may overlap another. Its successor does not use it.
func TestLoad_deletesUnusedOverlappingBlock(t *testing.T) {
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
func TestLoad_returnsUnusedDuplicateAddresses(t *testing.T) {
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
func TestLoad_keepsUsedDuplicateAddresses(t *testing.T) {
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

// A plugin was killed before it could compare its block, which it created to take back lost addresses, with that of
// n2. Both blocks have an address that a link on n1 uses, and perhaps one on n2.
func TestLoad_losesDuplicateAddressesOfUncheckedBlock(t *testing.T) {
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
func TestLoad_checksUncheckedBlock(t *testing.T) {
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
