// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
)

// Documents that state the requirements.
const (
	proto      = "k8s.io/kubelet/pkg/apis/dra/v1/api.proto"
	protoDev   = proto + ", Device"
	pluginDoc  = "k8s.io/dynamic-resource-allocation/kubeletplugin, DRAPlugin"
	idempotent = pluginDoc + ": PrepareResourceClaims and UnprepareResourceClaims must be idempotent"
	kep4381    = "KEP-4381, Communication between kubelet and kubelet plugin"
	kep5075    = "KEP-5075, consumable capacity"
	cdiSpec    = "CNCF Container Device Interface, SPEC.md"
)

// Cases returns the requirements for every plugin, the simplest first.
func Cases() []Case {
	return []Case{
		{
			Name:      "prepare returns the allocated devices",
			Reference: protoDev,
			Run:       preparesAllocatedDevices,
		},
		{
			Name:      "a second prepare returns the same devices",
			Reference: idempotent,
			Run:       preparesTwice,
		},
		{
			Name:      "concurrent prepare calls return the same devices",
			Reference: idempotent,
			Run:       preparesConcurrently,
		},
		{
			Name:      "prepare without claims succeeds",
			Reference: proto,
			Run:       preparesNoClaims,
		},
		{
			Name:      "prepare returns the share ID of a device",
			Reference: kep5075 + ": ShareID in the plugin's response",
			Requires:  sharedDevice,
			Run:       returnsShareID,
		},
		{
			Name:      "CDI devices exist after prepare and are gone after unprepare",
			Reference: cdiSpec,
			Requires:  readableCDIDir,
			Run:       managesCDISpecs,
		},
		{
			Name:      "a claim that cannot be prepared does not affect other claims of the call",
			Reference: proto + ": errors are per claim",
			Run:       isolatesFailures,
		},
		{
			Name:      "prepare rejects a claim that does not exist",
			Reference: pluginDoc,
			Run:       rejectsMissingClaim,
		},
		{
			Name:      "prepare rejects a claim with another UID",
			Reference: kep4381 + ": the UID distinguishes a claim from a later claim of the same name",
			Run:       rejectsOtherUID,
		},
		{
			Name:      "prepare rejects a claim without an allocation",
			Reference: pluginDoc,
			Run:       rejectsUnallocatedClaim,
		},
		{
			Name:      "prepare ignores devices of other drivers",
			Reference: kep4381 + ": a claim may have devices of several drivers",
			Run:       ignoresOtherDrivers,
		},
		{
			Name:      "prepare rejects a device that another claim uses",
			Reference: pluginDoc + ": the driver is the last line of defense against double allocation",
			Run:       rejectsDoubleAllocation,
		},
		{
			Name:      "claims that share a device do not affect each other",
			Reference: kep5075,
			Requires:  sharedDevice,
			Run:       isolatesShares,
		},
		{
			Name:      "unprepare of an unknown claim succeeds",
			Reference: idempotent,
			Run:       unpreparesUnknownClaim,
		},
		{
			Name:      "a second unprepare succeeds",
			Reference: idempotent,
			Run:       unpreparesTwice,
		},
		{
			Name:      "unprepare succeeds after the claim was deleted",
			Reference: pluginDoc + ": the ResourceClaim may have been deleted already",
			Run:       unpreparesDeletedClaim,
		},
		{
			Name:      "a claim can be prepared again after unprepare",
			Reference: kep4381 + ": a claim outlives the pods that use it",
			Run:       preparesAfterUnprepare,
		},
	}
}

func preparesAllocatedDevices(ctx context.Context, s *Suite) error {
	c, err := s.createAllocated(ctx, nil)
	if err != nil {
		return err
	}
	devices, err := s.prepareOne(ctx, c)
	if err != nil {
		return err
	}
	want := c.Status.Allocation.Devices.Results[0]
	if len(devices) == 0 {
		return errors.New("the response has no devices")
	}
	for _, d := range devices {
		if d.PoolName != want.Pool || d.DeviceName != want.Device {
			return fmt.Errorf("the response has device %s/%s, but device %s/%s is allocated",
				d.PoolName, d.DeviceName, want.Pool, want.Device)
		}
		if len(d.RequestNames) > 0 && !slices.Contains(d.RequestNames, want.Request) {
			return fmt.Errorf("the response has device %s for the requests %v, but it is allocated for %s",
				d.DeviceName, d.RequestNames, want.Request)
		}
		for _, id := range d.CdiDeviceIds {
			if _, _, _, err := parser.ParseQualifiedName(id); err != nil {
				return fmt.Errorf("CDI device ID of device %s: %w", d.DeviceName, err)
			}
		}
	}
	return nil
}

