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

// prepareTimeout limits how long the claims of one call wait for resources, such as addresses that another node has
// to return. The kubelet calls once for all claims of a pod and gives up after 45 s (v1.37), and would then report a
// timeout instead of what the claims wait for.
const prepareTimeout = 30 * time.Second

// errPrepareTimeout is the error of claims that got no part of prepareTimeout.
var errPrepareTimeout = fmt.Errorf("no time left after %v for the pod's other claims: see their errors; "+
	"the kubelet tries again", prepareTimeout)

// PrepareResourceClaims implements kubeletplugin.DRAPlugin. The kubelet calls it at least once per
// claim before a pod's sandbox exists, and again after a kubelet restart, while pods are attached.
// The driver refuses invalid claims here, as early as it can, and attaches nothing yet.
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
		err := d.withClaim(ctx, claim.UID, func(ctx context.Context) (err error) {
			shares, err = d.prepare(ctx, claim)
			return err
		})
		d.metrics.observe(operationPrepare, start, err)
		if err != nil {
			results[claim.UID] = kubeletplugin.PrepareResult{
				Err: fmt.Errorf("prepare claim %s/%s: %w", claim.Namespace, claim.Name, err),
			}
			continue
		}
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: d.preparedDevices(ctx, claim.UID, shares)}
		d.status.enqueueSoon(claim.UID)
	}
	return results, nil
}

