// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// plannedShare is an allocation result of a claim, before its kind is involved.
type plannedShare struct {
	record.Share
	parameters [][]byte // opaque parameters, the DeviceClass's first
}

// plan converts the claim's allocation to shares. It ignores the results of
// other drivers.
func plan(driverName string, claim *resourceapi.ResourceClaim) (planned []plannedShare, err error) {
	if claim.Status.Allocation == nil {
		return nil, errors.New("the claim is not allocated: has the scheduler removed the allocation? the kubelet retries")
	}
	devices := claim.Status.Allocation.Devices
	for _, result := range devices.Results {
		if result.Driver == driverName {
			parameters := parametersFor(driverName, result, devices.Config)
			planned = append(planned, plannedShare{shareOf(claim.UID, result), parameters})
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

// parametersFor returns the driver's opaque parameters that apply to a result: the DeviceClass's before the claim's.
func parametersFor(
	driverName string,
	result resourceapi.DeviceRequestAllocationResult,
	all []resourceapi.DeviceAllocationConfiguration,
) (raw [][]byte) {
	applying := resourceclaim.ConfigForResult(all, result)
	for _, source := range []resourceapi.AllocationConfigSource{resourceapi.AllocationConfigSourceClass,
		resourceapi.AllocationConfigSourceClaim} {
		for _, c := range applying {
			if c.Source == source && c.Opaque.Driver == driverName {
				raw = append(raw, c.Opaque.Parameters.Raw)
			}
		}
	}
	return raw
}

func sameShares(planned []plannedShare, recorded []record.Share) bool {
	return slices.EqualFunc(planned, recorded, func(p plannedShare, r record.Share) bool { return p.Same(r) })
}

// configure finds each planned share's kind, and lets it compute the share's parameters.
func (d *Driver) configure(ctx context.Context, namespace string, planned []plannedShare) ([]share, error) {
	shares := make([]share, 0, len(planned))
	for _, p := range planned {
		kind, err := d.kinds.find(p.Pool, p.Device)
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

// validate refuses shares that exclude each other, and shares that cannot serve the pods that the claim is reserved
// for. The driver refuses pods that join later when they attach.
func (d *Driver) validate(claim *resourceapi.ResourceClaim, shares []share) error {
	for k, validator := range kindsOf[CombinationValidator](d.kinds) {
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
