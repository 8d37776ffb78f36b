// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"go4.org/netipx"
	"k8s.io/klog/v2"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// nodeBlocks are the node's blocks, and all blocks of each network where the node has any.
type nodeBlocks struct {
	own       []network.AddressBlock
	byNetwork map[string][]network.AddressBlock
}

// readBlocks reads the node's blocks. The caller must have the block lock.
func (a *Allocator) readBlocks(ctx context.Context) (read nodeBlocks, err error) {
	read.byNetwork = map[string][]network.AddressBlock{}
	if read.own, err = a.listBlocks(ctx, fieldNode, a.options.Node); err != nil {
		return read, fmt.Errorf("list the AddressBlocks of node %s: %w", a.options.Node, err)
	}
	for i := range read.own {
		name := read.own[i].Spec.Network
		if _, known := read.byNetwork[name]; known {
			continue
		}
		if read.byNetwork[name], err = a.listBlocks(ctx, fieldNetwork, name); err != nil {
			return read, fmt.Errorf("list the AddressBlocks of network %s: %w", name, err)
		}
	}
	return read, nil
}

// load replaces the Allocator's state with the blocks that were read and the records, after validating the blocks
// (see validate) and finding lost addresses (see findLost). The caller must hold both locks, because the addresses in
// use determine which blocks validate may change.
func (a *Allocator) load(ctx context.Context, read nodeBlocks, used func() (Used, error)) error {
	a.forgetEnded()
	recorded, err := a.read(used)
	if err != nil {
		return err
	}
	a.used = nil
	var blocks []*block
	for i := range read.own {
		b := newBlock(&read.own[i])
		if keep, err := a.validate(ctx, b, read.byNetwork[b.object.Spec.Network], recorded); err != nil {
			return err
		} else if keep {
			blocks = append(blocks, b)
		}
	}
	err = files.Replace(a.options.Failpoints, "last address plugin", a.options.LastPluginFile,
		[]byte(a.options.Instance), files.Options{Mode: 0o600})
	if err != nil {
		return fmt.Errorf("write the name of the plugin that assigns addresses: %w", err)
	}
	a.blocks, a.used, a.namedByClaims = blocks, recorded.Owners, recorded.NamedByClaims
	if len(recorded.Unreadable) == 0 {
		a.unreadable, a.withheld = nil, nil // the blocks were validated without them
	}
	a.withhold(ctx, recorded.Unreadable)
	a.findLost(ctx)
	klog.FromContext(ctx).V(2).Info("Read address blocks", "blockCount", len(blocks), "usedAddressCount", len(a.used))
	return nil
}

// forgetEnded forgets the addresses of attachments that have ended. Their records no longer exist. The caller reads
// the records next, and finds these addresses in use only if another plugin on the node has assigned them again in
// the meantime, maybe even to the same attachments.
func (a *Allocator) forgetEnded() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = nil
}

// read reads the records. If they change while it runs, the next update rereads them.
func (a *Allocator) read(used func() (Used, error)) (Used, error) {
	a.recordsStale.Store(false)
	recorded, err := used()
	if err != nil {
		a.recordsStale.Store(true)
		return recorded, fmt.Errorf("read which addresses are in use: %w", err)
	}
	return recorded, nil
}

// update updates the addresses in use from the records. The caller must have the allocation lock.
func (a *Allocator) update(ctx context.Context, used func() (Used, error)) error {
	if a.recordsStale.Load() {
		recorded, err := a.read(used)
		if err != nil {
			return err
		}
		a.used, a.namedByClaims = recorded.Owners, recorded.NamedByClaims
		a.withhold(ctx, recorded.Unreadable)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	lost := maps.Clone(a.lost)
	for _, e := range a.ended {
		if a.used[e.address] == e.owner {
			delete(a.used, e.address)
			delete(lost, e.address)
			a.released[e.address] = e.at
		}
	}
	a.ended = nil
	if lost != nil {
		a.setLost(lost)
	}
	return nil
}

// withhold keeps addresses that an unreadable record may contain from being assigned or returned: all of the node's
// addresses that no other record contains. It does so once for each record, so that addresses from later blocks, and
// addresses that are released later, stay available. load makes the addresses available when all records can be read
// again or are deleted with their claims. The caller must have the allocation lock.
func (a *Allocator) withhold(ctx context.Context, unreadable []string) {
	isKnown := func(name string) bool { return a.unreadable[name] }
	if len(slices.DeleteFunc(slices.Clone(unreadable), isKnown)) == 0 {
		return
	}
	if a.unreadable == nil {
		a.unreadable, a.withheld = map[string]bool{}, map[Address]bool{}
	}
	for _, name := range unreadable {
		a.unreadable[name] = true
	}
	for _, b := range a.blocks {
		b.each(func(address Address) {
			if _, inUse := a.used[address]; !inUse {
				a.withheld[address] = true
			}
		})
	}
	klog.FromContext(ctx).Info("Attachment records cannot be read; not assigning the addresses that they may contain",
		"records", a.unreadableText(), "addressCount", len(a.withheld))
}

// unreadableText lists the records that cannot be read.
func (a *Allocator) unreadableText() string {
	return strings.Join(slices.Sorted(maps.Keys(a.unreadable)), ", ")
}

// isInUse reports whether an attachment has, or may have, an address. The caller must have the
// allocation lock.
func (a *Allocator) isInUse(address Address) bool {
	_, inUse := a.used[address]
	return inUse || a.withheld[address]
}

// validate removes addresses from a block if other blocks have them: a plugin was killed, or did not get a response,
// before it could compare the new block with the others (see create). It reports whether the block remains.
//
// At most one of two such blocks was compared before the other existed, and only that block's node uses the
// addresses. So a node keeps the addresses that its attachments use, and returns the others: the creation times do
// not show which block was compared, because the API server rounds them to seconds. In an unchecked block,
// attachments use the addresses although the block was not compared. While a record cannot be read, any address may
// be in use.
func (a *Allocator) validate(
	ctx context.Context, b *block, others []network.AddressBlock, used Used,
) (keep bool, err error) {
	var left netipx.IPSetBuilder
	left.AddSet(b.addresses)
	for i := range others {
		if others[i].UID == b.object.UID {
			continue
		}
		left.RemoveSet(addressesOf(&others[i]))
	}
	if !isUnchecked(b.object) {
		b.each(func(address Address) {
			if _, inUse := used.Owners[address]; inUse || len(used.Unreadable) > 0 {
				left.Add(address.IP)
			}
		})
	}
	kept, err := left.IPSet()
	if err != nil {
		return false, err
	}
	if !kept.Equal(b.addresses) {
		klog.FromContext(ctx).Info("Address block overlaps another one; returning the addresses", "block", b.object.Name)
	}
	if kept.Equal(b.addresses) && !isUnchecked(b.object) {
		return len(kept.Ranges()) > 0, nil
	}
	updated, err := a.write(ctx, b, kept)
	if err == nil && updated != nil {
		*b = *newBlock(updated)
	}
	return updated != nil, err
}
