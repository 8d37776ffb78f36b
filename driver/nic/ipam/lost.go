// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"go4.org/netipx"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
)

// The controller deletes the blocks of a node that no longer exists, or that an administrator has declared out of
// service. If the node was only cut off, its pods still run, and another node may assign their addresses. These are
// lost addresses. The plugin finds them by watching the node's blocks, or when it starts.

func (l Lost) String() string {
	var texts []string
	for address, node := range l {
		text := address.Network + " " + address.IP.String()
		if node != "" {
			text += " (node " + node + ")"
		}
		texts = append(texts, text)
	}
	slices.Sort(texts)
	return strings.Join(texts, ", ")
}

// LostReason describes why an address is lost, for a message.
func LostReason(node string) string {
	const returned = "the node's AddressBlock was deleted, as if the node were gone"
	if node == "" {
		return returned
	}
	return fmt.Sprintf("%s, and node %s has the address now", returned, node)
}

// Recover finds the used addresses that the node lost while no plugin ran, and calls Options.OnLost. It does not call
// the API server if no address is in use. used returns the addresses in the node's records.
func (a *Allocator) Recover(ctx context.Context, used func() (Used, error)) error {
	recorded, err := used()
	if err != nil || len(recorded.Owners) == 0 {
		return err
	}
	unlock, err := a.lockAllocation(ctx, used)
	if err == nil {
		unlock()
	}
	return err
}

// watchBlocks notices when blocks of this node are deleted, until ctx ends.
func (a *Allocator) watchBlocks(ctx context.Context) {
	nodeSelector := fields.OneTermEqualSelector(fieldNode, a.options.Node).String()
	_, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: &cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				o.FieldSelector = nodeSelector
				return a.options.API.ListBlocks(ctx, o)
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				o.FieldSelector = nodeSelector
				return a.options.API.WatchBlocks(ctx, o)
			},
		},
		ObjectType: &network.AddressBlock{},
		Handler:    cache.ResourceEventHandlerFuncs{DeleteFunc: a.blockDeleted},
	})
	var synced sync.WaitGroup
	defer synced.Wait()
	synced.Go(func() {
		if cache.WaitForCacheSync(ctx.Done(), controller.HasSynced) {
			a.readAgain() // the watch does not show what was deleted before it started
		}
	})
	controller.RunWithContext(ctx)
}

// readAgain requests maintenance, which then rereads the blocks.
func (a *Allocator) readAgain() {
	a.blocksStale.Store(true)
	a.askMaintenance()
}

// blockDeleted handles the deletion of a block by another client. If the node still uses the block,
// the Allocator reads the blocks before it assigns the next address.
func (a *Allocator) blockDeleted(object any) {
	if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = unknown.Obj
	}
	if b, ok := object.(*network.AddressBlock); ok {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.deleted[b.UID] = true
		a.askMaintenance()
	}
}

// invalidateIfDeleted makes the Allocator reread the blocks and records if another program has deleted one of its
// blocks. The caller must hold the allocation lock.
func (a *Allocator) invalidateIfDeleted() {
	a.mu.Lock()
	defer a.mu.Unlock()
	isDeleted := func(b *block) bool { return a.deleted[b.object.UID] }
	if slices.ContainsFunc(a.blocks, isDeleted) {
		a.used = nil
	}
	clear(a.deleted)
}

// findLost determines which used addresses are not in any of the node's blocks, and takes those that no other node
// has. The caller must have both locks.
func (a *Allocator) findLost(ctx context.Context) {
	lost := Lost{}
	for address := range a.used {
		if !a.has(address) {
			lost[address] = ""
		}
	}
	if len(lost) > 0 {
		// An error must not keep the node from assigning other addresses.
		if err := a.takeBack(ctx, lost); err != nil {
			klog.FromContext(ctx).Error(err, "Failed to take back lost addresses; retrying")
		}
	}
	if len(lost) > 0 && !maps.Equal(a.lost, lost) {
		klog.FromContext(ctx).Info("Pods have addresses that the node has lost", "addresses", lost.String())
	}
	a.setLost(lost)
}