// prepare performs all steps from the allocation of a claim to its CDI spec, and returns the
// recorded shares. The caller holds the claim's lock.
func (d *Driver) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]share, error) {
	planned, err := d.plan(claim)
	if err != nil {
		return nil, err
	}
	old, err := d.readOrSetAside(ctx, claim.UID)
	if err != nil {
		return nil, err
	}
	if d.isPrepared(old, planned) {
		shares := d.resolveAll(old.Shares)
		return shares, d.ensureSpec(old.UID, shares)
	}
	if _, restoring := d.restoring.Load(claim.UID); restoring && old == nil {
		return nil, errors.New("the claim was unprepared while its device metadata was being restored: retry")
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
	devices, err := d.cdiDevices(claim.UID, shares)
	if err != nil {
		return nil, err
	}
	if err := d.specs.Write(string(claim.UID), devices); err != nil {
		return nil, err
	}
	recorded.Phase = record.Prepared
	if err := d.claims.Put(recorded); err != nil {
		return nil, err
	}
	klog.FromContext(ctx).V(2).Info("Prepared claim", "shares", len(shares))
	return shares, nil
}

// isPrepared reports whether a claim with the planned allocation is already
// prepared. An allocation does not change, and neither do the parameters with
// which it was prepared, even if the administrator no longer allows them.
func (d *Driver) isPrepared(recorded *record.Claim, planned []plannedShare) bool {
	return recorded != nil && recorded.Phase == record.Prepared && d.claims.Current(recorded) &&
		sameShares(planned, recorded.Shares)
}

// undo unprepares a claim that was prepared before, unless a Prepare was
// interrupted, which the current one completes. The claim may have been
// deallocated and allocated differently, an Unprepare may have been
// interrupted, or the node may have rebooted.
func (d *Driver) undo(ctx context.Context, recorded *record.Claim) error {
	if recorded == nil || recorded.Phase == record.Preparing {
		return nil
	}
	if err := d.unprepare(ctx, recorded); err != nil {
		return fmt.Errorf("undo an earlier preparation: %w", err)
	}
	return nil
}

// readOrSetAside returns a claim's record, or nil if there is none. It sets a
// corrupt record aside, because the attachment records contain the data
// to continue without it.
func (d *Driver) readOrSetAside(ctx context.Context, uid types.UID) (*record.Claim, error) {
	recorded, err := d.claims.Get(uid)
	if errors.Is(err, record.ErrCorrupt) {
		return nil, d.setAside(ctx, uid, err)
	}
	return recorded, err
}

// setAside renames the record of a claim that cannot be read, or removes it if it is empty.
func (d *Driver) setAside(ctx context.Context, uid types.UID, reason error) error {
	aside, err := d.claims.SetAside(uid)
	if err != nil {
		return errors.Join(reason, err)
	}
	if aside == "" {
		klog.FromContext(ctx).Info("Removed empty claim record", "reason", reason.Error())
		return nil
	}
	klog.FromContext(ctx).
		Error(reason, "Set unreadable claim record aside; continuing with attachment records", "keptAs", aside)
	return nil
}

// plannedShare is an allocation result of a claim, before its kind is involved.
type plannedShare struct {
	record.Share
	parameters [][]byte // opaque parameters, those of the DeviceClass first
}

// plan converts the claim's allocation to shares. It ignores the results of
// other drivers.
func (d *Driver) plan(claim *resourceapi.ResourceClaim) (planned []plannedShare, err error) {
	if claim.Status.Allocation == nil {
		return nil, errors.New("the claim is not allocated: has the scheduler removed the allocation? the kubelet retries")
	}
	devices := claim.Status.Allocation.Devices
	for _, result := range devices.Results {
		if result.Driver == d.options.DriverName {
			planned = append(planned, plannedShare{shareOf(claim.UID, result), d.parametersFor(result, devices.Config)})
		}
	}
	return planned, nil
}

func shareOf(claimUID types.UID, result resourceapi.DeviceRequestAllocationResult) record.Share {
	s := record.Share{
		Request: result.Request, Pool: result.Pool, Device: result.Device,
		ShareID: ptr.Deref(result.ShareID, ""), AdminAccess: ptr.Deref(result.AdminAccess, false),
		Capacity: map[string]resource.Quantity{},
	}
	s.Name = cdi.DeviceName(string(claimUID), s.Request, shareKey(s))
	for name, quantity := range result.ConsumedCapacity {
		s.Capacity[string(name)] = quantity
	}
	return s
}

// shareKey distinguishes the shares of one request. An unshared device has no
// share ID.
func shareKey(s record.Share) string {
	if s.ShareID != "" {
		return string(s.ShareID)
	}
	return s.Device
}

// parametersFor returns the driver's opaque parameters that apply to a result:
// those of the DeviceClass before those of the claim.
func (d *Driver) parametersFor(
	result resourceapi.DeviceRequestAllocationResult,
	all []resourceapi.DeviceAllocationConfiguration,
) (raw [][]byte) {
	applying := resourceclaim.ConfigForResult(all, result)
	for _, source := range []resourceapi.AllocationConfigSource{resourceapi.AllocationConfigSourceClass,
		resourceapi.AllocationConfigSourceClaim} {
		for _, c := range applying {
			if c.Source == source && c.Opaque.Driver == d.options.DriverName {
				raw = append(raw, c.Opaque.Parameters.Raw)
			}
		}
	}
	return raw
}

func sameShares(planned []plannedShare, recorded []record.Share) bool {
	return slices.EqualFunc(planned, recorded, func(p plannedShare, r record.Share) bool { return p.Same(r) })
}

// configure finds the kind of each planned share, and lets it compute the parameters of the share.
func (d *Driver) configure(ctx context.Context, namespace string, planned []plannedShare) ([]share, error) {
	shares := make([]share, 0, len(planned))
	for _, p := range planned {
		kind, err := d.kindOf(p.Pool, p.Device)
		if err == nil {
			p.Kind = kind.Name()
			p.Parameters, err = kind.Configure(ctx, namespace, p.Share, p.parameters)
		}
		if err != nil {
			return nil, shareError(p.Share, err)
		}
		shares = append(shares, withKind(p.Share, kind))
	}
	return shares, nil
}

// shareError adds the request and the device of a share to an error.
func shareError(s record.Share, err error) error {
	return fmt.Errorf("request %s, device %s: %w", s.Request, s.Device, err)
}

// validate refuses shares that exclude each other, and shares that cannot serve
// the pods for which the claim is reserved. The driver refuses pods that join
// later when they attach.
func (d *Driver) validate(claim *resourceapi.ResourceClaim, shares []share) error {
	for k, validator := range kindsOf[CombinationValidator](d) {
		var own []record.Share
		for _, s := range shares {
			if s.kind == k {
				own = append(own, s.Share)
			}
		}
		if err := validator.ValidateCombination(own); err != nil {
			return err
		}
	}
	pods := podConsumers(claim)
	if len(pods) < 2 {
		return nil
	}
	first := []string{pods[0].Namespace + "/" + pods[0].Name}
	for _, s := range shares {
		if s.attacher == nil {
			continue
		}
		if err := s.attacher.ValidateConsumers(s.Share, first); err != nil {
			return fmt.Errorf("request %s, reserved for %d pods: %w", s.Request, len(pods), err)
		}
	}
	return nil
}

// admit checks each share against all other shares of its device, numbers it,
// and writes the claim record. From then on, the shares count against the device. The
// scheduler checks first; the driver is the last component that can refuse.
func (d *Driver) admit(ctx context.Context, recorded *record.Claim, shares []share) error {
	release, err := d.locks.NamedContext(ctx, admissionLock)
	if err != nil {
		return err
	}
	defer release()
	others, err := d.sharesOfOtherClaims(ctx, recorded.UID, shares)
	if err != nil {
		return err
	}
	for i := range shares {
		s := &shares[i]
		if !s.AdminAccess {
			device := deviceOf(s.Share)
			if err := admitShare(*s, others[device]); err != nil {
				return shareError(s.Share, err)
			}
			s.Number = d.numberOf(recorded.UID, s.Share, others[device])
			others[device] = append(others[device], &s.Share)
		}
		recorded.Shares = append(recorded.Shares, s.Share)
	}
	return d.claims.Put(recorded)
}

// reserveForClaim lets the kinds acquire the resources that only this claim may use; see Reserver.
func (d *Driver) reserveForClaim(ctx context.Context, claim *resourceapi.ResourceClaim, shares []share) error {
	reserving := ReservingClaim{UID: string(claim.UID), Namespace: claim.Namespace}
	for _, pod := range podConsumers(claim) {
		reserving.Pods = append(reserving.Pods, pod.Name)
	}
	for _, s := range shares {
		if reserver, ok := s.attacher.(Reserver); ok {
			if err := reserver.ReserveForClaim(ctx, s.Share, reserving, d.records()); err != nil {
				return shareError(s.Share, err)
			}
		}
	}
	return nil
}

// deviceKey identifies a device.
type deviceKey struct{ pool, device string }

func deviceOf(s record.Share) deviceKey { return deviceKey{s.Pool, s.Device} }

// sharesOfOtherClaims returns the shares that other claims than the one with that UID hold on the
// devices of shares. A claim whose record is lost or cannot be read counts with the shares that are
// attached to its pods. It returns an error if records cannot be listed, because shares of any other claim
// may then exist.
func (d *Driver) sharesOfOtherClaims(
	ctx context.Context, uid types.UID, shares []share,
) (map[deviceKey][]*record.Share, error) {
	others := map[deviceKey][]*record.Share{}
	for _, s := range shares {
		others[deviceOf(s.Share)] = nil
	}
	add := func(s *record.Share) {
		device := deviceOf(*s)
		if on, wanted := others[device]; wanted && !s.AdminAccess {
			others[device] = append(on, s)
		}
	}
	claims, err := d.claims.List()
	if err = withoutUnreadable(ctx, err); err != nil {
		return nil, err
	}
	counted := make(map[types.UID]bool, len(claims)+1)
	counted[uid] = true
	for _, c := range claims {
		if c.UID == uid {
			continue
		}
		counted[c.UID] = true
		for i := range c.Shares {
			add(&c.Shares[i])
		}
	}
	added := map[string]bool{} // several pods may have the same share
	attached, err := d.attachments.Select(func(r *attach.Record) bool { return !counted[types.UID(r.ClaimUID)] })
	if err = withoutUnreadable(ctx, err); err != nil {
		return nil, err
	}
	for _, r := range attached {
		if !added[r.Share] {
			added[r.Share] = true
			s := d.shareInRecord(r)
			add(&s)
		}
	}
	return others, nil
}

// admitShare checks a share against the other shares of its device.
func admitShare(s share, neighbors []*record.Share) error {
	for _, o := range neighbors {
		if o.ShareID == s.ShareID {
			return fmt.Errorf(
				"share %s is in use by another claim (CDI device %s): was that claim unprepared?",
				shareKey(s.Share),
				o.Name,
			)
		}
		if o.ShareID == "" {
			// The device was allocated as a whole before it became shared
			// (KEP-5075, device updates).
			return fmt.Errorf("another claim holds the whole device (CDI device %s): wait until it is released", o.Name)
		}
	}
	return s.kind.Admit(s.Share, neighbors)
}

// numberOf returns the number that the share's attachments already have, if there
// are any, because the claim's record may have been lost. Otherwise it returns a
// free number.
func (d *Driver) numberOf(uid types.UID, s record.Share, neighbors []*record.Share) uint16 {
	attached, _ := d.attachments.OfClaim(string(uid)) // unreadable records contain no number
	for _, a := range attached {
		if a.Share == s.Name {
			return a.Number
		}
	}
	return freeNumber(neighbors)
}

// freeNumber returns the lowest number that no neighbor has.
func freeNumber(neighbors []*record.Share) uint16 {
	taken := make([]bool, len(neighbors)+1)
	for _, o := range neighbors {
		if i := int(o.Number) - record.FirstNumber; i >= 0 && i < len(taken) {
			taken[i] = true
		}
	}
	return uint16(record.FirstNumber + slices.Index(taken, false))
}
