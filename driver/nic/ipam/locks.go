// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"context"
	"fmt"
	"os"

	"github.com/dra-shared/dra-driver-shared/driver/lock"
)

// A node's plugins have two locks:
//
//   - A plugin holds the block lock while it reads, takes, or returns blocks, including its requests to the API
//     server. So no plugin sees a block before it is known not to overlap another.
//   - A plugin holds the allocation lock while it assigns an address or changes its list of the node's blocks.
//     Assignments do not wait for the API server, unless the plugin must read the blocks first (see load).
//
// The order is block lock, then allocation lock.
const (
	blockLock      = "address-blocks"
	allocationLock = "addresses"
)

// nodeLock is a lock shared by the node's plugins and by this plugin's goroutines.
type nodeLock struct {
	dir  lock.Dir
	name string
	held chan struct{} // has an element while a goroutine has the lock or waits for another plugin
}

func newNodeLock(dir lock.Dir, name string) nodeLock {
	return nodeLock{dir, name, make(chan struct{}, 1)}
}

// lock waits for the lock until ctx ends.
func (l nodeLock) lock(ctx context.Context) (unlock func(), err error) {
	select {
	case l.held <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the lock %s: %w", l.name, context.Cause(ctx))
	}
	release, err := l.dir.NamedContext(ctx, l.name)
	if err != nil {
		<-l.held
		return nil, err
	}
	return func() { release(); <-l.held }, nil
}

// lockAllocation waits for the allocation lock, and updates the Allocator's lists of the node's blocks and of the
// addresses in use. If it must read the blocks to do so, it also waits for the block lock. used returns the addresses
// in the node's records.
func (a *Allocator) lockAllocation(ctx context.Context, used func() (Used, error)) (unlock func(), err error) {
	if unlock, err = a.allocation.lock(ctx); err != nil {
		return nil, err
	}
	if a.forgetUnlessCurrent() {
		if err := a.update(ctx, used); err != nil {
			unlock()
			return nil, err
		}
		return unlock, nil
	}
	unlock()
	unlockBlocks, err := a.blockLock.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlockBlocks()
	return a.lockAllocationUnderBlockLock(ctx, used)
}

// lockAllocationUnderBlockLock is lockAllocation for callers that hold the block lock. It also reads the blocks
// after a failed request to change one.
func (a *Allocator) lockAllocationUnderBlockLock(
	ctx context.Context, used func() (Used, error),
) (unlock func(), err error) {
	if unlock, err = a.allocation.lock(ctx); err != nil {
		return nil, err
	}
	if a.forgetUnlessCurrent() && !a.blocksStale.Load() {
		if err := a.update(ctx, used); err != nil {
			unlock()
			return nil, err
		}
		return unlock, nil
	}
	unlock()                   // assignments do not wait for the API server
	a.blocksStale.Store(false) // before the blocks are read: what changes afterward sets it again
	unlock, err = a.reload(ctx, used)
	if err != nil {
		a.blocksStale.Store(true)
	}
	return unlock, err
}

// reload reads the blocks, and returns with the allocation lock held. The caller holds the block lock.
func (a *Allocator) reload(ctx context.Context, used func() (Used, error)) (unlock func(), err error) {
	read, err := a.readBlocks(ctx)
	if err != nil {
		return nil, err
	}
	if unlock, err = a.allocation.lock(ctx); err != nil {
		return nil, err
	}
	if err = a.load(ctx, read, used); err == nil {
		err = a.update(ctx, used)
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// forgetUnlessCurrent forgets the addresses in use if one of the node's blocks was deleted, and reports whether the
// Allocator's list of the node's blocks is current: no other plugin has assigned addresses since this one did, and no
// block was deleted. The caller must have the allocation lock.
func (a *Allocator) forgetUnlessCurrent() (current bool) {
	a.invalidateIfDeleted()
	last, err := os.ReadFile(a.options.LastPluginFile)
	return err == nil && string(last) == a.options.Instance && a.used != nil
}
