// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package reproduction shows that the scheduler of Kubernetes counts what a claim consumes twice
// while the claim is both allocated and in flight. The test fails as long as it does.
package reproduction

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/dynamicresources"
	"k8s.io/kubernetes/pkg/scheduler/util/assumecache"
	"k8s.io/utils/ptr"
)

// events delivers the events of claims to the scheduler's cache.
type events struct{ cache.ResourceEventHandler }

func (e *events) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	e.ResourceEventHandler = h
	return nil, nil
}

// newClaim returns a claim that consumes 400 of the bandwidth of a device, once it is allocated.
func newClaim(version string, allocated bool) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: "default", Name: "claim", UID: "claim-uid", ResourceVersion: version}}
	if allocated {
		c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{
				Request: "nic", Driver: "driver", Pool: "node", Device: "nic0", ShareID: ptr.To(types.UID("share")),
				ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"bandwidth": resource.MustParse("400")},
			}}}}
	}
	return c
}

func TestGatherAllocatedState_claimIsAllocatedAndInFlight(t *testing.T) {
	e := &events{}
	claims := assumecache.NewAssumeCache(klog.Background(), e, "ResourceClaim", "", nil)
	factory := informers.NewSharedInformerFactory(fake.NewClientset(), 0)
	tracker := dynamicresources.NewDRAManager(t.Context(), claims, nil, factory).ResourceClaims()
	expect := func(when string, want int64) {
		t.Helper()
		state, err := tracker.GatherAllocatedState()
		if err != nil {
			t.Fatal(err)
		}
		var got int64
		if q := state.AggregatedCapacity[structured.MakeDeviceID("driver", "node", "nic0")]["bandwidth"]; q != nil {
			got = q.Value()
		}
		if got != want {
			t.Errorf("%s: the device has %d of its bandwidth consumed, want %d", when, got, want)
		}
	}
	pending, allocated := newClaim("1", false), newClaim("2", true)
	e.OnAdd(pending, true)
	expect("claim without allocation", 0)

	// Reserve chooses the device.
	if err := tracker.SignalClaimPendingAllocation(allocated.UID, allocated); err != nil {
		t.Fatal(err)
	}
	expect("in flight", 400)

	// PreBind has written the allocation, and the informer is faster than the rest of PreBind.
	e.OnUpdate(pending, allocated)
	expect("allocated, and still in flight", 400)

	tracker.MaybeRemoveClaimPendingAllocation(allocated.UID, false)
	expect("allocated", 400)
}
