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

// restore makes the node agree with the records: it restores what an earlier plugin attached, and detaches shares
// from sandboxes that ended while no plugin ran or events were lost. Then it reports the status of all attachments.
// It logs errors, because one share that fails must not affect the others.
func (d *Driver) restore(ctx context.Context) {
	for _, r := range d.restoreDifferences(ctx) {
		d.reporter.enqueue(types.UID(r.ClaimUID))
	}
}

// restoreDifferences restores specs, metadata, and attachments that differ from the records, and reports
// the claims of attachments that differed. It returns all attachments.
func (d *Driver) restoreDifferences(ctx context.Context) []attach.Record {
	d.restoreSpecs(ctx)
	d.deviceMetadata.restore(ctx)
	attached := d.records.readableAttachments(ctx, func(*attach.Record) bool { return true })
	d.withEachClaimLocked(ctx, d.altered(ctx, attached), func(ctx context.Context, s share, r attach.Record) error {
		err := d.restoreAttachment(ctx, s, r)
		d.reporter.enqueue(types.UID(r.ClaimUID))
		return err
	})
	return attached
}

// altered returns the attachments that may differ from what was set up. For a kind that is not a
// Comparer, these are all attachments.
func (d *Driver) altered(ctx context.Context, attached []attach.Record) (altered []attach.Record) {
	byKind := d.attachmentsByKind(ctx, attached)
	for _, k := range d.kinds.all {
		attachments := byKind[k.Name()]
		if comparer, ok := k.(Comparer); ok && len(attachments) > 0 {
			differing, err := comparer.Altered(ctx, attachments)
			if err == nil {
				attachments = differing
			} else {
				klog.FromContext(ctx).Error(err, "Failed to compare attachments with the kernel; restoring each", "kind", k.Name())
			}
		}
		for _, a := range attachments {
			altered = append(altered, a.Record)
		}
	}
	return altered
}

// attachmentsByKind returns the attachments of shares that are attached, by kind name.
func (d *Driver) attachmentsByKind(ctx context.Context, attached []attach.Record) map[string][]Attachment {
	claims := map[string]*record.Claim{}
	for _, c := range d.records.readableClaims(ctx) {
		claims[string(c.UID)] = c
	}
	byKind := map[string][]Attachment{}
	for _, r := range attached {
		s := d.records.shareOf(claims[r.ClaimUID], r)
		if s.attacher != nil {
			byKind[s.kind.Name()] = append(byKind[s.kind.Name()], Attachment{Share: s.Share, Record: r})
		}
	}
	return byKind
}

func (d *Driver) restoreAttachment(ctx context.Context, s share, r attach.Record) error {
	if s.attacher == nil {
		return nil
	}
	exists, err := s.attacher.Restore(ctx, s.Share, r)
	if err == nil && !exists {
		return d.detachEnded(ctx, s, r)
	}
	return err
}

// restoreSpecs restores the CDI specs of prepared claims that cannot be used; see claimSpecs.ensure.
// Restarting containers need them. After a reboot the kubelet prepares all claims again.
func (d *Driver) restoreSpecs(ctx context.Context) {
	for _, c := range d.records.readableClaims(ctx) {
		if c.Phase != record.Prepared || !d.records.claims.Current(c) {
			continue
		}
		want, err := d.specs.devices(c.UID, d.kinds.resolveAll(c.Shares))
		if err == nil && d.specs.has(c.UID, want) {
			continue
		}
		err = d.locks.withClaim(ctx, c.UID, func(context.Context) error {
			prepared, err := d.records.preparedClaim(c.UID)
			if err != nil || prepared == nil {
				return err
			}
			return d.specs.ensure(prepared.UID, d.kinds.resolveAll(prepared.Shares))
		})
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).
				Error(err, "Failed to restore CDI spec", "claim", klog.KRef(c.Namespace, c.Name), "claimUID", c.UID)
		}
	}
}
