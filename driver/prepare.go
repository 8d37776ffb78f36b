package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// PrepareResourceClaims implements kubeletplugin.DRAPlugin. It is called at
// least once per claim before a pod's sandbox exists, and again after a kubelet
// restart, while pods are attached. Whatever can be refused is refused here;
// no link is made.
func (d *Driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for _, claim := range claims {
		var prepared *record.Claim
		start := time.Now()
		err := d.withClaim(ctx, claim.UID, func(ctx context.Context) (err error) {
			prepared, err = d.prepare(klog.NewContext(ctx, klog.FromContext(ctx).WithValues("claim", klog.KObj(claim))), claim)
			return err
		})
		d.metrics.observe(operationPrepare, start, err)
		if err != nil {
			results[claim.UID] = kubeletplugin.PrepareResult{Err: fmt.Errorf("prepare claim %s/%s: %w", claim.Namespace, claim.Name, err)}
			continue
		}
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: d.devices(ctx, prepared)}
		d.status.enqueueSoon(claim.UID)
	}
	return results, nil
}

func (d *Driver) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) (*record.Claim, error) {
	shares, err := d.plan(claim)
	if err != nil {
		return nil, err
	}
	old, err := d.recorded(ctx, claim.UID)
	if err != nil {
		return nil, err
	}
	if old != nil && old.Phase == record.Prepared && d.claims.Current(old) && sameShares(old.Shares, shares) {
		// An allocation does not change: neither do its parameters, also if
		// the administrator would not allow them any more.
		return old, d.ensureSpec(old)
	}
	if _, again := d.restoring.Load(claim.UID); again && old == nil {
		return nil, errors.New("the claim was unprepared while its device metadata was restored: try again")
	}
	if err := d.configure(claim, shares); err != nil {
		return nil, err
	}
	if old != nil && old.Phase != record.Preparing {
		// The claim was deallocated and came back with another share, an
		// Unprepare was cut off, or the node has booted.
		if err := d.unprepare(ctx, old); err != nil {
			return nil, fmt.Errorf("undo an earlier preparation: %w", err)
		}
	}
	prepared := &record.Claim{Phase: record.Preparing, Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID, Shares: shares}
	if err := d.admit(ctx, prepared); err != nil {
		return nil, err
	}
	devices, err := d.cdiDevices(prepared)
	if err == nil {
		err = d.specs.Write(string(claim.UID), devices)
	}
	if err != nil {
		return nil, err
	}
	prepared.Phase = record.Prepared
	if err := d.claims.Put(prepared); err != nil {
		return nil, err
	}
	klog.FromContext(ctx).Info("Prepared", "shares", len(prepared.Shares))
	return prepared, nil
}

// recorded returns a claim's record, nil if there is none, or none that anybody
// can read: that one is kept aside.
func (d *Driver) recorded(ctx context.Context, uid types.UID) (*record.Claim, error) {
	recorded, err := d.claims.Get(uid)
	if errors.Is(err, record.ErrCorrupt) {
		return nil, d.setAside(ctx, uid, err)
	}
	return recorded, err
}

// setAside is for a claim whose record cannot be read.
func (d *Driver) setAside(ctx context.Context, uid types.UID, why error) error {
	aside, err := d.claims.SetAside(uid)
	if err != nil {
		return errors.Join(why, err)
	}
	klog.FromContext(ctx).Error(why, "Going on without the claim's record: what is attached tells the rest", "keptAs", aside)
	return nil
}

func sameShares(a, b []record.Share) bool { return slices.EqualFunc(a, b, record.Share.Same) }

// configure gives the shares their parameters, and refuses what cannot be, by
// itself, together, or for the pods that the claim is reserved for.
func (d *Driver) configure(claim *resourceapi.ResourceClaim, shares []record.Share) error {
	i := 0
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != d.options.DriverName {
			continue
		}
		share := &shares[i] // plan made one for each, in order
		i++
		kind, err := d.kindOf(share.Pool, share.Device)
		if err == nil {
			share.Kind = kind.Name()
			share.Parameters, err = kind.Configure(*share, d.configurations(claim.Status.Allocation.Devices.Config, result))
		}
		if err != nil {
			return fmt.Errorf("request %s, device %s: %w", share.Request, share.Device, err)
		}
	}
	for _, kind := range d.options.Kinds {
		var own []record.Share
		for _, s := range shares {
			if s.Kind == kind.Name() {
				own = append(own, s)
			}
		}
		if err := kind.Together(own); err != nil {
			return err
		}
	}
	return d.checkConsumers(claim, shares)
}

