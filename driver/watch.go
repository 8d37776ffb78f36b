// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
)

// watch handles the changes that a kind observes, until ctx ends.
func (d *Driver) watch(ctx context.Context, w Watcher) error {
	err := w.Watch(ctx, func(c Change) { d.handle(ctx, c) })
	if errors.Is(err, ErrWatchUnavailable) {
		d.degradations.report(
			ctx,
			v1alpha1.DegradedDevicesNotWatched,
			"the plugin notices added and removed devices up to "+resyncInterval.String()+" later",
			err,
		)
		return nil
	}
	return err
}

// resync periodically repeats what events should have triggered. Restoring compares all shares with the kernel in one
// pass, but reading an attachment's status takes separate requests, so each round reads the status of one in
// statusRounds claims.
func (d *Driver) resync(ctx context.Context) {
	tick := time.NewTicker(resyncInterval)
	defer tick.Stop()
	for round := uint32(0); ; round++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		switch {
		case !d.handover.isNewest():
			d.outdated.Store(true)
		case d.outdated.CompareAndSwap(true, false): // a newer plugin ran and stopped
			d.resumeAfterOther(ctx)
		default:
			d.publisher.requestRefresh()
			d.reporter.enqueueRound(round)
			d.restoreDifferences(ctx)
		}
	}
}

// handle reacts to a change. During a rolling update, only the newest plugin does: the two may be configured
// differently.
func (d *Driver) handle(ctx context.Context, c Change) {
	klog.FromContext(ctx).V(5).Info("Observed a change", "resync", c.Resync, "devicesChanged", c.Devices,
		"detached", c.Detached != nil, "modified", c.Modified != nil, "unprotected", c.Unprotected != nil)
	if !d.handover.isNewest() {
		d.outdated.Store(true)
		return
	}
	if c.Resync || c.Devices {
		d.publisher.requestRefresh()
	}
	if c.Resync {
		d.restore(ctx)
		return
	}
	if c.Detached != nil {
		d.endedSandboxes.add(c.Detached)
	}
	if c.Modified != nil {
		for _, r := range d.records.readableAttachments(ctx, c.Modified) {
			d.protect(ctx, r)
			d.reporter.enqueue(types.UID(r.ClaimUID))
		}
	}
	if c.Unprotected != nil {
		for _, r := range d.records.readableAttachments(ctx, c.Unprotected) {
			d.protect(ctx, r)
		}
	}
}

// protect lets an attachment's kind block it if the pod has changed it; see Protector.
func (d *Driver) protect(ctx context.Context, r attach.Record) {
	p, ok := d.records.shareOfAttachment(r).attacher.(Protector)
	if !ok {
		return
	}
	if err := p.Protect(r); err != nil && ctx.Err() == nil {
		klog.FromContext(WithAttachment(ctx, r.ClaimUID, r.Share, r.Pod)).
			Error(err, "Failed to protect other pods from a change of an attachment")
	}
}

// eachAttachment calls do for each selected attachment that is still recorded; see withEachClaimLocked.
func (d *Driver) eachAttachment(
	ctx context.Context,
	selected func(*attach.Record) bool,
	do func(context.Context, share, attach.Record) error,
) {
	d.withEachClaimLocked(ctx, d.records.readableAttachments(ctx, selected), do)
}

// withEachClaimLocked calls do for each attachment that is still recorded. It reads the record again with the claim's
// lock held, because a concurrent attempt to attach may have changed it. It logs the errors.
func (d *Driver) withEachClaimLocked(
	ctx context.Context,
	attached []attach.Record,
	do func(context.Context, share, attach.Record) error,
) {
	for _, r := range attached {
		ctx := WithAttachment(ctx, r.ClaimUID, r.Share, r.Pod)
		err := d.locks.withClaim(ctx, types.UID(r.ClaimUID), func(ctx context.Context) error {
			current, err := d.records.attachments.Read(r.ClaimUID, r.Share, r.Namespace)
			if errors.Is(err, os.ErrNotExist) {
				return nil
			}
			if err != nil {
				return err
			}
			return do(ctx, d.records.shareOfAttachment(current), current)
		})
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Failed to process attachment")
		}
	}
}