// setLost sets which addresses are lost, and reports a change. The caller must have the allocation lock.
func (a *Allocator) setLost(lost Lost) {
	if a.lost != nil && maps.Equal(a.lost, lost) {
		return
	}
	a.lost = lost
	if a.options.OnLost != nil {
		a.options.OnLost(maps.Clone(lost))
	}
}

// has reports whether one of the node's blocks has an address.
func (a *Allocator) has(address Address) bool {
	return slices.ContainsFunc(a.blocks, func(b *block) bool {
		return b.object.Spec.Network == address.Network && b.addresses.Contains(address.IP)
	})
}

// takeBack creates blocks for the lost addresses that no node has, and removes these addresses from lost. For the
// others, it sets the node.
func (a *Allocator) takeBack(ctx context.Context, lost Lost) (failed error) {
	objects, err := a.pools.all(ctx)
	if err != nil {
		return err
	}
	for _, object := range objects {
		pool, err := addresspool.Parse(object)
		if err != nil {
			continue // nodes take no addresses from an invalid pool
		}
		if err := a.takeBackFrom(ctx, pool, lost); err != nil {
			failed = errors.Join(failed, fmt.Errorf("AddressPool %s: %w", pool.Name, err))
		}
	}
	return failed
}

// takeBackFrom creates a block for a pool's lost addresses that no node has, and removes these addresses from lost.
// For the network's other lost addresses, it sets the node.
func (a *Allocator) takeBackFrom(ctx context.Context, pool *addresspool.Pool, lost Lost) error {
	var inPool netipx.IPSetBuilder
	for address := range lost {
		if address.Network == pool.Network && pool.Addresses.Contains(address.IP) {
			inPool.Add(address.IP)
		}
	}
	if set, err := inPool.IPSet(); err != nil || len(set.Ranges()) == 0 {
		return err
	}
	assigned, blocks, err := a.assignedSet(ctx, pool)
	if err != nil {
		return err
	}
	if err := a.takeBackKept(ctx, pool, blocks, lost); err != nil {
		return err
	}
	for address := range lost {
		if address.Network == pool.Network {
			lost[address] = nodeOf(address.IP, blocks)
		}
	}
	inPool.RemoveSet(assigned)
	free, err := inPool.IPSet()
	if err != nil || len(free.Ranges()) == 0 {
		return err
	}
	// The namespace that they count toward is not known here.
	taken, err := a.create(ctx, item{pool: pool}, free, blocks, true)
	if errors.Is(err, errConflict) {
		return nil // the next maintenance finds out which node has the addresses
	}
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Took back lost addresses", "addressPool", pool.Name, "block", taken.object.Name,
		"ranges", taken.object.Spec.Ranges)
	a.blocks = append(a.blocks, taken)
	maps.DeleteFunc(lost, func(address Address, _ string) bool { return a.has(address) })
	return nil
}

// takeBackKept takes the blocks of lost addresses that pods keep and no node has, and removes
// these addresses from lost.
func (a *Allocator) takeBackKept(
	ctx context.Context, pool *addresspool.Pool, blocks []network.AddressBlock, lost Lost,
) error {
	for i := range blocks {
		b := &blocks[i]
		isLost := func(address Address) bool {
			return address.Network == pool.Network && addressesOf(b).Contains(address.IP)
		}
		if b.Spec.Node != "" || !slices.ContainsFunc(slices.Collect(maps.Keys(lost)), isLost) {
			continue
		}
		if overlaps(b, blocks) {
			continue // the node of the other block may use the address
		}
		taken, err := a.adopt(ctx, b)
		if err != nil {
			return err
		}
		a.blocks = append(a.blocks, taken)
	}
	maps.DeleteFunc(lost, func(address Address, _ string) bool { return a.has(address) })
	return nil
}
