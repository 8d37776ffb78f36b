// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/internal/requeue"
)

const (
	// devicesPerSlice is the API's limit for devices that may have taints.
	devicesPerSlice = 64
	// settleTime is how long changes are collected before a refresh: the kernel announces a new device several times.
	settleTime = 100 * time.Millisecond
	// detachedSettleTime is how long unprepared claims are collected before a refresh, which delays other pods'
	// attachments: many pods may end at the same time.
	detachedSettleTime = time.Second
)

// requestRefresh makes the publisher refresh the devices and publish them if
// they changed.
func (d *Driver) requestRefresh() {
	select {
	case d.refresh <- struct{}{}:
	default: // a refresh is pending
	}
}

// requestRefreshLater is like requestRefresh, but collects requests for detachedSettleTime.
func (d *Driver) requestRefreshLater() {
	if !d.refreshesLater.CompareAndSwap(false, true) {
		return
	}
	time.AfterFunc(detachedSettleTime, func() {
		d.refreshesLater.Store(false)
		d.requestRefresh()
	})
}

// publish keeps the node's pool of ResourceSlices up to date until ctx ends.
// The helper writes the slices, and only if they differ.
func (d *Driver) publish(ctx context.Context) {
	logger := klog.FromContext(ctx)
	for {
		if err := d.publishResources(ctx, d.resources()); err != nil && ctx.Err() == nil {
			logger.Error(err, "Failed to publish ResourceSlices")
		}
		if !d.awaitRefresh(ctx) {
			return
		}
		if !d.handover.isNewest() {
			continue
		}
		changed, err := d.refreshKinds(ctx)
		if err != nil {
			logger.Error(err, "Failed to refresh devices")
		}
		if changed {
			d.restore(ctx)
		}
	}
}

// publishResources makes the helper write the slices, after checking the last call's. The first call to
// PublishResources waits until the helper can list ResourceSlices, so a plugin that is not permitted to does not make
// it: it would no longer refresh the devices.
func (d *Driver) publishResources(ctx context.Context, resources resourceslice.DriverResources) error {
	d.publication.setWanted(resources)
	err := d.confirmPublished(ctx, resources)
	if d.reportRefusal(ctx, err) {
		return nil
	}
	return errors.Join(err, d.helper.PublishResources(ctx, resources))
}

// awaitRefresh waits until the devices are due for a refresh. It returns false
// after ctx has ended.
func (d *Driver) awaitRefresh(ctx context.Context) bool {
	timer := time.NewTimer(d.nextRefresh())
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	case <-d.refresh:
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(settleTime):
		return true
	}
}

// nextRefresh returns the time until the next refresh without an event.
func (d *Driver) nextRefresh() time.Duration {
	return requeue.Soonest(time.Duration(d.refreshAfter.Load()), d.publication.nextCheck())
}

// refreshKinds refreshes the devices of all kinds, and announces their health. It reports whether a device changed in
// a way that requires restoring its attachments. If some kinds fail, it refreshes the others and joins the errors.
func (d *Driver) refreshKinds(ctx context.Context) (changed bool, failed error) {
	claims := d.records.readableClaims(ctx)
	after := resyncInterval
	var affected []string
	for _, k := range d.kinds.all {
		refreshed, err := k.Refresh(ctx, sharesOf(claims, k.Name()))
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("devices of kind %s: %w", k.Name(), err))
			continue
		}
		changed = changed || refreshed.Changed
		affected = append(affected, refreshed.Affected...)
		after = requeue.Soonest(after, refreshed.RequeueAfter)
	}
	d.refreshAfter.Store(int64(after))
	d.reportProblems()
	d.enqueueClaimsOf(claims, append(affected, d.health.announce(d.deviceHealth())...))
	return changed, failed
}

// resources returns the node's devices as ResourceSlices.
func (d *Driver) resources() resourceslice.DriverResources {
	var devices []resourceapi.Device
	for _, k := range d.kinds.all {
		if _, ok := k.(MultiNode); !ok {
			devices = append(devices, k.Devices()...)
		}
	}
	// Without devices, one empty slice states that the node has none.
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{{}}}
	if len(devices) > 0 {
		pool.Slices = nil
		for chunk := range slices.Chunk(devices, devicesPerSlice) {
			pool.Slices = append(pool.Slices, resourceslice.Slice{Devices: chunk})
		}
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{d.options.NodeName: pool}}
}
