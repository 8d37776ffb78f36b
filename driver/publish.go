// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/driver/record"
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

// publisher refreshes the devices and publishes them as ResourceSlices.
type publisher struct {
	client       kubernetes.Interface
	driverName   string
	kinds        kinds
	records      *nodeRecords
	health       *healthBroadcaster
	warnings     *warnings
	degradations *degradations
	publication  publication
	// isNewest reports whether no newer plugin runs, which would publish the devices.
	isNewest func() bool
	// restore restores attachments after a device changed.
	restore func(context.Context)
	// enqueueClaimsOf makes the reporter report the claims that hold shares of the devices.
	enqueueClaimsOf func(claims []*record.Claim, devices []string)

	// requested has an element after requestRefresh.
	requested chan struct{}
	// refreshesLater reports whether requestRefreshLater has started a timer.
	refreshesLater atomic.Bool
	// refreshAfter is the time until the next refresh without an event, in
	// nanoseconds.
	refreshAfter atomic.Int64
}

func (d *Driver) newPublisher() *publisher {
	return &publisher{
		client:          d.options.Client,
		driverName:      d.options.DriverName,
		kinds:           d.kinds,
		records:         d.records,
		health:          d.health,
		warnings:        d.warnings,
		degradations:    d.degradations,
		isNewest:        d.handover.isNewest,
		restore:         d.restore,
		enqueueClaimsOf: d.reporter.enqueueClaimsOf,
		requested:       make(chan struct{}, 1),
	}
}

// requestRefresh makes the publisher refresh the devices and publish them if
// they changed.
func (p *publisher) requestRefresh() {
	select {
	case p.requested <- struct{}{}:
	default: // a refresh is pending
	}
}

// requestRefreshLater is like requestRefresh, but collects requests for detachedSettleTime.
func (p *publisher) requestRefreshLater() {
	if !p.refreshesLater.CompareAndSwap(false, true) {
		return
	}
	time.AfterFunc(detachedSettleTime, func() {
		p.refreshesLater.Store(false)
		p.requestRefresh()
	})
}

// slicesWriter writes ResourceSlices: the helper.
type slicesWriter interface {
	PublishResources(ctx context.Context, resources resourceslice.DriverResources) error
}

// run keeps the node's pool of ResourceSlices up to date until ctx ends.
// The helper writes the slices, and only if they differ.
func (p *publisher) run(ctx context.Context, helper slicesWriter) {
	logger := klog.FromContext(ctx)
	for {
		if err := p.publishResources(ctx, helper, p.resources()); err != nil && ctx.Err() == nil {
			logger.Error(err, "Failed to publish ResourceSlices")
		}
		if !p.awaitRefresh(ctx) {
			return
		}
		if !p.isNewest() {
			continue
		}
		changed, err := p.refreshKinds(ctx)
		if err != nil {
			logger.Error(err, "Failed to refresh devices")
		}
		if changed {
			p.restore(ctx)
		}
	}
}

// publishResources makes the helper write the slices, after checking the last call's. The first call to
// PublishResources waits until the helper can list ResourceSlices, so a plugin that is not permitted to does not make
// it: it would no longer refresh the devices.
func (p *publisher) publishResources(
	ctx context.Context, helper slicesWriter, resources resourceslice.DriverResources,
) error {
	p.publication.setWanted(resources)
	err := p.confirmPublished(ctx, resources)
	if p.handleRefusal(ctx, err) {
		return nil
	}
	return errors.Join(err, helper.PublishResources(ctx, resources))
}

// awaitRefresh waits until the devices are due for a refresh. It returns false
// after ctx has ended.
func (p *publisher) awaitRefresh(ctx context.Context) bool {
	timer := time.NewTimer(p.nextRefresh())
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	case <-p.requested:
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(settleTime):
		return true
	}
}

// nextRefresh returns the time until the next refresh without an event.
func (p *publisher) nextRefresh() time.Duration {
	return requeue.Soonest(time.Duration(p.refreshAfter.Load()), p.publication.nextCheck())
}

// refreshKinds refreshes the devices of all kinds, and announces their health. It reports whether a device changed in
// a way that requires restoring its attachments. If some kinds fail, it refreshes the others and joins the errors.
func (p *publisher) refreshKinds(ctx context.Context) (changed bool, failed error) {
	claims := p.records.readableClaims(ctx)
	after := resyncInterval
	var affected []string
	for _, k := range p.kinds.all {
		refreshed, err := k.Refresh(ctx, sharesOf(claims, k.Name()))
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("devices of kind %s: %w", k.Name(), err))
			continue
		}
		changed = changed || refreshed.Changed
		affected = append(affected, refreshed.Affected...)
		after = requeue.Soonest(after, refreshed.RequeueAfter)
	}
	p.refreshAfter.Store(int64(after))
	p.warnings.update(problemsOf(p.kinds))
	p.enqueueClaimsOf(claims, append(affected, p.health.announce(healthOf(p.kinds))...))
	return changed, failed
}

// resources returns the node's devices as ResourceSlices.
func (p *publisher) resources() resourceslice.DriverResources {
	var devices []resourceapi.Device
	for _, k := range p.kinds.all {
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
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{p.kinds.node: pool}}
}
