package conformance

import (
	"context"
	"errors"
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

// claim is a ResourceClaim that a case made.
type claim struct {
	*resourceapi.ResourceClaim
	deleted bool
}

func (c *claim) proto() *drapb.Claim {
	return &drapb.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}
}

const request = "device"

// create makes a claim without an allocation.
func (s *Suite) create(ctx context.Context) (*claim, error) {
	wanted := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: "conformance-" + rand.String(8), UID: uuid.NewUUID()},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: request, Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: s.DeviceClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
		}}}},
	}
	made, err := s.Client.ResourceV1().ResourceClaims(s.Namespace).Create(ctx, wanted, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create a claim: %w", err)
	}
	c := &claim{ResourceClaim: made}
	s.made = append(s.made, c)
	return c, nil
}

// allocated makes a claim and allocates a device to it as the scheduler would:
// a share of a device that many may use, or else a whole device. change may
// alter the allocation before it is written.
func (s *Suite) allocated(ctx context.Context, change func(*resourceapi.AllocationResult)) (*claim, error) {
	device, pool, err := s.device(ctx)
	if err != nil {
		return nil, err
	}
	c, err := s.create(ctx)
	if err != nil {
		return nil, err
	}
	allocation := &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{result(s.Driver, pool, device)}},
	}
	if change != nil {
		change(allocation)
	}
	c.Status.Allocation = allocation
	// No pod: kube-controller-manager would find that it does not exist, and
	// take the allocation away. Consumers of other kinds are kept.
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{APIGroup: "conformance.example", Resource: "cases", Name: c.Name, UID: uuid.NewUUID()}}
	written, err := s.Client.ResourceV1().ResourceClaims(s.Namespace).UpdateStatus(ctx, c.ResourceClaim, metav1.UpdateOptions{})
	if err != nil {
		return nil, fmt.Errorf("allocate claim %s: %w", c.Name, err)
	}
	c.ResourceClaim = written
	return c, nil
}

func result(driver, pool string, device resourceapi.Device) resourceapi.DeviceRequestAllocationResult {
	r := resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driver, Pool: pool, Device: device.Name}
	if !ptr.Deref(device.AllowMultipleAllocations, false) {
		return r
	}
	r.ShareID = ptr.To(uuid.NewUUID())
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{}
	for name, capacity := range device.Capacity {
		r.ConsumedCapacity[name] = consumed(capacity)
	}
	return r
}

// consumed is what a claim consumes that asks for nothing in particular
// (KEP-5075): the policy's default, or everything.
func consumed(c resourceapi.DeviceCapacity) resource.Quantity {
	if c.RequestPolicy != nil && c.RequestPolicy.Default != nil {
		return *c.RequestPolicy.Default
	}
	return c.Value
}

// device picks a device that the plugin publishes.
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
	return resourceapi.Device{}, "", fmt.Errorf("driver %s publishes no device %s for node %s", s.Driver, s.Device, s.Node)
}

// sharing is a need: a device that several claims may use.
func sharing(ctx context.Context, s *Suite) error {
	d, _, err := s.device(ctx)
	if err == nil && !ptr.Deref(d.AllowMultipleAllocations, false) {
		err = fmt.Errorf("device %s does not allow multiple allocations", d.Name)
	}
	return err
}

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

// prepare asks for several claims at once.
func (s *Suite) prepare(ctx context.Context, claims ...*drapb.Claim) (map[string]*drapb.NodePrepareResourceResponse, error) {
	response, err := s.plugin.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		return nil, fmt.Errorf("NodePrepareResources failed as a whole: %w", err)
	}
	return response.Claims, nil
}

// prepareOne asks for one claim that must succeed.
func (s *Suite) prepareOne(ctx context.Context, c *claim) ([]*drapb.Device, error) {
	responses, err := s.prepare(ctx, c.proto())
	if err != nil {
		return nil, err
	}
	return succeeded(responses, c.UID)
}

func succeeded(responses map[string]*drapb.NodePrepareResourceResponse, uid types.UID) ([]*drapb.Device, error) {
	r, ok := responses[string(uid)]
	switch {
	case !ok:
		return nil, fmt.Errorf("the response has no entry for claim UID %s", uid)
	case r.Error != "":
		return nil, fmt.Errorf("prepare failed: %s", r.Error)
	}
	return r.Devices, nil
}

func (s *Suite) unprepareOne(ctx context.Context, c *claim) error {
	response, err := s.plugin.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{c.proto()}})
	if err != nil {
		return fmt.Errorf("NodeUnprepareResources failed as a whole: %w", err)
	}
	r, ok := response.Claims[string(c.UID)]
	switch {
	case !ok:
		return fmt.Errorf("the response has no entry for claim UID %s", c.UID)
	case r.Error != "":
		return errors.New("unprepare failed: " + r.Error)
	}
	return nil
}
