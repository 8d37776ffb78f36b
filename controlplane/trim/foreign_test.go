// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"context"
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// named returns a claim of another driver with a name, which change alters.
func named(name string, change func(*resourceapi.ResourceClaim)) *resourceapi.ResourceClaim {
	claim := foreignClaim(1)
	claim.Name = name
	if change != nil {
		change(claim)
	}
	return claim
}

func TestIsForeign(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*resourceapi.ResourceClaim)
		want   bool
	}{
		"of another driver": {func(*resourceapi.ResourceClaim) {}, true},
		"not allocated":     {func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} }, true},
		"one device of this driver": {func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[7].Driver = driver
		}, false},
		"status of a device of this driver": {func(c *resourceapi.ResourceClaim) {
			c.Status.Devices[0].Driver = driver
		}, false},
		"parameters for this driver": {func(c *resourceapi.ResourceClaim) {
			c.Spec.Devices.Config[0].Opaque.Driver = driver
		}, false},
		"annotation of this driver": {func(c *resourceapi.ResourceClaim) {
			c.Annotations[scheduling.ReservedForAnnotation] = "batch/jobs/train"
		}, false},
		"generated for a Job": {func(c *resourceapi.ResourceClaim) {
			c.OwnerReferences[0].APIVersion, c.OwnerReferences[0].Kind = "batch/v1", "Job"
		}, false},
		"owned by a Job that is not its controller": {func(c *resourceapi.ResourceClaim) {
			c.OwnerReferences[0].APIVersion, c.OwnerReferences[0].Kind = "batch/v1", "Job"
			c.OwnerReferences[0].Controller = ptr.To(false)
		}, true},
		"reserved for a PodGroup": {func(c *resourceapi.ResourceClaim) {
			c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{
				APIGroup: scheduling.GroupName, Resource: "podgroups", Name: "group", UID: "1",
			})
		}, false},
		"reserved for a terminal pod": {func(c *resourceapi.ResourceClaim) {
			c.Status.ReservedFor[0].APIGroup = scheduling.GroupName
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := IsForeign(named("claim", test.change), driver); got != test.want {
				t.Errorf("got %t, want %t", got, test.want)
			}
		})
	}
}

// withoutWatchList is a source that does not send the list as events of a watch.
type withoutWatchList struct{ *cache.ListWatch }

func (withoutWatchList) IsWatchListSemanticsUnSupported() bool { return true }

// The informer stores the claims that concern the driver at the moment, and reports each change of other claims
// to its handlers, which may know the claim by name.
func TestWithoutForeignClaims(t *testing.T) {
	allocated := func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Driver = driver }
	events := watch.NewFake()
	informer := cache.NewSharedIndexInformer(WithoutForeignClaims(withoutWatchList{&cache.ListWatch{
		ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
			return &resourceapi.ResourceClaimList{
				ListMeta: metav1.ListMeta{ResourceVersion: "1"},
				Items:    []resourceapi.ResourceClaim{*named("foreign", nil), *named("own", allocated)},
			}, nil
		},
		WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return events, nil },
	}}, driver), &resourceapi.ResourceClaim{}, 0, cache.Indexers{})
	reported := make(chan string, 10)
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { reported <- "added " + nameOf(o) },
		UpdateFunc: func(_, o any) { reported <- "updated " + nameOf(o) },
		DeleteFunc: func(o any) { reported <- "deleted " + nameOf(o) },
	})
	if err != nil {
		t.Fatal(err)
	}
	go informer.RunWithContext(t.Context())
	expect := func(report string, stored ...string) {
		t.Helper()
		select {
		case got := <-reported:
			if got != report {
				t.Errorf("report: got %q, want %q", got, report)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("no report, want %q", report)
		}
		keys := informer.GetStore().ListKeys()
		slices.Sort(keys)
		if !slices.Equal(keys, stored) {
			t.Errorf("stored after %q: got %q, want %q", report, keys, stored)
		}
	}
	const own, changing = "team-1/own", "team-1/changing"
	expect("added own", own)
	events.Add(named("changing", nil))
	expect("deleted changing", own)
	events.Modify(named("changing", allocated))
	expect("added changing", changing, own)
	events.Modify(named("changing", allocated))
	expect("updated changing", changing, own)
	events.Modify(named("changing", nil))
	expect("deleted changing", own)
	events.Delete(named("own", allocated))
	expect("deleted own")
}

func nameOf(o any) string {
	claim, ok := o.(*resourceapi.ResourceClaim)
	if !ok {
		return "no claim"
	}
	return claim.Name
}
