package driver

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

// healthInterval is how often the kubelet hears of devices' health although
// nothing changed: after 30 s it would not know any more (KEP-4680).
const healthInterval = 10 * time.Second

// healthBoard tells whoever waits what became of the devices' health.
type healthBoard struct {
	mu      sync.Mutex
	current []Health
	changed chan struct{} // closed when current is replaced
}

func newHealthBoard() *healthBoard { return &healthBoard{changed: make(chan struct{})} }

// announce replaces the devices' health, and reports which devices' changed.
func (b *healthBoard) announce(now []Health) (changed []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, h := range now {
		known := slices.ContainsFunc(b.current, func(old Health) bool { return old.Device == h.Device })
		if known && !slices.Contains(b.current, h) {
			changed = append(changed, h.Device)
		}
	}
	if !slices.Equal(b.current, now) {
		b.current = now
		close(b.changed)
		b.changed = make(chan struct{})
	}
	return changed
}

func (b *healthBoard) read() (now []Health, changed <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.current, b.changed
}

func (d *Driver) deviceHealth() (all []Health) {
	for _, k := range d.options.Kinds {
		all = append(all, k.Health()...)
	}
	return all
}

// reportDevices reports on the claims with shares of devices whose health
// changed.
func (d *Driver) reportDevices(ctx context.Context, devices []string) {
	if len(devices) == 0 {
		return
	}
	claims, err := d.claims.List()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Some claim records are unreadable")
	}
	for _, c := range claims {
		for _, s := range c.Shares {
			if slices.Contains(devices, s.Device) {
				d.status.enqueue(c.UID)
			}
		}
	}
}

// WatchHealthStatus implements kubeletplugin.DRAPlugin.
func (d *Driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	again := time.NewTicker(healthInterval)
	defer again.Stop()
	for {
		now, changed := d.health.read()
		select {
		case <-ctx.Done():
			return nil
		case reports <- d.healthReport(now):
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-again.C:
		}
	}
}

func (d *Driver) healthReport(now []Health) (r kubeletplugin.DeviceHealthReport) {
	for _, h := range now {
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
