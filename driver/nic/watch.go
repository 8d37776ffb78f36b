// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

// changeInterval is the shortest time between two calls to the driver. Otherwise, a pod that changes its links in a
// loop would keep a CPU busy.
const changeInterval = 250 * time.Millisecond

// Watch implements driver.Watcher with the kernel's netlink events. changed may wait for a claim's lock, but the
// event reader must not, or its socket would overflow. Therefore, changes accumulate while changed runs.
func (k *Kind) Watch(ctx context.Context, changed func(driver.Change)) error {
	pending := &pendingChange{ready: make(chan struct{}, 1)}
	var consumer sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	defer consumer.Wait()
	defer cancel()
	consumer.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-pending.ready:
				changed(changeOfNetwork(pending.take()))
			case <-k.duplicates.changed:
				changed(changeOfDuplicates(k.duplicates.takeAltered()))
			case <-k.hidden.changed:
				changed(driver.Change{Devices: true})
			case <-k.lost.changed:
				changed(changeOfLostAddresses(k.lost.takeAltered()))
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(changeInterval):
			}
		}
	})
	consumer.Go(func() { k.inspectRegularly(ctx) })
	return k.node.Watch(ctx, pending.add)
}

// changeOfNetwork translates a change of the network for the driver.
func changeOfNetwork(c netdev.Change) driver.Change {
	change := driver.Change{Resync: c.Resync, Devices: c.LinksChanged || len(c.QdiscsChanged) > 0}
	if len(c.NamespacesRemoved) > 0 {
		change.Detached = func(r *attach.Record) bool { return slices.Contains(c.NamespacesRemoved, r.Namespace.NSID) }
	}
	if c.NamespacesMissed { // netdev reports all namespaces as changed once pods cause fewer events
		change.Unprotected = func(r *attach.Record) bool { return r.Kind == Name }
	}
	if len(c.NamespacesChanged) > 0 || len(c.QdiscsChanged) > 0 {
		change.Modified = func(r *attach.Record) bool {
			if slices.Contains(c.NamespacesChanged, r.Namespace.NSID) {
				return true
			}
			if len(c.QdiscsChanged) == 0 {
				return false // does not decode the payload, because there may be thousands of records
			}
			link, err := r.Link()
			return err == nil && slices.Contains(c.QdiscsChanged, link.Parent)
		}
	}
	return change
}

// changeOfDuplicates returns the change of the status of links.
func changeOfDuplicates(links map[linkID]bool) driver.Change {
	return driver.Change{Modified: func(r *attach.Record) bool {
		link, err := r.Link()
		return err == nil && r.Kind == Name && links[idOf(link)]
	}}
}

// pendingChange accumulates changes until they are taken.
type pendingChange struct {
	mu     sync.Mutex
	change netdev.Change
	ready  chan struct{} // has an element if there is a change
}

func (p *pendingChange) add(c netdev.Change) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.change.Resync = p.change.Resync || c.Resync
	p.change.NamespacesMissed = p.change.NamespacesMissed || c.NamespacesMissed
	p.change.LinksChanged = p.change.LinksChanged || c.LinksChanged
	p.change.NamespacesRemoved = union(p.change.NamespacesRemoved, c.NamespacesRemoved)
	p.change.NamespacesChanged = union(p.change.NamespacesChanged, c.NamespacesChanged)
	p.change.QdiscsChanged = union(p.change.QdiscsChanged, c.QdiscsChanged)
	select {
	case p.ready <- struct{}{}:
	default: // the consumer has not taken the last change yet
	}
}

// union appends the elements of b that a lacks.
func union(a, b []int) []int {
	for _, i := range b {
		if !slices.Contains(a, i) {
			a = append(a, i)
		}
	}
	return a
}

func (p *pendingChange) take() netdev.Change {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.change
	p.change = netdev.Change{}
	return c
}
