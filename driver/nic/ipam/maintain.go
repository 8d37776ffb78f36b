// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go4.org/netipx"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

const (
	// maintenanceInterval is how often the plugin looks for blocks that it can return.
	maintenanceInterval = 30 * time.Second
	// standbyDelay is how long after a pool was short a node does not take a standby block. If all nodes took one at
	// the same time, the pool would be short again.
	standbyDelay = 2 * time.Minute
)

// Run watches the pools, and takes and returns blocks, until ctx ends. used returns the addresses in the node's
// records.
func (a *Allocator) Run(ctx context.Context, used func() (Used, error)) {
	var watches sync.WaitGroup
	defer watches.Wait()
	watches.Go(func() { a.pools.watch(ctx, a.askMaintenance) })
	watches.Go(func() { a.watchBlocks(ctx) })
	tick := time.NewTicker(maintenanceInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			a.requestReread(ctx)
		case <-a.maintain:
		}
		if err := a.maintainBlocks(ctx, used); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Failed to maintain address blocks; retrying")
		}
	}
}

// Cleanup removes LastPluginFile. Run must have returned, and no other plugin may run on the node. The node's blocks
// stay: the controller deletes them with their node, and the next plugin uses them again.
func (a *Allocator) Cleanup() error {
	return files.Remove(a.options.Failpoints, "last address plugin", a.options.LastPluginFile)
}

// requestReread makes the Allocator read the records before it assigns the next address: another plugin of this node
// may have detached pods. Before it maintains the blocks, the plugin also rereads them if the node has lost
// addresses, because another node may have returned them, or if it withholds addresses, because the unreadable
// records may no longer exist.
func (a *Allocator) requestReread(ctx context.Context) {
	unlock, err := a.allocation.lock(ctx)
	if err != nil {
		return // ctx has ended, or the lock file cannot be opened: the next tick tries again
	}
	defer unlock()
	if len(a.blocks) > 0 { // without blocks, no address is in use that is not lost
		a.recordsStale.Store(true)
	}
	if len(a.lost)+len(a.unreadable) > 0 {
		a.blocksStale.Store(true)
	}
}

