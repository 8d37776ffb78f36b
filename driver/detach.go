// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
)

// detachEnded detaches a share from a sandbox that has reportedly ended. The report may be out of
// date, because the kernel reuses the IDs of namespaces: an attachment that still exists is kept.
func (d *Driver) detachEnded(ctx context.Context, s share, r attach.Record) error {
	if s.attacher != nil {
		if state, err := s.attacher.Read(ctx, s.Share, r); err != nil || state.Exists {
			return err
		}
	}
	start := time.Now()
	err := d.detach(ctx, s, r)
	d.metrics.observe(operationDetach, start, err)
	if d.helper.isStarted() { // otherwise the plugin is starting, and update would wait
		d.deviceMetadata.update(ctx, types.UID(r.ClaimUID), s, nil) // describes an attachment if there is only one
	}
	d.reporter.enqueue(types.UID(r.ClaimUID))
	if err == nil {
		klog.FromContext(ctx).V(2).Info("Detached share")
	}
	return err
}

// detach undoes an attachment and removes its record, in this order.
func (d *Driver) detach(ctx context.Context, s share, r attach.Record) error {
	if s.attacher != nil {
		if err := s.attacher.Detach(ctx, r); err != nil {
			return err
		}
	}
	d.failures.set(r.Share, r.Pod, nil)
	d.detachments.add(types.UID(r.ClaimUID))
	return d.removeAttachment(s, r)
}

// removeAttachment removes the record of an attachment that no longer exists.
func (d *Driver) removeAttachment(s share, r attach.Record) error {
	if err := d.records.attachments.Remove(r); err != nil {
		return err
	}
	if reserver, ok := s.attacher.(Reserver); ok {
		reserver.Unreserve(r)
	}
	return nil
}
