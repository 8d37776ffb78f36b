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

// nodeRecords are the claim records and attachment records of this node. It implements Records.
type nodeRecords struct {
	claims      *record.Store
	attachments *attach.Records
	kinds       kinds
}

// readableClaims returns all claim records that can be read, and logs the
// others. The caller must not change the records.
func (n *nodeRecords) readableClaims(ctx context.Context) []*record.Claim {
	claims, err := n.claims.List()
	logUnreadable(ctx, err)
	return claims
}

// readableAttachments returns the attachment records that can be read and that are
// selected. It logs the unreadable ones.
func (n *nodeRecords) readableAttachments(ctx context.Context, selected func(*attach.Record) bool) []attach.Record {
	attached, err := n.attachments.Select(selected)
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
func (n *nodeRecords) attachmentsOf(
	ctx context.Context, uid types.UID, shareName string,
) (attachments []attach.Record) {
	for _, a := range n.attachmentsOfClaim(ctx, uid) {
		if a.Share == shareName {
			attachments = append(attachments, a)
		}
	}
	return attachments
}

func (n *nodeRecords) attachmentsOfClaim(ctx context.Context, uid types.UID) []attach.Record {
	all, err := n.attachments.OfClaim(string(uid))
	logUnreadable(ctx, err, "claimUID", uid)
	return all
}

// preparedClaim returns the record of a claim that is prepared, or nil.
func (n *nodeRecords) preparedClaim(uid types.UID) (*record.Claim, error) {
	claim, err := n.claims.Get(uid)
	if err != nil || claim == nil || claim.Phase != record.Prepared {
		return nil, err
	}
	return claim, nil
}

// shareOfAttachment returns the share of an attachment.
func (n *nodeRecords) shareOfAttachment(r attach.Record) share {
	claim, err := n.claims.Get(types.UID(r.ClaimUID))
	if err != nil {
		claim = nil
	}
	return n.shareOf(claim, r)
}

// shareOf returns the share of an attachment of a claim. If the claim record is lost, so claim is nil, it returns the
// share in the attachment record.
func (n *nodeRecords) shareOf(claim *record.Claim, r attach.Record) share {
	if claim != nil {
		if s, ok := claim.Share(r.Share); ok {
			return n.kinds.resolve(s)
		}
	}
	return n.kinds.resolve(n.shareInRecord(r))
}

// shareInRecord returns the share that an attachment record contains. Without the field, which
// earlier releases did not write, the share lacks its capacity and parameters.
func (n *nodeRecords) shareInRecord(r attach.Record) record.Share {
	var s record.Share
	if err := json.Unmarshal(r.RecordedShare, &s); err != nil || s.Name != r.Share {
		s = record.Share{
			Name: r.Share, Kind: r.Kind, Pool: n.kinds.node, Device: r.Device, Number: r.Number,
			ShareID: types.UID(r.Share), // a unique substitute: "" would mean the whole device
		}
	}
	return s
}

// List implements Records.
func (n *nodeRecords) List() ([]attach.Record, error) { return n.attachments.List() }

// Unreadable implements Records.
func (n *nodeRecords) Unreadable() (claimUIDs map[string]string, err error) {
	return n.attachments.Unreadable()
}

// Claims implements Records.
func (n *nodeRecords) Claims() ([]*record.Claim, error) {
	claims, err := n.claims.List()
	if errors.Is(err, files.ErrUnlisted) { // restore logs unreadable records
		return nil, err
	}
	return slices.DeleteFunc(claims, func(c *record.Claim) bool { return c.Phase == record.Unpreparing }), nil
}

// renameCorrupt renames records that cannot be read, and logs why.
func (n *nodeRecords) renameCorrupt(ctx context.Context) {
	logger := klog.FromContext(ctx)
	claims, err := n.claims.RenameCorrupt()
	attachments, attachmentsErr := n.attachments.RenameCorrupt()
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
func (n *nodeRecords) removeRecordsOfOtherBoots(ctx context.Context) {
	removed, err := n.attachments.RemoveOfOtherBoots()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		klog.FromContext(ctx).Error(err, "Failed to remove attachment records of an earlier boot")
	}
	if removed > 0 {
		klog.FromContext(ctx).Info("Removed attachment records of an earlier boot", "recordCount", removed)
	}
}

// readOrRename returns a claim's record, or nil if there is none. It renames a
// corrupt record, because the attachment records contain the data to continue
// without it.
func (n *nodeRecords) readOrRename(ctx context.Context, uid types.UID) (*record.Claim, error) {
	recorded, err := n.claims.Get(uid)
	if errors.Is(err, record.ErrCorrupt) {
		return nil, n.renameUnreadable(ctx, uid, err)
	}
	return recorded, err
}

// renameUnreadable renames a claim record that cannot be read, or removes it if it is empty.
func (n *nodeRecords) renameUnreadable(ctx context.Context, uid types.UID, reason error) error {
	renamed, err := n.claims.RenameUnreadable(uid)
	if err != nil {
		return errors.Join(reason, err)
	}
	if renamed == "" {
		klog.FromContext(ctx).Info("Removed empty claim record", "reason", reason.Error())
		return nil
	}
	klog.FromContext(ctx).
		Error(reason, "Renamed unreadable claim record; continuing with attachment records", "path", renamed)
	return nil
}

// sharesOfOtherClaims returns the shares that claims other than uid hold on the same devices. If a claim's record is
// lost or unreadable, the shares attached to its pods count. It returns an error if records cannot be listed, because
// any other claim may then have shares.
func (n *nodeRecords) sharesOfOtherClaims(
	ctx context.Context, uid types.UID, shares []share,
) (map[deviceKey][]*record.Share, error) {
	others := map[deviceKey][]*record.Share{}
	for _, s := range shares {
		others[deviceOf(s.Share)] = nil
	}
	add := func(s *record.Share) {
		device := deviceOf(*s)
		if on, wanted := others[device]; wanted && !s.AdminAccess {
			others[device] = append(on, s)
		}
	}
	claims, err := n.claims.List()
	if err = withoutUnreadable(ctx, err); err != nil {
		return nil, err
	}
	counted := make(map[types.UID]bool, len(claims)+1)
	counted[uid] = true
	for _, c := range claims {
		if c.UID == uid {
			continue
		}
		counted[c.UID] = true
		for i := range c.Shares {
			add(&c.Shares[i])
		}
	}
	added := map[string]bool{} // several pods may have the same share
	attached, err := n.attachments.Select(func(r *attach.Record) bool { return !counted[types.UID(r.ClaimUID)] })
	if err = withoutUnreadable(ctx, err); err != nil {
		return nil, err
	}
	for _, r := range attached {
		if !added[r.Share] {
			added[r.Share] = true
			s := n.shareInRecord(r)
			add(&s)
		}
	}
	return others, nil
}

// numberOf returns the number that the share's attachments already have, if there
// are any, because the claim's record may have been lost. Otherwise it returns a
// free number.
func (n *nodeRecords) numberOf(uid types.UID, s record.Share, others []*record.Share) uint16 {
	attached, _ := n.attachments.OfClaim(string(uid)) // unreadable records contain no number
	for _, a := range attached {
		if a.Share == s.Name {
			return a.Number
		}
	}
	return freeNumber(others)
}

// isRecorded reports whether a claim has a claim record or an attachment
// record, readable or not.
func (n *nodeRecords) isRecorded(uid string) bool {
	recorded, err := n.claims.Get(types.UID(uid))
	if recorded != nil || err != nil {
		return true
	}
	attached, err := n.attachments.OfClaim(uid)
	return len(attached) > 0 || err != nil
}