// checkConsumers refuses shares that cannot serve the pods the claim is
// reserved for. Pods that come later are refused when they attach.
func (d *Driver) checkConsumers(claim *resourceapi.ResourceClaim, shares []record.Share) error {
	pods := consumers(claim)
	if len(pods) < 2 {
		return nil
	}
	others := []string{pods[0].Namespace + "/" + pods[0].Name}
	for _, share := range shares {
		if attacher := d.attacherOf(share); attacher != nil {
			if err := attacher.Serves(share, others); err != nil {
				return fmt.Errorf("request %s, reserved for %d pods: %w", share.Request, len(pods), err)
			}
		}
	}
	return nil
}

// plan turns the claim's allocation into shares, without parameters. Results of
// other drivers are theirs.
func (d *Driver) plan(claim *resourceapi.ResourceClaim) ([]record.Share, error) {
	if claim.Status.Allocation == nil {
		return nil, errors.New("the claim is not allocated")
	}
	var shares []record.Share
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != d.options.DriverName {
			continue
		}
		share, err := d.share(claim, result)
		if err != nil {
			return nil, fmt.Errorf("request %s, device %s: %w", result.Request, result.Device, err)
		}
		shares = append(shares, share)
	}
	return shares, nil
}

func (d *Driver) share(claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult) (record.Share, error) {
	share := record.Share{
		Request: result.Request, Pool: result.Pool, Device: result.Device,
		ShareID: ptr.Deref(result.ShareID, ""), AdminAccess: ptr.Deref(result.AdminAccess, false),
		Capacity: map[string]resource.Quantity{},
	}
	share.Name = cdi.DeviceName(string(claim.UID), share.Request, shareKey(share))
	for name, quantity := range result.ConsumedCapacity {
		share.Capacity[string(name)] = quantity
	}
	return share, nil
}

// shareKey tells the shares of one request apart. A device that is not shared
// has no share ID.
func shareKey(share record.Share) string {
	if share.ShareID != "" {
		return string(share.ShareID)
	}
	return share.Device
}

// configurations returns the opaque parameters for us that apply to a result,
// those of the class before those of the claim.
func (d *Driver) configurations(all []resourceapi.DeviceAllocationConfiguration, result resourceapi.DeviceRequestAllocationResult) (raw [][]byte) {
	applying := resourceclaim.ConfigForResult(all, result)
	for _, source := range []resourceapi.AllocationConfigSource{resourceapi.AllocationConfigSourceClass, resourceapi.AllocationConfigSourceClaim} {
		for _, c := range applying {
			if c.Source == source && c.Opaque.Driver == d.options.DriverName {
				raw = append(raw, c.Opaque.Parameters.Raw)
			}
		}
	}
	return raw
}

// admit checks the shares against all others on their devices, gives each its
// class number, and writes the record that makes them count. The scheduler has
// checked too; the driver is the last line of defence.
func (d *Driver) admit(ctx context.Context, claim *record.Claim) error {
	release, err := d.locks.Named(admission)
	if err != nil {
		return err
	}
	defer release()
	all, err := d.claims.List()
	if err != nil {
		// One that cannot be read must not keep all other claims from this
		// node: the scheduler has counted it.
		klog.FromContext(ctx).Error(err, "Some claim records are unreadable: what they hold does not count")
	}
	var others []record.Share
	for _, c := range all {
		if c.UID == claim.UID {
			continue
		}
		others = append(others, c.Shares...)
	}
	for i := range claim.Shares {
		share := &claim.Shares[i]
		beside := onDevice(others, share.Pool, share.Device)
		if err := d.admitShare(share, beside); err != nil {
			return fmt.Errorf("request %s, device %s: %w", share.Request, share.Device, err)
		}
		if !share.AdminAccess {
			share.Class = d.classOf(claim.UID, *share, beside)
		}
		others = append(others, *share)
	}
	return d.claims.Put(claim)
}

