// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// readableClaims returns all claim records that can be read, and logs the
// others. The caller must not change the records.
func (d *Driver) readableClaims(ctx context.Context) []*record.Claim {
	claims, err := d.claims.List()
	logUnreadable(ctx, err)
	return claims
}

// readableAttachments returns the attachment records that can be read and that are
// selected. It logs the unreadable ones.
func (d *Driver) readableAttachments(ctx context.Context, selected func(*attach.Record) bool) []attach.Record {
	attached, err := d.attachments.Select(selected)
	logUnreadable(ctx, err)
	return attached
}

// withoutUnreadable returns err if the records could not be listed. It logs and drops an error that only means that
// some records are unreadable.
func withoutUnreadable(ctx context.Context, err error) error {
	if errors.Is(err, files.ErrUnlisted) {
		return err
	}
	logUnreadable(ctx, err)
	return nil
}

// logUnreadable logs a non-nil err, which joins one error with a path for each unreadable record.
func logUnreadable(ctx context.Context, err error, keysAndValues ...any) {
	if err != nil {
		klog.FromContext(ctx).Error(err, "Some records are unreadable; continuing without them", keysAndValues...)
	}
}

// attachmentsOf returns the readable attachments of a share. It logs the
// others.
func (d *Driver) attachmentsOf(ctx context.Context, uid types.UID, shareName string) (attachments []attach.Record) {
	for _, a := range d.attachmentsOfClaim(ctx, uid) {
		if a.Share == shareName {
			attachments = append(attachments, a)
		}
	}
	return attachments
}

func (d *Driver) attachmentsOfClaim(ctx context.Context, uid types.UID) []attach.Record {
	all, err := d.attachments.OfClaim(string(uid))
	logUnreadable(ctx, err, "claimUID", uid)
	return all
}

// preparedClaim returns the record of a claim that is prepared, or nil.
func (d *Driver) preparedClaim(uid types.UID) (*record.Claim, error) {
	claim, err := d.claims.Get(uid)
	if err != nil || claim == nil || claim.Phase != record.Prepared {
		return nil, err
	}
	return claim, nil
}

// shareOfAttachment returns the share of an attachment.
func (d *Driver) shareOfAttachment(r attach.Record) share {
	claim, err := d.claims.Get(types.UID(r.ClaimUID))
	if err != nil {
		claim = nil
	}
	return d.shareOf(claim, r)
}

// shareOf returns the share of an attachment of a claim. If the claim record is lost, so claim is nil, it returns the
// share in the attachment record.
func (d *Driver) shareOf(claim *record.Claim, r attach.Record) share {
	if claim != nil {
		if s, ok := claim.Share(r.Share); ok {
			return d.resolve(s)
		}
	}
	return d.resolve(d.shareInRecord(r))
}

// shareInRecord returns the share that an attachment record contains. Without the field, which
// earlier releases did not write, the share lacks its capacity and parameters.
func (d *Driver) shareInRecord(r attach.Record) record.Share {
	var s record.Share
	if err := json.Unmarshal(r.RecordedShare, &s); err != nil || s.Name != r.Share {
		s = record.Share{
			Name: r.Share, Kind: r.Kind, Pool: d.options.NodeName, Device: r.Device, Number: r.Number,
			ShareID: types.UID(r.Share), // a unique substitute: "" would mean the whole device
		}
	}
	return s
}

// nodeRecords are the records that Reservers read.
type nodeRecords struct {
	*attach.Records
	claims *record.Store
}

func (d *Driver) records() Records { return nodeRecords{d.attachments, d.claims} }

// Claims implements Records.
func (r nodeRecords) Claims() ([]*record.Claim, error) {
	claims, err := r.claims.List()
	if errors.Is(err, files.ErrUnlisted) { // restore logs unreadable records
		return nil, err
	}
	return slices.DeleteFunc(claims, func(c *record.Claim) bool { return c.Phase == record.Unpreparing }), nil
}

// renameCorrupt renames records that cannot be read, and logs why.
func (d *Driver) renameCorrupt(ctx context.Context) {
	logger := klog.FromContext(ctx)
	claims, err := d.claims.RenameCorrupt()
	attachments, attachmentsErr := d.attachments.RenameCorrupt()
	if err = errors.Join(err, attachmentsErr); err != nil {
		logger.Error(err, "Failed to rename corrupt records")
	}
	if corrupt := errors.Join(append(claims, attachments...)...); corrupt != nil {
		logger.Error(
			corrupt,
			"Renamed corrupt records to *.unreadable, and removed empty ones; the plugin prepares their claims again when "+
				"the kubelet asks, and running pods keep their devices",
		)
	}
}

// removeRecordsOfOtherBoots removes attachment records from before the node booted. They exist only if the run
// directory is not on a tmpfs.
func (d *Driver) removeRecordsOfOtherBoots(ctx context.Context) {
	removed, err := d.attachments.RemoveOfOtherBoots()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		klog.FromContext(ctx).Error(err, "Failed to remove attachment records of an earlier boot")
	}
	if removed > 0 {
		klog.FromContext(ctx).Info("Removed attachment records of an earlier boot", "removed", removed)
	}
}
