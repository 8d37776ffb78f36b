// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// restore makes the node agree with the records: it restores what an earlier
// plugin attached, and detaches shares from sandboxes that ended while no
// plugin was running or while events were lost. It logs errors, because one
// share that fails must not affect the others.
func (d *Driver) restore(ctx context.Context) {
	d.restoreSpecs(ctx)
	d.restoreMetadata(ctx)
	all := func(attach.Record) bool { return true }
	d.eachAttachment(ctx, all, d.restoreAttachment)
}

func (d *Driver) restoreAttachment(ctx context.Context, s share, r attach.Record) error {
	if s.attacher == nil {
		return nil
	}
	exists, err := s.attacher.Restore(ctx, s.Share, r)
	if err == nil && !exists {
		return d.detachEnded(ctx, s, r)
	}
	d.status.enqueue(types.UID(r.ClaimUID))
	return err
}

// restoreSpecs restores the CDI specs of prepared claims that were removed or
// changed: restarting containers need them. After a reboot the kubelet prepares
// all claims again.
func (d *Driver) restoreSpecs(ctx context.Context) {
	for _, c := range d.readableClaims(ctx) {
		if c.Phase != record.Prepared || !d.claims.Current(c) {
			continue
		}
		err := d.withClaim(ctx, c.UID, func(context.Context) error {
			prepared, err := d.preparedClaim(c.UID)
			if err != nil || prepared == nil {
				return err
			}
			return d.ensureSpec(prepared)
		})
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).
				Error(err, "Failed to restore CDI spec", "claim", klog.KRef(c.Namespace, c.Name), "claimUID", c.UID)
		}
	}
}
