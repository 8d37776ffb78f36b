// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"context"
	"errors"
)

// Acquire makes the node have the addresses that only the claim of a request can get, before the claim is
// prepared: those that the claim names, and those that its pod keeps. It fails if another node has one, or if a
// pod of another claim on this node uses one. Assign assigns the addresses later.
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
	for _, i := range items {
		if !i.reserved.IsValid() && i.consumer.kind != keepingPod {
			continue
		}
		attached, err := a.isAttached(ctx, i, r.Owner.Claim, used)
		if err != nil {
			return err
		}
		if attached {
			continue
		}
		if err := a.takeOrWait(ctx, i, used); err != nil {
			return err
		}
	}
	return nil
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
