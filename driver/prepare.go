// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// prepareTimeout limits how long the claims in one call wait for resources, such as addresses that another node has
// to return. The kubelet calls once for all of a pod's claims and gives up after 45 s (v1.37); it would then report a
// timeout instead of what the claims wait for.
const prepareTimeout = 30 * time.Second

// errPrepareTimeout is the error of claims that did not get any part of prepareTimeout.
var errPrepareTimeout = fmt.Errorf("the pod's other claims used all of the %v for preparing: see their errors; "+
	"the kubelet retries", prepareTimeout)

// PrepareResourceClaims implements kubeletplugin.DRAPlugin. The kubelet calls it at least once per claim before a
// pod's sandbox exists, and again after a kubelet restart, while pods are attached. The driver refuses invalid claims
// here, as early as it can, but does not attach anything yet.
func (d *Driver) PrepareResourceClaims(
	ctx context.Context,
	claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, prepareTimeout, errPrepareTimeout)
	defer cancel()
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for _, claim := range claims {
		ctx := klog.NewContext(ctx, klog.FromContext(ctx).WithValues("claim", klog.KObj(claim), "claimUID", claim.UID))
		start := time.Now()
		var shares []share
		err := d.locks.withClaim(ctx, claim.UID, func(ctx context.Context) (err error) {
			shares, err = d.prepare(ctx, claim)
			return err
		})
		d.metrics.observe(operationPrepare, start, err)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Failed to prepare claim")
			results[claim.UID] = kubeletplugin.PrepareResult{
				Err: fmt.Errorf("prepare claim %s/%s: %w", claim.Namespace, claim.Name, err),
			}
			continue
		}
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: d.preparedDevices(ctx, claim.UID, shares)}
		d.reporter.enqueueSoon(claim.UID)
	}
	return results, nil
}

// prepare performs all steps from a claim's allocation to its CDI spec, and returns the recorded shares. The caller
// holds the claim's lock.
func (d *Driver) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]share, error) {
	planned, err := plan(d.options.DriverName, claim)
	if err != nil {
		return nil, err
	}
	old, err := d.records.readOrRename(ctx, claim.UID)
	if err != nil {
		return nil, err
	}
	if d.isPrepared(old, planned) {
		shares := d.kinds.resolveAll(old.Shares)
		return shares, d.specs.ensure(old.UID, shares)
	}
	if err := d.deviceMetadata.checkRestoring(claim.UID, old); err != nil {
		return nil, err
	}
	shares, err := d.configure(ctx, claim.Namespace, planned)
	if err != nil {
		return nil, err
	}
	if err := d.validate(claim, shares); err != nil {
		return nil, err
	}
	if err := d.undo(ctx, old); err != nil {
		return nil, err
	}
	recorded := &record.Claim{Phase: record.Preparing, Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}
	if err := d.admit(ctx, recorded, shares); err != nil {
		return nil, err
	}
	if err := d.reserveForClaim(ctx, claim, shares); err != nil {
		return nil, err
	}
	if err := d.specs.write(claim.UID, shares); err != nil {
		return nil, err
	}
	recorded.Phase = record.Prepared
	if err := d.records.claims.Put(recorded); err != nil {
		return nil, err
	}
	klog.FromContext(ctx).V(2).Info("Prepared claim", "shareCount", len(shares))
	return shares, nil
}

// isPrepared reports whether a claim with the planned allocation is already prepared. An allocation does not change,
// and the parameters that it was prepared with do not either, even if the administrator no longer allows them.
func (d *Driver) isPrepared(recorded *record.Claim, planned []plannedShare) bool {
	return recorded != nil && recorded.Phase == record.Prepared && d.records.claims.Current(recorded) &&
		sameShares(planned, recorded.Shares)
}

// undo unprepares a claim that was prepared before, unless a Prepare was interrupted: the current one completes it.
// The claim may have been deallocated and allocated differently, an Unprepare may have been interrupted, or the node
// may have rebooted.
func (d *Driver) undo(ctx context.Context, recorded *record.Claim) error {
	if recorded == nil || recorded.Phase == record.Preparing {
		return nil
	}
	if err := d.unprepare(ctx, recorded); err != nil {
		return fmt.Errorf("undo an earlier preparation: %w", err)
	}
	return nil
}

// reserveForClaim lets the kinds acquire the resources that only this claim may use; see Reserver.
func (d *Driver) reserveForClaim(ctx context.Context, claim *resourceapi.ResourceClaim, shares []share) error {
	reserving := ReservingClaim{UID: string(claim.UID), Namespace: claim.Namespace}
	for _, pod := range podConsumers(claim) {
		reserving.Pods = append(reserving.Pods, pod.Name)
	}
	for _, s := range shares {
		if reserver, ok := s.attacher.(Reserver); ok {
			if err := reserver.ReserveForClaim(ctx, s.Share, reserving, d.records); err != nil {
				return shareError(s.Share, err)
			}
		}
	}
	return nil
}