func preparesTwice(ctx context.Context, s *Suite) error {
	c, err := s.createAllocated(ctx, nil)
	if err != nil {
		return err
	}
	first, err := s.prepareOne(ctx, c)
	if err != nil {
		return err
	}
	second, err := s.prepareOne(ctx, c)
	if err != nil {
		return fmt.Errorf("second call: %w", err)
	}
	return sameDevices(first, second)
}

// sameDevices returns an error if two calls returned different devices.
func sameDevices(first, second []*drapb.Device) error {
	if diff := cmp.Diff(first, second, protocmp.Transform()); diff != "" {
		return fmt.Errorf("the responses differ (-first +second):\n%s", diff)
	}
	return nil
}

func preparesConcurrently(ctx context.Context, s *Suite) error {
	c, err := s.createAllocated(ctx, nil)
	if err != nil {
		return err
	}
	const callers = 8
	devices, errs := make([][]*drapb.Device, callers), make([]error, callers)
	var wait sync.WaitGroup
	for i := range callers {
		wait.Go(func() { devices[i], errs[i] = s.prepareOne(ctx, c) })
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, other := range devices[1:] {
		if err := sameDevices(devices[0], other); err != nil {
			return err
		}
	}
	return nil
}

func preparesNoClaims(ctx context.Context, s *Suite) error {
	responses, err := s.prepare(ctx)
	if err != nil {
		return err
	}
	if len(responses) != 0 {
		return fmt.Errorf("the request has no claims, but the response has %d entries", len(responses))
	}
	return nil
}

func returnsShareID(ctx context.Context, s *Suite) error {
	c, err := s.createAllocated(ctx, nil)
	if err != nil {
		return err
	}
	devices, err := s.prepareOne(ctx, c)
	if err != nil {
		return err
	}
	want := string(*c.Status.Allocation.Devices.Results[0].ShareID)
	for _, d := range devices {
		if d.GetShareId() != want {
			return fmt.Errorf("device %s has the share ID %q, but %q is allocated", d.DeviceName, d.GetShareId(), want)
		}
	}
	return nil
}

// readableCDIDir is a Requires function: the directory of CDI specs must be
// known.
func readableCDIDir(_ context.Context, s *Suite) error {
	if s.CDIDir == "" {
		return errors.New("the directory of CDI specs is not known")
	}
	return nil
}

func managesCDISpecs(ctx context.Context, s *Suite) error {
	c, err := s.createAllocated(ctx, nil)
	if err != nil {
		return err
	}
	devices, err := s.prepareOne(ctx, c)
	if err != nil {
		return err
	}
	var ids []string
	for _, d := range devices {
		ids = append(ids, d.CdiDeviceIds...)
	}
	if err := s.expectCDIDevices(ids, true); err != nil {
		return err
	}
	if err := s.unprepareOne(ctx, c); err != nil {
		return err
	}
	return s.expectCDIDevices(ids, false)
}

// expectCDIDevices returns an error unless the CDI library finds all devices with
// these IDs, if want is true, or none of them, if want is false.
func (s *Suite) expectCDIDevices(ids []string, want bool) error {
	cache, err := cdiapi.NewCache(cdiapi.WithSpecDirs(s.CDIDir), cdiapi.WithAutoRefresh(false))
	if err != nil {
		return err
	}
	for path, errs := range cache.GetErrors() {
		if want && strings.Contains(path, s.Driver) {
			return fmt.Errorf("the CDI library rejects %s: %w", path, errors.Join(errs...))
		}
	}
	for _, id := range ids {
		found := cache.GetDevice(id) != nil
		if found != want {
			return fmt.Errorf("CDI device %s in %s: found %t, want %t", id, s.CDIDir, found, want)
		}
	}
	return nil
}

func isolatesFailures(ctx context.Context, s *Suite) error {
	good, err := s.createAllocated(ctx, nil)
	if err != nil {
		return err
	}
	bad, err := s.createAllocated(ctx, func(a *resourceapi.AllocationResult) {
		a.Devices.Results[0].Device = "no-such-device"
	})
	if err != nil {
		return err
	}
	responses, err := s.prepare(ctx, bad.proto(), good.proto())
	if err != nil {
		return err
	}
	if err := expectRejected(responses, bad.UID); err != nil {
		return err
	}
	_, err = devicesOf(responses, good.UID)
	return err
}

func rejectsMissingClaim(ctx context.Context, s *Suite) error {
	return s.mustReject(ctx, &drapb.Claim{
		Namespace: s.Namespace, Name: missingClaim, Uid: string(uuid.NewUUID()),
	})
}

// mustReject returns an error unless prepare fails for the claim. The whole call
// may fail too: the kubeletplugin helper fetches all claims before it calls the
// driver.
func (s *Suite) mustReject(ctx context.Context, c *drapb.Claim) error {
	responses, err := s.prepare(ctx, c)
	if err != nil {
		return ctx.Err()
	}
	return expectRejected(responses, types.UID(c.Uid))
}

// expectRejected returns an error unless the response has an error for the claim.
func expectRejected(responses map[string]*drapb.NodePrepareResourceResponse, uid types.UID) error {
	r, ok := responses[string(uid)]
	switch {
	case !ok:
		return fmt.Errorf("the response has no entry for claim UID %s", uid)
	case r.Error == "":
		return errors.New("prepare succeeded, but must fail")
	}
	return nil
}

func rejectsOtherUID(ctx context.Context, s *Suite) error {
	c, err := s.createAllocated(ctx, nil)
	if err != nil {
		return err
	}
	other := c.proto()
	other.Uid = string(uuid.NewUUID())
	return s.mustReject(ctx, other)
}

func rejectsUnallocatedClaim(ctx context.Context, s *Suite) error {
	c, err := s.create(ctx)
	if err != nil {
		return err
	}
	return s.mustReject(ctx, c.proto())
}

func ignoresOtherDrivers(ctx context.Context, s *Suite) error {
	const other, otherDevice = "other.conformance.example", "other-device"
	c, err := s.createAllocated(ctx, func(a *resourceapi.AllocationResult) {
		a.Devices.Results = append(a.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: request, Driver: other, Pool: s.Node, Device: otherDevice,
		})
	})
	if err != nil {
		return err
	}
	devices, err := s.prepareOne(ctx, c)
	if err != nil {
		return err
	}
	for _, d := range devices {
		if d.DeviceName == otherDevice {
			return fmt.Errorf("the response has device %s of driver %s", d.DeviceName, other)
		}
	}
	return nil
}

