// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"context"
	"errors"
)

// Acquire takes blocks for the addresses that only one claim can use: those that the claim names, and those that its
// pod keeps. The plugin calls it while it prepares the claim, so the node already has the addresses when Assign
// assigns them. If another node has such an address, or another claim's pod on this node uses it, Acquire waits until
// it is free. It waits at most twice as long as Assign would, because the kubelet retries only after 60 to 90 s
// (v1.37). A pod's claims are prepared one after the other, so ctx limits their total.
//
// The node keeps the addresses that the claim names as long as used returns them as namedByClaims. Of r.Owner, Acquire
// reads only Claim.
func (a *Allocator) Acquire(ctx context.Context, r Request, used func() (Used, error)) error {
	items, err := a.pools.items(ctx, r)
	if err != nil {
		return err
	}
	a.recordsStale.Store(true) // the claim is new
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

// acquire takes a block for an item of a claim unless the node has an address for it; see Acquire.
func (a *Allocator) acquire(ctx context.Context, i item, claim string, used func() (Used, error)) error {
	attached, err := a.isAttached(ctx, i, claim, used)
	if err != nil || attached {
		return err
	}
	return a.take(ctx, i, used)
}

// isAttached reports whether a pod of the claim already uses an address for the item, as when a claim is prepared
// again. It returns an error if another claim's pod uses the address that the claim names.
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
	if _, _, err = a.chooseReserved(i); errors.As(err, &noFreeAddressError{}) {
		err = nil
	}
	return false, err
}

// ClaimsChanged makes the Allocator reread which addresses the prepared claims name, and return addresses that only
// an unprepared claim named to their pools. Call it after a claim was unprepared.
func (a *Allocator) ClaimsChanged() {
	a.recordsStale.Store(true)
	a.askMaintenance()
}
