// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// healthInterval is how often the driver repeats its devices' health to the kubelet, which considers it unknown after
// 30 s (KEP-4680).
const healthInterval = 10 * time.Second

// healthBroadcaster distributes the current health of the devices.
type healthBroadcaster struct {
	mu      sync.Mutex
	current []Health
	changed chan struct{} // closed when current is replaced
}

func newHealthBroadcaster() *healthBroadcaster {
	return &healthBroadcaster{changed: make(chan struct{})}
}

// announce replaces the health of all devices, and returns the devices with changed health.
func (b *healthBroadcaster) announce(current []Health) (changed []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, h := range current {
		known := slices.ContainsFunc(b.current, func(old Health) bool { return old.Device == h.Device })
		if known && !slices.Contains(b.current, h) {
			changed = append(changed, h.Device)
		}
	}
	if !slices.Equal(b.current, current) {
		b.current = current
		close(b.changed)
		b.changed = make(chan struct{})
	}
	return changed
}

// read returns the current health, and a channel that is closed when it changes.
func (b *healthBroadcaster) read() (current []Health, changed <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.current, b.changed
}

func healthOf(ks kinds) (all []Health) {
	for _, reporter := range kindsOf[HealthReporter](ks) {
		all = append(all, reporter.Health()...)
	}
	return all
}

// WatchHealthStatus implements kubeletplugin.DRAPlugin: it sends the health of
// the devices whenever it changes, and from time to time, until ctx ends.
func (d *Driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	tick := time.NewTicker(healthInterval)
	defer tick.Stop()
	for {
		current, changed := d.health.read()
		select {
		case <-ctx.Done():
			return nil
		case reports <- d.healthReport(current):
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-tick.C:
		}
	}
}

func (d *Driver) healthReport(current []Health) (r kubeletplugin.DeviceHealthReport) {
	for _, h := range current {
		status := kubeletplugin.HealthStatusHealthy
		if !h.Healthy {
			status = kubeletplugin.HealthStatusUnhealthy
		}
		r.Devices = append(r.Devices, kubeletplugin.DeviceHealth{
			PoolName: d.options.NodeName, DeviceName: h.Device, Health: status, Message: h.Message, LastUpdated: time.Now(),
		})
	}
	return r
}
