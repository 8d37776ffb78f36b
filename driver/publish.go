package driver

import (
	"context"
	"errors"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
)

const (
	// devicesPerSlice is the API's limit for devices that may have taints.
	devicesPerSlice = 64
	// settle is how long changes are collected: a NIC that appears is
	// announced several times.
	settle = 100 * time.Millisecond
)

// DevicesChanged asks for the devices to be looked at, and published if they
// are not what they were.
func (d *Driver) DevicesChanged() {
	select {
	case d.refresh <- struct{}{}:
	default: // asked already
	}
}

// publish keeps the node's pool of ResourceSlices what the kinds say. Writing
// them, and only if they differ, is the helper's.
func (d *Driver) publish(ctx context.Context, helper *kubeletplugin.Helper) {
	logger := klog.FromContext(ctx)
	for {
		if err := helper.PublishResources(ctx, d.resources()); err != nil && ctx.Err() == nil {
			logger.Error(err, "Publish ResourceSlices")
		}
		next := time.NewTimer(d.nextLook())
		select {
		case <-ctx.Done():
			next.Stop()
			return
		case <-next.C:
		case <-d.refresh:
			next.Stop()
			select {
			case <-ctx.Done():
				return
			case <-time.After(settle):
			}
		}
		if !d.succession.isNewest() {
			continue
		}
		if err := d.refreshKinds(ctx); err != nil {
			logger.Error(err, "Look at the devices")
		}
	}
}

// nextLook is when the devices are looked at again if nothing is announced.
func (d *Driver) nextLook() time.Duration {
	if again := time.Duration(d.lookAgain.Load()); again > 0 && again < resync {
		return again
	}
	return resync
}

func (d *Driver) refreshKinds(ctx context.Context) error {
	all, err := d.claims.List()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Some claim records are unreadable")
	}
	changed, again := false, resync
	for _, k := range d.options.Kinds {
		found, err := k.Refresh(ctx, sharesOf(all, k.Name()))
		if err != nil {
			return err
		}
		changed = changed || found.Changed
		if found.Again > 0 {
			again = min(again, found.Again)
		}
	}
	d.lookAgain.Store(int64(again))
	d.reportDevices(ctx, d.health.announce(d.deviceHealth()))
	if changed {
		d.restore(ctx)
	}
	return nil
}

func (d *Driver) resources() resourceslice.DriverResources {
	var devices []resourceapi.Device
	for _, k := range d.options.Kinds {
		if _, ok := k.(Spanning); !ok {
			devices = append(devices, k.Devices()...)
		}
	}
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{{}}} // an empty slice says that there is nothing
	if len(devices) > 0 {
		pool.Slices = nil
		for chunk := range slices.Chunk(devices, devicesPerSlice) {
			pool.Slices = append(pool.Slices, resourceslice.Slice{Devices: chunk})
		}
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{d.options.NodeName: pool}}
}

// droppedFields says what it means if the API server does not know some of
// what we publish, and reports whether err is about that.
func (d *Driver) droppedFields(ctx context.Context, err error) bool {
	var dropped *resourceslice.DroppedFieldsError
	if !errors.As(err, &dropped) {
		return false
	}
	features := dropped.DisabledFeatures()
	hint := "shares work, but what these features add does not"
	if slices.Contains(features, "DRAConsumableCapacity") {
		hint = "devices cannot be shared: claims will get a whole device and be refused here; " +
			"enable the feature gate DRAConsumableCapacity in kube-apiserver, kube-scheduler and kubelet (on by default since Kubernetes 1.36)"
	}
	klog.FromContext(ctx).Error(err, "The cluster drops fields of our ResourceSlices", "features", features, "consequence", hint)
	return true
}
