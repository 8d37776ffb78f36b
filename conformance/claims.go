// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/uuid"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
)

// claim is a ResourceClaim that a case created.
type claim struct {
	*resourceapi.ResourceClaim
	deleted bool
}

func (c *claim) proto() *drapb.Claim {
	return &drapb.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}
}

const (
	// request is the name of the claims' only request.
	request = "device"
	// missingClaim is the name of a claim that does not exist.
	missingClaim = "conformance-no-such-claim"
)

// create creates a claim without an allocation.
func (s *Suite) create(ctx context.Context) (*claim, error) {
	desired := &resourceapi.ResourceClaim{
		// The API server sets the UID; a fake one keeps this.
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: "conformance-" + rand.String(8), UID: uuid.NewUUID()},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: request,
			Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: s.DeviceClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
			},
		}}}},
	}
	created, err := s.Client.ResourceV1().ResourceClaims(s.Namespace).Create(ctx, desired, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create a claim: %w", err)
	}
	c := &claim{ResourceClaim: created}
	s.claims = append(s.claims, c)
	return c, nil
}

// createAllocated creates a claim and allocates a device to it as the scheduler
// does: a share if the device allows multiple allocations, otherwise the whole
// device. change, which may be nil, can alter the allocation before it is written.
func (s *Suite) createAllocated(ctx context.Context, change func(*resourceapi.AllocationResult)) (*claim, error) {
	device, pool, err := s.device(ctx)
	if err != nil {
		return nil, err
	}
	c, err := s.create(ctx)
	if err != nil {
		return nil, err
	}
	results := []resourceapi.DeviceRequestAllocationResult{allocate(s.Driver, pool, device)}
	allocation := &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
	if change != nil {
		change(allocation)
	}
	c.Status.Allocation = allocation
	// The kube-controller-manager would deallocate a claim that is reserved only for
	// a pod that does not exist. It keeps consumers of other kinds.
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
		{APIGroup: "conformance.example", Resource: "cases", Name: c.Name, UID: uuid.NewUUID()},
	}
	api := s.Client.ResourceV1().ResourceClaims(s.Namespace)
	updated, err := api.UpdateStatus(ctx, c.ResourceClaim, metav1.UpdateOptions{})
	if err != nil {
		return nil, fmt.Errorf("allocate claim %s: %w", c.Name, err)
	}
	c.ResourceClaim = updated
	return c, nil
}

// allocate returns the result of allocating a device, or a share of it.
func allocate(driver, pool string, device resourceapi.Device) resourceapi.DeviceRequestAllocationResult {
	r := resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driver, Pool: pool, Device: device.Name}
	if !ptr.Deref(device.AllowMultipleAllocations, false) {
		return r
	}
	r.ShareID = ptr.To(uuid.NewUUID())
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{}
	for name, capacity := range device.Capacity {
		r.ConsumedCapacity[name] = consumedByDefault(capacity)
	}
	return r
}

// consumedByDefault returns the amount that a request without a capacity consumes
// (KEP-5075): the default of the request policy, or the whole capacity.
func consumedByDefault(c resourceapi.DeviceCapacity) resource.Quantity {
	if c.RequestPolicy != nil && c.RequestPolicy.Default != nil {
		return *c.RequestPolicy.Default
	}
	return c.Value
}

// device returns a device that the plugin publishes, and its pool.
func (s *Suite) device(ctx context.Context) (resourceapi.Device, string, error) {
	slices, err := s.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return resourceapi.Device{}, "", fmt.Errorf("list ResourceSlices: %w", err)
	}
	for _, slice := range slices.Items {
		if slice.Spec.Driver != s.Driver || ptr.Deref(slice.Spec.NodeName, "") != s.Node {
			continue
		}
		for _, d := range slice.Spec.Devices {
			if (s.Device == "" || s.Device == d.Name) && len(d.Taints) == 0 {
				return d, slice.Spec.Pool.Name, nil
			}
		}
	}
	return resourceapi.Device{}, "", fmt.Errorf("driver %s publishes no untainted device %s for node %s",
		s.Driver, s.Device, s.Node)
}

// sharedDevice is a Requires function: the device must allow multiple allocations.
func sharedDevice(ctx context.Context, s *Suite) error {
	d, _, err := s.device(ctx)
	if err != nil {
		return err
	}
	if !ptr.Deref(d.AllowMultipleAllocations, false) {
		return fmt.Errorf("device %s does not allow multiple allocations", d.Name)
	}
	return nil
}

// delete deletes a claim unless the case has deleted it.
func (s *Suite) delete(ctx context.Context, c *claim) error {
	if c.deleted {
		return nil
	}
	c.deleted = true
	api := s.Client.ResourceV1().ResourceClaims(s.Namespace)
	err := api.Delete(ctx, c.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(c.UID))})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete claim %s: %w", c.Name, err)
	}
	return nil
}

// prepare prepares claims in one call, and returns the response by claim UID.
func (s *Suite) prepare(
	ctx context.Context, claims ...*drapb.Claim,
) (map[string]*drapb.NodePrepareResourceResponse, error) {
	response, err := s.plugin.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		return nil, fmt.Errorf("NodePrepareResources: %w", err)
	}
	return response.Claims, nil
}

// prepareOne prepares one claim and returns its devices.
func (s *Suite) prepareOne(ctx context.Context, c *claim) ([]*drapb.Device, error) {
	responses, err := s.prepare(ctx, c.proto())
	if err != nil {
		return nil, err
	}
	return devicesOf(responses, c.UID)
}

// devicesOf returns the devices of a claim from a response.
func devicesOf(
	responses map[string]*drapb.NodePrepareResourceResponse, uid types.UID,
) ([]*drapb.Device, error) {
	r, ok := responses[string(uid)]
	switch {
	case !ok:
		return nil, fmt.Errorf("the response has no entry for claim UID %s", uid)
	case r.Error != "":
		return nil, fmt.Errorf("prepare failed: %s", r.Error)
	}
	return r.Devices, nil
}

// unprepareOne unprepares one claim.
func (s *Suite) unprepareOne(ctx context.Context, c *claim) error {
	request := &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{c.proto()}}
	response, err := s.plugin.NodeUnprepareResources(ctx, request)
	if err != nil {
		return fmt.Errorf("NodeUnprepareResources: %w", err)
	}
	r, ok := response.Claims[string(c.UID)]
	switch {
	case !ok:
		return fmt.Errorf("the response has no entry for claim UID %s", c.UID)
	case r.Error != "":
		return fmt.Errorf("unprepare failed: %s", r.Error)
	}
	return nil
}
