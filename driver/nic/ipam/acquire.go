// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"context"
	"errors"
)

// Acquire makes the node have the addresses that only the claim of a request can get, before the claim is
// prepared: those that the claim names, and those that its pod keeps. If another node has one, or a
// pod of another claim on this node uses one, Acquire waits for it twice as long as Assign, because the kubelet tries
// to prepare the claim again only after 60 to 90 s (v1.37). Assign assigns the addresses later.
//
// The node keeps the addresses that the claim names as long as used returns them as claimed. Of r.Owner,
// Acquire reads the claim.
func (a *Allocator) Acquire(ctx context.Context, r Request, used func() (Used, error)) error {
	items, err := a.pools.items(ctx, r)
	if err != nil {
		return err
	}
	a.rereadRecords.Store(true) // the claim is new
	defer a.keepRequested(items)()
	ctx, cancel := context.WithTimeout(ctx, 2*a.options.Wait)
	defer cancel()
	for _, i := range items {
		if !i.reserved.IsValid() && i.consumer.kind != keepingPod {
			continue
		}
		if err := retry(ctx, func() error { return a.acquire(ctx, i, r.Owner.Claim, used) }); err != nil {
			return err
		}
	}
	return nil
}

// acquire makes the node have an address for an item of a claim; see Acquire.
func (a *Allocator) acquire(ctx context.Context, i item, claim string, used func() (Used, error)) error {
	attached, err := a.isAttached(ctx, i, claim, used)
	if err != nil || attached {
		return err
	}
	return a.take(ctx, i, used)
}

// isAttached reports whether a pod of a claim uses an address for an item: the claim is prepared again. It fails if a
// pod of another claim uses the address that the claim names.
func (a *Allocator) isAttached(ctx context.Context, i item, claim string, used func() (Used, error)) (bool, error) {
	unlock, err := a.lockAllocation(ctx, used)
	if err != nil {
		return false, err
	}
	defer unlock()
	for address, owner := range a.used {
		if owner.Claim == claim && i.accepts(address) {
			return true, nil
		}
	}
	if !i.reserved.IsValid() {
		return false, nil
	}
	if _, _, err = a.chooseReserved(i); errors.As(err, &errEmpty{}) {
		err = nil
	}
	return false, err
}

// ClaimsChanged makes the Allocator read again which addresses the prepared claims name. The node returns
// the addresses that only an unprepared claim named.
func (a *Allocator) ClaimsChanged() {
	a.rereadRecords.Store(true)
	a.askMaintenance()
}
