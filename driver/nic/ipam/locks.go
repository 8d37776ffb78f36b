// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"context"
	"fmt"
	"maps"
	"os"

	"k8s.io/klog/v2"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/lock"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// The plugins of a node have two locks:
//
//   - The block lock is held while a plugin reads, takes, or returns blocks, including its requests
//     to the API server. So no plugin sees a block before it is known to overlap no other.
//   - The allocation lock is held while a plugin assigns an address, and while it changes what it
//     knows of the node's blocks. Assignments do not wait for the API server, unless the plugin must
//     read the blocks first (see load).
//
// The order is block lock, then allocation lock.
const (
	blockLock      = "address-blocks"
	allocationLock = "addresses"
)

// nodeLock is a lock of the plugins of the node and of the goroutines of this one.
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

// lockAllocation waits for the allocation lock, and makes the Allocator know the node's blocks and which
// addresses are in use. If it must read the blocks for that, it waits for the block lock, too. used
// returns the addresses in the records of the node.
func (a *Allocator) lockAllocation(ctx context.Context, used func() (Used, error)) (unlock func(), err error) {
	if unlock, err = a.allocation.lock(ctx); err != nil {
		return nil, err
	}
	if a.knowsBlocks() {
		if err := a.update(used); err != nil {
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
	return a.lockAllocationToo(ctx, used)
}

// lockAllocationToo is lockAllocation for callers that have the block lock. It also reads the blocks
// if a request to change one has failed.
func (a *Allocator) lockAllocationToo(ctx context.Context, used func() (Used, error)) (unlock func(), err error) {
	if unlock, err = a.allocation.lock(ctx); err != nil {
		return nil, err
	}
	if a.knowsBlocks() && !a.uncertain.Load() {
		if err := a.update(used); err != nil {
			unlock()
			return nil, err
		}
		return unlock, nil
	}
	unlock() // assignments do not wait for the API server
	read, err := a.readBlocks(ctx)
	if err != nil {
		return nil, err
	}
	if unlock, err = a.allocation.lock(ctx); err != nil {
		return nil, err
	}
	if err = a.load(ctx, read, used); err == nil {
		err = a.update(used)
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// knowsBlocks reports whether the Allocator knows the node's blocks: no other plugin has assigned
// addresses since this one did, and no block was deleted. The caller must have the allocation lock.
func (a *Allocator) knowsBlocks() bool {
	a.forgetDeleted()
	last, err := os.ReadFile(a.options.LastPluginFile)
	return err == nil && string(last) == a.options.Instance && a.used != nil
}

// nodeBlocks are the blocks of the node, and those of each network of which the node has blocks.
type nodeBlocks struct {
	own       []network.AddressBlock
	ofNetwork map[string][]network.AddressBlock
}

// readBlocks reads the node's blocks. The caller must have the block lock.
func (a *Allocator) readBlocks(ctx context.Context) (read nodeBlocks, err error) {
	read.ofNetwork = map[string][]network.AddressBlock{}
	if read.own, err = a.listBlocks(ctx, fieldNode, a.options.Node); err != nil {
		return read, fmt.Errorf("list the AddressBlocks of node %s: %w", a.options.Node, err)
	}
	for i := range read.own {
		name := read.own[i].Spec.Network
		if _, known := read.ofNetwork[name]; known {
			continue
		}
		if read.ofNetwork[name], err = a.listBlocks(ctx, fieldNetwork, name); err != nil {
			return read, fmt.Errorf("list the AddressBlocks of network %s: %w", name, err)
		}
	}
	return read, nil
}

// load makes the Allocator know blocks that were read, and the records; see validate and findLost. The
// caller must have both locks: which blocks are changed depends on what is in use.
func (a *Allocator) load(ctx context.Context, read nodeBlocks, used func() (Used, error)) error {
	recorded, err := used()
	if err != nil {
		return fmt.Errorf("read which addresses are in use: %w", err)
	}
	a.used = nil
	a.uncertain.Store(false)
	var blocks []*block
	for i := range read.own {
		b := newBlock(&read.own[i])
		if keep, err := a.validate(ctx, b, read.ofNetwork[b.object.Spec.Network], recorded); err != nil {
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
	a.blocks, a.used, a.rereadRecords = blocks, recorded, false
	a.findLost(ctx)
	klog.FromContext(ctx).V(2).Info("Read address blocks", "blocks", len(blocks), "used", len(recorded))
	return nil
}

// update makes the Allocator know which addresses are in use. The caller must have the allocation lock.
func (a *Allocator) update(used func() (Used, error)) error {
	if a.rereadRecords {
		recorded, err := used()
		if err != nil {
			return fmt.Errorf("read which addresses are in use: %w", err)
		}
		a.used, a.rereadRecords = recorded, false
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
