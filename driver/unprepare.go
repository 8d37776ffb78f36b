// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// UnprepareResourceClaims implements kubeletplugin.DRAPlugin. The kubelet calls
// it when the last pod of a claim on this node has ended; the claim itself may
// have been deleted. Unpreparing a claim that is not prepared succeeds.
func (d *Driver) UnprepareResourceClaims(
	ctx context.Context,
	claims []kubeletplugin.NamespacedObject,
) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	for _, claim := range claims {
		ctx := klog.NewContext(
			ctx,
			klog.FromContext(ctx).WithValues("claim", klog.KRef(claim.Namespace, claim.Name), "claimUID", claim.UID),
		)
		start := time.Now()
		err := d.locks.withClaim(ctx, claim.UID, func(ctx context.Context) error { return d.unprepareClaim(ctx, claim) })
		if err != nil {
			klog.FromContext(ctx).Error(err, "Failed to unprepare claim")
			err = fmt.Errorf("unprepare claim %s/%s: %w", claim.Namespace, claim.Name, err)
		}
		d.metrics.observe(operationUnprepare, start, err)
		results[claim.UID] = err
	}
	return results, nil
}

func (d *Driver) unprepareClaim(ctx context.Context, claim kubeletplugin.NamespacedObject) error {
	recorded, err := d.records.readOrRename(ctx, claim.UID)
	if errors.Is(err, record.ErrNewer) {
		err = d.records.renameUnreadable(ctx, claim.UID, err) // the kubelet must be able to end the pod
	}
	if err != nil {
		return err
	}
	if recorded == nil {
		recorded = &record.Claim{UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name}
	}
	return d.unprepare(ctx, recorded)
}

// unprepare removes attachments, their common state, the CDI spec, and
// the record, in this order. The record remains until everything else is
// removed, and no container can start once the spec is removed.
func (d *Driver) unprepare(ctx context.Context, claim *record.Claim) error {
	if len(claim.Shares) > 0 {
		claim.Phase = record.Unpreparing
		err := d.records.claims.Put(claim)
		if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
			// The kubelet evicts pods to free space, and each eviction waits for this call. If this
			// plugin is killed now, its successor serves the claim until the kubelet calls again.
			klog.FromContext(ctx).Error(err, "Failed to mark claim as being unprepared; continuing")
		} else if err != nil {
			return err
		}
	}
	shares, err := d.detachAll(ctx, claim)
	if err != nil {
		return err // the record remains, and the kubelet retries
	}
	if err := d.specs.Remove(string(claim.UID)); err != nil {
		return fmt.Errorf("remove CDI spec: %w", err)
	}
	if err := d.records.attachments.RemoveClaim(string(claim.UID)); err != nil {
		return fmt.Errorf("remove attachment records: %w", err)
	}
	if err := d.records.claims.Delete(claim.UID); err != nil {
		return fmt.Errorf("remove claim record: %w", err)
	}
	for _, s := range shares {
		if reserver, ok := s.attacher.(Reserver); ok {
			reserver.UnreserveForClaim(s.Share)
		}
	}
	// The claim's capacity is free. If its device is missing from the node, the plugin no longer needs to publish it.
	d.publisher.requestRefreshLater()
	d.reporter.written.Forget(claim.UID)
	d.failures.forget(shares)
	d.detachments.forget(claim.UID)
	if len(shares) > 0 { // otherwise the claim was not prepared
		klog.FromContext(ctx).V(2).Info("Unprepared claim", "shareCount", len(shares))
	}
	return nil
}

// detachAll detaches and releases all shares of a claim, and returns them. If the claim record is lost, it finds the
// shares in the attachment records. An attachment with an unreadable record ends with its sandbox, or garbage
// collection removes it.
func (d *Driver) detachAll(ctx context.Context, claim *record.Claim) (shares []share, failed error) {
	shares = d.kinds.resolveAll(claim.Shares)
	for _, r := range d.records.attachmentsOfClaim(ctx, claim.UID) {
		s := d.records.shareOfAttachment(r)
		if len(claim.Shares) == 0 {
			shares = append(shares, s)
		}
		failed = errors.Join(failed, d.detach(ctx, s, r))
	}
	for _, s := range shares {
		if s.attacher != nil {
			failed = errors.Join(failed, s.attacher.Release(ctx, s.Share))
		}
	}
	return shares, failed
}
