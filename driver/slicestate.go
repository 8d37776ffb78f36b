// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"
)

// publication is what the plugin knows about its ResourceSlices in the API server.
type publication struct {
	mu sync.Mutex
	// confirmed reports whether the API server has stored the slices since the plugin started.
	confirmed bool
	// refused is why the API server last refused to store the slices; nil if it has stored them.
	refused error
	// dropped is the consequence if the API server drops the fields that make devices shareable; nil if it does not.
	dropped error
	// allShared reports whether there are devices, and none of them works without these fields.
	allShared bool
	// interval is the last result of nextCheck; 0 after the state has changed.
	interval time.Duration
}

// confirmInterval is the time until the first check whether the API server has the slices. It doubles with each
// check, up to resyncInterval.
const confirmInterval = 500 * time.Millisecond

// setWanted notes which slices are to be published.
func (p *publication) setWanted(resources resourceslice.DriverResources) {
	devices := devicesOf(resources)
	exclusive := func(d resourceapi.Device) bool { return !ptr.Deref(d.AllowMultipleAllocations, false) }
	p.mu.Lock()
	defer p.mu.Unlock()
	p.allShared = len(devices) > 0 && !slices.ContainsFunc(devices, exclusive)
}

// setRefused notes that the API server refused the slices.
func (p *publication) setRefused(reason error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refused == nil {
		p.interval = 0
	}
	p.refused = reason
}

// setDropped notes that the API server stored the slices without some fields. reason is not nil if devices cannot be
// shared without them.
func (p *publication) setDropped(reason error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.confirmed, p.dropped = true, reason
}

// clearDropped notes that the API server no longer drops fields.
func (p *publication) clearDropped() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropped = nil
}

// confirm notes that the API server has the slices.
func (p *publication) confirm() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.confirmed, p.refused, p.interval = true, nil, 0
}

// isConfirmed reports whether the API server had the slices, and has not refused any since.
func (p *publication) isConfirmed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.confirmed && p.refused == nil
}

// nextCheck returns the time until the next check of the slices.
func (p *publication) nextCheck() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.confirmed && p.refused == nil {
		return resyncInterval
	}
	p.interval = min(max(2*p.interval, confirmInterval), resyncInterval)
	return p.interval
}

// check returns why the scheduler cannot allocate the node's devices.
func (p *publication) check() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.refused != nil:
		return p.refused
	case p.dropped != nil && p.allShared:
		return p.dropped
	case !p.confirmed:
		return errors.New("the API server has not stored this node's ResourceSlices yet: if this persists, the plugin's " +
			"log states the error")
	}
	return nil
}

// devicesOf returns the devices in slices that are to be published.
func devicesOf(resources resourceslice.DriverResources) (devices []resourceapi.Device) {
	for _, pool := range resources.Pools {
		for _, s := range pool.Slices {
			devices = append(devices, s.Devices...)
		}
	}
	return devices
}
