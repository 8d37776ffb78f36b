package driver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// UnprepareResourceClaims implements kubeletplugin.DRAPlugin. It is called when
// the last pod of a claim on this node is gone, perhaps together with the
// claim. A claim that is not prepared is no error.
func (d *Driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	for _, claim := range claims {
		start := time.Now()
		results[claim.UID] = d.withClaim(ctx, claim.UID, func(ctx context.Context) error {
			ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("claim", klog.KRef(claim.Namespace, claim.Name)))
			recorded, err := d.recorded(ctx, claim.UID)
			if errors.Is(err, record.ErrNewer) {
				err = d.setAside(ctx, claim.UID, err) // the pod must be able to go
			}
			if err != nil {
				return err
			}
			if recorded == nil {
				recorded = &record.Claim{UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name}
			}
			if err := d.unprepare(ctx, recorded); err != nil {
				return fmt.Errorf("unprepare claim %s/%s: %w", claim.Namespace, claim.Name, err)
			}
			return nil
		})
		d.metrics.observe(operationUnprepare, start, results[claim.UID])
	}
	return results, nil
}

// unprepare removes links, classes, the CDI spec and the record, in that
// order: as long as something is left there is a record that says so, and no
// container can start once the spec is gone.
func (d *Driver) unprepare(ctx context.Context, claim *record.Claim) error {
	if len(claim.Shares) > 0 {
		claim.Phase = record.Unpreparing
		if err := d.claims.Put(claim); err != nil {
			return err
		}
	}
	// What an unreadable record was about goes with its pod and, if it does
	// not, as an orphan.
	attachments, err := d.attachments.OfClaim(string(claim.UID))
	if err != nil {
		klog.FromContext(ctx).Error(err, "Some attach records are unreadable")
	}
	var failed error
	shares := claim.Shares
	for _, r := range attachments {
		if len(claim.Shares) == 0 { // the claim's record is lost
			shares = append(shares, d.recordedShare(r))
		}
		failed = errors.Join(failed, d.forget(ctx, d.attacherOf(d.recordedShare(r)), r))
	}
	for _, share := range shares {
		if attacher := d.attacherOf(share); attacher != nil {
			failed = errors.Join(failed, attacher.Release(ctx, share))
		}
	}
	if failed != nil {
		return failed // the record stays, and the kubelet tries again
	}
	if err := d.specs.Remove(string(claim.UID)); err != nil {
		return err
	}
	if err := d.attachments.RemoveClaim(string(claim.UID)); err != nil {
		return err
	}
	if err := d.claims.Delete(claim.UID); err != nil {
		return err
	}
	d.DevicesChanged() // what is left for others, or nobody waits for
	d.status.forget(claim.UID)
	d.failures.forgetClaim(shares)
	klog.FromContext(ctx).Info("Unprepared", "shares", len(shares))
	return nil
}