func (d *Driver) admitShare(share *record.Share, others []record.Share) error {
	if share.AdminAccess {
		return nil
	}
	others = slices.DeleteFunc(others, func(o record.Share) bool { return o.AdminAccess })
	for _, o := range others {
		if o.ShareID == share.ShareID {
			return fmt.Errorf("share %s is in use by another claim (CDI device %s): was it unprepared?", shareKey(*share), o.Name)
		}
		if o.ShareID == "" {
			// It was allocated as a whole, before the device was shared
			// (KEP-5075, device updates).
			return fmt.Errorf("another claim has the whole device (CDI device %s): it is shared when that is gone", o.Name)
		}
	}
	kind, err := d.kindOf(share.Pool, share.Device)
	if err != nil {
		return err
	}
	return kind.Admit(*share, others)
}

// classOf returns the number of the class that the share's links draw on, if
// there are any: the claim's record may have been lost. Otherwise a free one.
func (d *Driver) classOf(uid types.UID, share record.Share, beside []record.Share) uint16 {
	attached, _ := d.attachments.OfClaim(string(uid)) // unreadable ones tell nothing
	for _, a := range attached {
		if a.Share == share.Name {
			return a.Class
		}
	}
	return freeClass(beside)
}

func onDevice(shares []record.Share, pool, device string) (on []record.Share) {
	for _, s := range shares {
		if s.Pool == pool && s.Device == device {
			on = append(on, s)
		}
	}
	return on
}

// firstClass leaves room for the numbers that a kind uses for itself.
const firstClass = 0x10

func freeClass(others []record.Share) uint16 {
	taken := make(map[uint16]bool, len(others))
	for _, o := range others {
		taken[o.Class] = true
	}
	class := uint16(firstClass)
	for taken[class] {
		class++
	}
	return class
}

// hookTimeout is the runtime's limit for one run of the hook, in seconds: it
// gives up by itself earlier, and says why.
var hookTimeout = int(attach.DefaultWait.Seconds()) + 30

func (d *Driver) cdiDevices(claim *record.Claim) (devices []cdi.Device, err error) {
	for _, share := range claim.Shares {
		device := cdi.Device{Name: share.Name}
		if kind := d.recordedKind(share); kind != nil {
			if device.Edits, err = kind.Edits(share); err != nil {
				return nil, fmt.Errorf("request %s, device %s: %w", share.Request, share.Device, err)
			}
		}
		args := device.Edits.Hook
		if d.attacherOf(share) != nil {
			args = []string{"--run-dir=" + d.options.RunDir, "--claim=" + string(claim.UID), "--share=" + share.Name}
		}
		if len(args) > 0 {
			device.Hook = &cdi.Hook{Path: d.options.Hook, Timeout: hookTimeout, Args: append([]string{"dra-shared-hook"}, args...)}
		}
		devices = append(devices, device)
	}
	return devices, nil
}

// ensureSpec writes the CDI spec of a prepared claim again if it is gone or
// not what it was: it may lie on a tmpfs.
func (d *Driver) ensureSpec(claim *record.Claim) error {
	want, err := d.cdiDevices(claim)
	if err != nil {
		return err
	}
	if d.specs.Holds(string(claim.UID), want) {
		return nil
	}
	return d.specs.Write(string(claim.UID), want)
}

// devices is what the kubelet is told: the CDI devices of each request.
func (d *Driver) devices(ctx context.Context, claim *record.Claim) (devices []kubeletplugin.Device) {
	for _, share := range claim.Shares {
		device := kubeletplugin.Device{Requests: []string{share.Request}, PoolName: share.Pool, DeviceName: share.Device,
			CDIDeviceIDs: []string{d.specs.ID(share.Name)}, Metadata: d.metadataOf(ctx, claim, share)}
		if share.ShareID != "" {
			device.ShareID = &share.ShareID
		}
		devices = append(devices, device)
	}
	return devices
}