func rejectsDoubleAllocation(ctx context.Context, s *Suite) error {
	first, err := s.createAllocated(ctx, nil)
	if err != nil {
		return err
	}
	if _, err := s.prepareOne(ctx, first); err != nil {
		return err
	}
	second, err := s.createAllocated(ctx, func(a *resourceapi.AllocationResult) {
		a.Devices.Results[0] = first.Status.Allocation.Devices.Results[0]
	})
	if err != nil {
		return err
	}
	responses, err := s.prepare(ctx, second.proto())
	if err != nil {
		return err
	}
	if err := expectRejected(responses, second.UID); err != nil {
		return err
	}
	if err := s.unprepareOne(ctx, first); err != nil {
		return err
	}
	if _, err := s.prepareOne(ctx, second); err != nil {
		return fmt.Errorf("after the first claim was unprepared: %w", err)
	}
	return nil
}

func isolatesShares(ctx context.Context, s *Suite) error {
	var claims [2]*claim
	var devices [2][]*drapb.Device
	for i := range claims {
		var err error
		if claims[i], err = s.createAllocated(ctx, nil); err != nil {
			return err
		}
		if devices[i], err = s.prepareOne(ctx, claims[i]); err != nil {
			return err
		}
	}
	for _, id := range devices[0][0].CdiDeviceIds {
		if slices.Contains(devices[1][0].CdiDeviceIds, id) {
			return fmt.Errorf("both shares have the CDI device %s, so their containers get the same edits", id)
		}
	}
	if err := s.unprepareOne(ctx, claims[0]); err != nil {
		return err
	}
	again, err := s.prepareOne(ctx, claims[1])
	if err != nil {
		return fmt.Errorf("after the other claim was unprepared: %w", err)
	}
	return sameDevices(devices[1], again)
}

func unpreparesUnknownClaim(ctx context.Context, s *Suite) error {
	c := &claim{ResourceClaim: &resourceapi.ResourceClaim{}}
	c.Namespace, c.Name, c.UID = s.Namespace, missingClaim, uuid.NewUUID()
	return s.unprepareOne(ctx, c)
}

func unpreparesTwice(ctx context.Context, s *Suite) error {
	c, err := s.createAllocated(ctx, nil)
	if err != nil {
		return err
	}
	if _, err := s.prepareOne(ctx, c); err != nil {
		return err
	}
	return errors.Join(s.unprepareOne(ctx, c), s.unprepareOne(ctx, c))
}

func unpreparesDeletedClaim(ctx context.Context, s *Suite) error {
	c, err := s.createAllocated(ctx, nil)
	if err != nil {
		return err
	}
	if _, err := s.prepareOne(ctx, c); err != nil {
		return err
	}
	if err := s.delete(ctx, c); err != nil {
		return err
	}
	return s.unprepareOne(ctx, c)
}

func preparesAfterUnprepare(ctx context.Context, s *Suite) error {
	c, err := s.createAllocated(ctx, nil)
	if err != nil {
		return err
	}
	for range 2 {
		if _, err := s.prepareOne(ctx, c); err != nil {
			return err
		}
		if err := s.unprepareOne(ctx, c); err != nil {
			return err
		}
	}
	return nil
}
