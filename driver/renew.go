// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/types"

	"github.com/dra-shared/dra-driver-shared/attach"
)

// attachmentsOfKind implements Attachments.
type attachmentsOfKind struct {
	driver *Driver
	kind   string
}

// List implements Attachments.
func (l attachmentsOfKind) List(selected func(*attach.Record) bool) (attachments []Attachment, err error) {
	if !l.driver.handover.isNewest() {
		return nil, nil
	}
	ofKind := func(r *attach.Record) bool { return r.Kind == l.kind && selected(r) }
	records, err := l.driver.records.attachments.Select(ofKind)
	for _, r := range records {
		attachments = append(attachments, Attachment{Share: l.driver.records.shareOfAttachment(r).Share, Record: r})
	}
	return attachments, err
}

// Update implements Attachments.
func (l attachmentsOfKind) Update(
	ctx context.Context, r attach.Record, change func(Attachment, func(json.RawMessage) error) error,
) error {
	d, uid := l.driver, types.UID(r.ClaimUID)
	return d.locks.withClaim(WithAttachment(ctx, r.ClaimUID, r.Share, r.Pod), uid, func(ctx context.Context) error {
		current, err := d.records.attachments.Read(r.ClaimUID, r.Share, r.Namespace)
		if !d.handover.isNewest() {
			return ErrOutdated
		}
		if errors.Is(err, os.ErrNotExist) {
			return ErrEnded
		}
		if err != nil {
			return err
		}
		s := d.records.shareOfAttachment(current)
		write := func(payload json.RawMessage) error {
			current.Payload = payload
			if err := d.records.attachments.Write(current); err != nil {
				return fmt.Errorf("write attachment record: %w", err)
			}
			return nil
		}
		err = change(Attachment{Share: s.Share, Record: current}, write)
		d.deviceMetadata.update(ctx, uid, s, nil)
		d.reporter.enqueue(uid)
		return err
	})
}
