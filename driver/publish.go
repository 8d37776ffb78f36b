// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

const (
	// devicesPerSlice is the API's limit for devices that may have taints.
	devicesPerSlice = 64
	// settleTime is the time for which changes are collected before a refresh:
	// the kernel announces a new device several times.
	settleTime = 100 * time.Millisecond
	// detachedSettleTime is the time for which unprepared claims are collected before a refresh, which delays
	// the attachments of other pods: many pods may end at once.
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
		resources := d.resources()
		d.recheckDroppedFields(ctx, resources)
		if err := d.helper.PublishResources(ctx, resources); err != nil && ctx.Err() == nil {
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
	if after := time.Duration(d.refreshAfter.Load()); after > 0 && after < resyncInterval {
		return after
	}
	return resyncInterval
}

// refreshKinds refreshes the devices of all kinds, and announces their health. It reports whether
// a device changed, so that its attachments must be restored. If some kinds fail, it refreshes the others
// and joins the errors.
func (d *Driver) refreshKinds(ctx context.Context) (changed bool, failed error) {
	claims := d.readableClaims(ctx)
	after := resyncInterval
	var affected []string
	for _, k := range d.options.Kinds {
		refreshed, err := k.Refresh(ctx, sharesOf(claims, k.Name()))
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("devices of kind %s: %w", k.Name(), err))
			continue
		}
		changed = changed || refreshed.Changed
		affected = append(affected, refreshed.Affected...)
		if refreshed.RequeueAfter > 0 {
			after = min(after, refreshed.RequeueAfter)
		}
	}
	d.refreshAfter.Store(int64(after))
	d.reportProblems()
	d.enqueueClaimsOf(claims, append(affected, d.health.announce(d.deviceHealth())...))
	return changed, failed
}

// resources returns the devices of the node as ResourceSlices.
func (d *Driver) resources() resourceslice.DriverResources {
	var devices []resourceapi.Device
	for _, k := range d.options.Kinds {
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

// reportDroppedFields reports whether err means that the API server dropped fields of the
// ResourceSlices. If so, it reports the consequence in the log, in a metric, and in an event on the node.
func (d *Driver) reportDroppedFields(ctx context.Context, err error) bool {
	var dropped *resourceslice.DroppedFieldsError
	if !errors.As(err, &dropped) {
		return false
	}
	features := dropped.DisabledFeatures()
	consequence := describeDisabled(features)
	d.degraded(ctx, params.DegradedFeaturesDisabled, consequence, err)
	d.warnings.warn(params.EventReasonFeaturesDisabled, "", fmt.Sprintf(
		"the API server dropped fields of the ResourceSlices, because the feature gates %s are off: %s",
		strings.Join(features, ", "), consequence))
	return true
}

// recheckTimeout limits how long recheckDroppedFields delays the next refresh of the devices.
const recheckTimeout = 5 * time.Second

// recheckDroppedFields reports that the API server no longer drops fields of the ResourceSlices. While it
// does, each call of PublishResources writes the fields again, and the helper reports only failures.
func (d *Driver) recheckDroppedFields(ctx context.Context, want resourceslice.DriverResources) {
	if !d.isDegraded(params.DegradedFeaturesDisabled) {
		return
	}
	limited, cancel := context.WithTimeout(ctx, recheckTimeout)
	defer cancel()
	published, err := d.publishedDevices(limited)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to check whether the API server still drops fields; retrying")
		return
	}
	var devices []resourceapi.Device
	for _, s := range want.Pools[d.options.NodeName].Slices {
		devices = append(devices, s.Devices...)
	}
	if !resourceslice.DevicesDeepEqual(published, devices) {
		return
	}
	d.recovered(params.DegradedFeaturesDisabled)
	d.warnings.end(params.EventReasonFeaturesDisabled, "", params.EventReasonFeaturesEnabled,
		"the API server now stores all fields of the ResourceSlices")
}

// describeDisabled describes the features that do not work while feature gates are off, and the remedy.
func describeDisabled(features []string) string {
	switch {
	case slices.Contains(features, "DRAConsumableCapacity"):
		return "devices cannot be shared: the scheduler allocates whole devices, and this plugin refuses those claims; " +
			"enable the feature gate DRAConsumableCapacity in kube-apiserver, kube-scheduler, and kubelet (on by default " +
			"since Kubernetes 1.36)"
	case slices.Contains(features, "DRADeviceTaints"):
		return "the scheduler also allocates devices that are missing, cannot be used, or are unhealthy; enable the " +
			"feature gate DRADeviceTaints in kube-apiserver, kube-controller-manager, and kube-scheduler (on by default " +
			"since Kubernetes 1.36)"
	default:
		return "shares work, but without the functions of these features"
	}
}
