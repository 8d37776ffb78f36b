package driver

import (
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// namespacesGone detaches what was attached in namespaces that have ended, by
// the IDs that the node's namespace gave them.
func (d *Driver) namespacesGone(ctx context.Context, nsids []int) {
	d.eachAttachment(ctx, func(r attach.Record) bool { return slices.Contains(nsids, r.Namespace.NSID) }, d.detachGone)
}

// look reports on attachments for which changed is true: something about them
// is not what it was.
func (d *Driver) look(ctx context.Context, changed func(attach.Record) bool) {
	d.eachAttachment(ctx, changed, func(_ context.Context, _ record.Share, r attach.Record) error {
		d.status.enqueue(types.UID(r.ClaimUID))
		return nil
	})
}

func (d *Driver) eachAttachment(ctx context.Context, wanted func(attach.Record) bool, do func(context.Context, record.Share, attach.Record) error) {
	logger := klog.FromContext(ctx)
	all, err := d.attachments.List()
	if err != nil {
		logger.Error(err, "Some attach records are unreadable")
	}
	for _, r := range all {
		if !wanted(r) {
			continue
		}
		err := d.withClaim(ctx, types.UID(r.ClaimUID), func(ctx context.Context) error {
			return do(ctx, d.recordedShare(r), r)
		})
		if err != nil && ctx.Err() == nil {
			logger.Error(err, "Attachment", "share", r.Share, "pod", klog.KRef(r.Pod.Namespace, r.Pod.Name))
		}
	}
}

// recordedShare returns the share of an attachment; without a claim record,
// what can be told from the attachment.
func (d *Driver) recordedShare(r attach.Record) record.Share {
	if claim, err := d.claims.Get(types.UID(r.ClaimUID)); err == nil && claim != nil {
		if share, ok := claim.Share(r.Share); ok {
			return share
		}
	}
	return record.Share{Name: r.Share, Kind: r.Kind, Device: r.Device, Class: r.Class}
}

// detachGone detaches one whose namespace has ended. The ID that told so may be
// another namespace's by now, and so may the record's file: who still has the
// link keeps it.
func (d *Driver) detachGone(ctx context.Context, share record.Share, r attach.Record) error {
	if _, err := d.attachments.Read(r.ClaimUID, r.Share, r.Namespace); errors.Is(err, os.ErrNotExist) {
		return nil // an Unprepare was faster
	}
	attacher := d.attacherOf(share)
	if attacher != nil {
		if state, err := attacher.Read(ctx, share, r); err != nil || state.Interface != "" {
			return err
		}
	}
	klog.FromContext(ctx).Info("Detached", "share", r.Share, "pod", klog.KRef(r.Pod.Namespace, r.Pod.Name))
	start := time.Now()
	err := d.forget(ctx, attacher, r)
	if d.isHelping() { // not while the plugin starts
		d.updateMetadata(ctx, types.UID(r.ClaimUID), share) // perhaps one pod is left
	}
	d.metrics.observe(operationDetach, start, err)
	d.status.enqueue(types.UID(r.ClaimUID))
	return err
}

// forget undoes an attachment and removes its record, in that order.
func (d *Driver) forget(ctx context.Context, attacher Attacher, r attach.Record) error {
	if attacher != nil {
		if err := attacher.Detach(ctx, r); err != nil {
			return err
		}
	}
	d.failures.note(r.Share, r.Pod, nil)
	return d.attachments.Remove(r)
}

// restore puts back what an earlier plugin attached, and forgets what went
// while none was running or while events were lost. One share that fails must
// not keep the others from being served: it is logged.
func (d *Driver) restore(ctx context.Context) {
	d.restoreSpecs(ctx)
	d.restoreMetadata(ctx)
	all := func(attach.Record) bool { return true }
	d.eachAttachment(ctx, all, func(ctx context.Context, share record.Share, r attach.Record) error {
		attacher := d.attacherOf(share)
		if attacher == nil {
			return nil
		}
		there, err := attacher.Restore(ctx, share, r)
		if err == nil && !there {
			return d.detachGone(ctx, share, r)
		}
		d.status.enqueue(types.UID(r.ClaimUID))
		return err
	})
}

// restoreSpecs writes the CDI specs of prepared claims that somebody removed or
// changed: containers that start again need them. After a boot it is the
// kubelet that asks first.
func (d *Driver) restoreSpecs(ctx context.Context) {
	claims, err := d.claims.List()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Some claim records are unreadable")
	}
	for _, c := range claims {
		if c.Phase != record.Prepared || !d.claims.Current(c) {
			continue
		}
		err := d.withClaim(ctx, c.UID, func(context.Context) error {
			now, err := d.claims.Get(c.UID)
			if err != nil || now == nil || now.Phase != record.Prepared {
				return err
			}
			return d.ensureSpec(now)
		})
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Restore CDI spec", "claim", klog.KRef(c.Namespace, c.Name))
		}
	}
}