// maintainBlocks returns unused blocks. If the node has assigned all its addresses from a pool, it takes another
// block.
func (a *Allocator) maintainBlocks(ctx context.Context, used func() (Used, error)) (failed error) {
	if a.pools.watched.Load() == nil {
		return nil // the pools are not known yet; the watch asks again
	}
	objects, err := a.pools.all(ctx)
	if err != nil {
		return err
	}
	deleted, err := a.deletedPools(ctx, objects, used)
	if err != nil {
		return err
	}
	for _, object := range append(objects, deleted...) {
		needsBlock, err := a.returnUnused(ctx, object, used)
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		pool, err := find(objects, object.Name)
		if err != nil || !needsBlock || isShort(object) || wasShort(object, time.Now()) {
			continue // the condition of an unready pool states the reason
		}
		err = a.take(ctx, item{pool: pool}, used) // for any pod
		if err != nil && !errors.Is(err, errExhausted) && !errors.Is(err, errConflict) {
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// deletedPools returns the nonexistent pools of the node's blocks, as pools that are being deleted.
func (a *Allocator) deletedPools(
	ctx context.Context, existing []*network.AddressPool, used func() (Used, error),
) (deleted []*network.AddressPool, err error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	unlockBlocks, err := a.blockLock.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlockBlocks()
	unlock, err := a.lockAllocationUnderBlockLock(ctx, used)
	if err != nil {
		return nil, err
	}
	defer unlock()
	for _, b := range a.blocks {
		named := func(o *network.AddressPool) bool { return o.Name == b.object.Spec.Pool }
		if slices.ContainsFunc(existing, named) || slices.ContainsFunc(deleted, named) {
			continue
		}
		now := metav1.Now()
		deleted = append(deleted, &network.AddressPool{
			ObjectMeta: metav1.ObjectMeta{Name: b.object.Spec.Pool, DeletionTimestamp: &now},
		})
	}
	return deleted, nil
}

// returnUnused returns a pool's unused addresses. If the pool is short, it returns all of them; otherwise, it returns
// unused blocks, but keeps one if the node uses another. It reports whether the node uses all of its addresses from
// the pool.
func (a *Allocator) returnUnused(
	ctx context.Context, object *network.AddressPool, used func() (Used, error),
) (needsBlock bool, failed error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	unlockBlocks, err := a.blockLock.lock(ctx)
	if err != nil {
		return false, err
	}
	defer unlockBlocks()
	shrunk, needsBlock, err := a.giveUpUnused(ctx, object, used)
	if err != nil {
		return false, err
	}
	for _, b := range shrunk {
		failed = errors.Join(failed, a.returnExcept(ctx, b))
	}
	return needsBlock && failed == nil, failed
}

// giveUpUnused removes a pool's unused addresses from the Allocator's blocks, and returns the blocks that the caller
// must write; see returnUnused.
func (a *Allocator) giveUpUnused(
	ctx context.Context, object *network.AddressPool, used func() (Used, error),
) (shrunk []*block, needsBlock bool, err error) {
	unlock, err := a.lockAllocationUnderBlockLock(ctx, used)
	if err != nil {
		return nil, false, err
	}
	defer unlock()
	pool, err := addresspool.Parse(object)
	if err != nil {
		pool = &addresspool.Pool{Name: object.Name, Reserved: &netipx.IPSet{}} // it was valid when the node took the blocks
	}
	standby := 0
	if a.usesPool(pool) && !isShort(object) {
		standby = 1
	}
	var kept []*block
	for _, b := range a.blocks {
		keep := b.addresses
		if b.object.Spec.Pool == object.Name {
			needed := a.needed(b)
			isSingle := pool.NamespaceLimit > 0 || consumerOf(b.object).kind != anyPod
			keep, standby = toKeep(addresspool.Difference(b.addresses, pool.Reserved),
				addresspool.Difference(needed, pool.Reserved), isSingle || isShort(object), standby)
			keep = addresspool.Union(keep, needed)
		}
		if !keep.Equal(b.addresses) {
			a.forgetReleased(b, keep)
			b.addresses = keep
			shrunk = append(shrunk, b)
		}
		if len(keep.Ranges()) > 0 {
			kept = append(kept, b)
		}
	}
	a.blocks = kept
	return shrunk, pool.NamespaceLimit == 0 && a.usesPool(pool) && a.free(item{pool: pool}) == 0, nil
}

// usesPool reports whether attachments use a pool's addresses that are for any pod.
func (a *Allocator) usesPool(pool *addresspool.Pool) bool {
	return slices.ContainsFunc(a.blocks, func(b *block) bool {
		return b.object.Spec.Pool == pool.Name && consumerOf(b.object).kind == anyPod &&
			len(addresspool.Difference(a.needed(b), pool.Reserved).Ranges()) > 0
	})
}

// toKeep returns which addresses of a block the node keeps, and how many standby blocks it may
// keep besides this one. addresses and used do not contain reserved addresses.
func toKeep(addresses, used *netipx.IPSet, short bool, standby int) (*netipx.IPSet, int) {
	switch {
	case short || len(addresses.Ranges()) == 0:
		return used, standby
	case len(used.Ranges()) > 0:
		return addresses, standby
	case standby > 0:
		return addresses, standby - 1
	default:
		return used, standby
	}
}

// needed returns the addresses of a block that attachments use, may use, or are about to use, and those that
// prepared claims name.
func (a *Allocator) needed(b *block) *netipx.IPSet {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.requested[requestKey{consumer: poolConsumer{b.object.Spec.Pool, consumerOf(b.object)}}] > 0 {
		return b.addresses
	}
	var set netipx.IPSetBuilder
	b.each(func(address Address) {
		namedByClaims := a.namedByClaims[address] || a.namedByClaims[Address{IP: address.IP}]
		if a.isInUse(address) || namedByClaims || a.requested[requestKey{address: address}] > 0 {
			set.Add(address.IP)
		}
	})
	result, _ := set.IPSet() // fails only if an invalid address was added
	return result
}

// forgetReleased removes addresses that the node returns from the map released.
func (a *Allocator) forgetReleased(b *block, kept *netipx.IPSet) {
	b.each(func(address Address) {
		if !kept.Contains(address.IP) {
			delete(a.released, address)
		}
	})
}

// returnExcept returns the addresses in b's object that b no longer has. An address that a pod keeps stays assigned
// to the pod.
func (a *Allocator) returnExcept(ctx context.Context, b *block) error {
	if len(b.addresses.Ranges()) == 0 && b.object.Spec.Pod != "" {
		return a.returnKept(ctx, b)
	}
	updated, err := a.write(ctx, b, b.addresses)
	if err == nil && updated != nil {
		b.version = updated.ResourceVersion
	}
	return err
}
