// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"go4.org/netipx"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/klog/v2"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
)

// block is a block of this node.
type block struct {
	// object has the pool and the consumer of the block. Its ranges may be out of date.
	object    *network.AddressBlock
	addresses *netipx.IPSet
	// version is the resource version of the object. The block lock protects it.
	version string
}

func newBlock(object *network.AddressBlock) *block {
	return &block{object, addressesOf(object), object.ResourceVersion}
}

// addressesOf returns a block's addresses. For an invalid range, it returns all addresses that the range may contain.
func addressesOf(b *network.AddressBlock) *netipx.IPSet {
	addresses, _ := addresspool.ParseRanges(b.Spec.Ranges) // listBlocks logs the others
	return addresses
}

func isUnchecked(b *network.AddressBlock) bool {
	_, unchecked := b.Annotations[network.UncheckedAnnotation]
	return unchecked
}

// each calls f for each address of a block.
func (b *block) each(f func(Address)) {
	for _, r := range b.addresses.Ranges() {
		for ip := r.From(); r.Contains(ip); ip = ip.Next() {
			f(Address{b.object.Spec.Network, ip})
		}
	}
}

// listBlocks returns the blocks with a field set to value. The list includes every change that the API server had
// stored when it was requested.
func (a *Allocator) listBlocks(ctx context.Context, field, value string) ([]network.AddressBlock, error) {
	list, err := a.options.API.ListBlocks(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(field, value).String(),
	})
	if err != nil {
		return nil, err
	}
	for i := range list.Items {
		if _, invalid := addresspool.ParseRanges(list.Items[i].Spec.Ranges); len(invalid) > 0 {
			klog.FromContext(ctx).Error(nil, "Ignoring AddressBlock with invalid ranges; its addresses are not assigned",
				"block", list.Items[i].Name, "ranges", invalid)
		}
	}
	return list.Items, nil
}

// assignedSet returns the addresses in all blocks of the pool's network, and the blocks.
func (a *Allocator) assignedSet(
	ctx context.Context, pool *addresspool.Pool,
) (*netipx.IPSet, []network.AddressBlock, error) {
	blocks, err := a.listBlocks(ctx, fieldNetwork, pool.Network)
	if err != nil {
		return nil, nil, fmt.Errorf("list the AddressBlocks of network %s: %w", pool.Network, err)
	}
	var ranges []string
	for i := range blocks {
		ranges = append(ranges, blocks[i].Spec.Ranges...)
	}
	set, _ := addresspool.ParseRanges(ranges)
	return set, blocks, nil
}

// overlaps reports whether a block shares an address with one of the other blocks.
func overlaps(of *network.AddressBlock, blocks []network.AddressBlock) bool {
	addresses := addressesOf(of)
	return slices.ContainsFunc(blocks, func(b network.AddressBlock) bool {
		return b.UID != of.UID && addressesOf(&b).Overlaps(addresses)
	})
}

// nodeOf returns the node that has an address in a block, or "".
func nodeOf(address netip.Addr, blocks []network.AddressBlock) string {
	for i := range blocks {
		if addressesOf(&blocks[i]).Contains(address) {
			return blocks[i].Spec.Node
		}
	}
	return ""
}

// blockName returns the name for a block. A block that has returned its first address keeps its name, so a block that
// takes this address later gets a suffix.
func blockName(pool *addresspool.Pool, addresses *netipx.IPSet, others []network.AddressBlock) string {
	name := addresspool.BlockName(pool.Network, addresses.Ranges()[0].From())
	taken := func(name string) bool {
		return slices.ContainsFunc(others, func(b network.AddressBlock) bool { return b.Name == name })
	}
	if !taken(name) {
		return name
	}
	for i := 2; ; i++ {
		if next := fmt.Sprintf("%s-%d", name, i); !taken(next) {
			return next
		}
	}
}

// write writes a block's addresses, which must not be in any other block, or deletes the block if there are none. It
// returns the block, or nil if it was deleted. The caller must have the block lock.
func (a *Allocator) write(
	ctx context.Context, b *block, addresses *netipx.IPSet,
) (updated *network.AddressBlock, err error) {
	object := b.object.DeepCopy()
	object.ResourceVersion = b.version
	object.Spec.Ranges = addresspool.FormatRanges(addresses)
	delete(object.Annotations, network.UncheckedAnnotation)
	logger := klog.FromContext(ctx).WithValues("addressPool", object.Spec.Pool, "block", object.Name)
	if len(object.Spec.Ranges) == 0 {
		if err := a.options.API.DeleteBlock(ctx, object); err != nil {
			a.blocksStale.Store(true)
			return nil, fmt.Errorf("delete AddressBlock %s: %w", object.Name, err)
		}
		logger.V(2).Info("Returned address block")
		return nil, nil
	}
	if updated, err = a.options.API.UpdateBlock(ctx, object); err != nil {
		a.blocksStale.Store(true)
		return nil, fmt.Errorf("write the addresses of AddressBlock %s: %w", object.Name, err)
	}
	logger.V(2).Info("Wrote the addresses of a block", "ranges", object.Spec.Ranges)
	return updated, nil
}
