// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
)

func allocationOf(results ...resourceapi.DeviceRequestAllocationResult) resourceapi.DeviceAllocationResult {
	return resourceapi.DeviceAllocationResult{Results: results}
}

func caseShareID(ctx context.Context, s *suite) {
	r := s.pickShared(ctx)
	_, devices := s.prepared(ctx, r)
	for _, d := range devices {
		if d.GetShareId() != string(*r.ShareID) {
			s.fatal("device %s has the share ID %q, but %q is allocated", d.DeviceName, d.GetShareId(), *r.ShareID)
		}
	}
}

// twoShares prepares two claims to shares of one device.
func (s *suite) twoShares(ctx context.Context) (claims [2]*claim, devices [2][]*dra.Device) {
	d := s.find(ctx, "allows multiple allocations and has room for two", func(d device) bool {
		return d.shared() &&
			room(d) > 1
	})
	for i := range claims {
		claims[i], devices[i] = s.prepared(ctx, s.take(d))
	}
	return claims, devices
}

func caseShareTwo(ctx context.Context, s *suite) {
	claims, devices := s.twoShares(ctx)
	s.unprepare(ctx, claims[0])
	if s.env.CDIDir != "" {
		s.resolves(cdiIDs(devices[1]), true)
	}
	s.same(devices[1], s.prepare(ctx, claims[1]), "after unprepare of the other share")
}

func caseShareOneClaim(ctx context.Context, s *suite) {
	d := s.find(ctx, "allows multiple allocations and has room for two", func(d device) bool {
		return d.shared() &&
			room(d) > 1
	})
	first, second := resultFor(s.take(d), "first"), resultFor(s.take(d), "second")
	_, devices := s.prepared(ctx, first, second)
	for _, r := range []resourceapi.DeviceRequestAllocationResult{first, second} {
		// SHARE-01 reports a device without a share ID.
		if !slices.ContainsFunc(devices, func(d *dra.Device) bool {
			return slices.Contains(d.RequestNames, r.Request) && (d.GetShareId() == string(*r.ShareID) || d.GetShareId() == "")
		}) {
			s.fatal("the response has no device for request %s with share ID %s", r.Request, *r.ShareID)
		}
	}
}

func caseShareIdentity(ctx context.Context, s *suite) {
	_, devices := s.twoShares(ctx)
	ids := s.withIDs(devices[0])
	for _, id := range s.ofClaim(cdiIDs(devices[1])) {
		if slices.Contains(ids, id) {
			s.fatal("both shares have the CDI device %s, so their containers get the same edits", id)
		}
	}
}

// larger returns an amount that the policy permits and that is larger than the smallest one.
func larger(c resourceapi.DeviceCapacity) (q resource.Quantity, ok bool) {
	p := c.RequestPolicy
	switch {
	case p == nil:
		return q, false
	case len(p.ValidValues) > 1:
		return p.ValidValues[1], true
	case p.ValidRange == nil || p.ValidRange.Min == nil:
		return q, false
	}
	q = smallest(c)
	if p.ValidRange.Step != nil {
		q.Add(*p.ValidRange.Step)
	} else {
		q.Add(q)
	}
	limit := c.Value
	if p.ValidRange.Max != nil {
		limit = *p.ValidRange.Max
	}
	return q, q.Cmp(limit) <= 0
}

func caseShareConsumed(ctx context.Context, s *suite) {
	d := s.find(ctx, "has a capacity of which a share can have several amounts", func(d device) bool {
		for _, c := range d.Capacity {
			if _, ok := larger(c); ok {
				return d.shared()
			}
		}
		return false
	})
	// effect returns what a container gets for a requested amount and the amount that is
	// consumed after rounding.
	effect := func(requested, consumed func(resourceapi.DeviceCapacity) resource.Quantity) string {
		r := s.take(d)
		amounts := map[resourceapi.QualifiedName]resource.Quantity{}
		for name, c := range d.Capacity {
			if q := requested(c); !q.IsZero() { // a request of nothing may be refused
				amounts[name] = q
			}
			r.ConsumedCapacity[name] = consumed(c)
		}
		c := s.create(ctx)
		exact := &resourceapi.ExactDeviceRequest{
			DeviceClassName: "conformance", Capacity: &resourceapi.CapacityRequirements{Requests: amounts},
		}
		c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: request, Exactly: exact}}
		c = s.replaceSpec(ctx, c)
		c = s.allocate(ctx, c, allocationOf(r))
		devices := s.prepare(ctx, c)
		text := s.fingerprint(ctx, c, devices)
		s.unprepare(ctx, c)
		return text
	}
	more := func(c resourceapi.DeviceCapacity) resource.Quantity {
		if q, ok := larger(c); ok {
			return q
		}
		return smallest(c)
	}
	rounded, large, small := effect(smallest, more), effect(more, more), effect(smallest, smallest)
	if large == small {
		s.skip("the CDI edits show no difference between the amounts of a capacity")
	}
	if rounded != large {
		s.fatal("the share has the amount of the request, and not the consumed one:\n got %s\nwant %s", rounded, large)
	}
}

func caseShareRoom(ctx context.Context, s *suite) {
	d := s.find(ctx, "allows multiple allocations and has a capacity", func(d device) bool {
		return d.shared() &&
			len(d.Capacity) > 0
	})
	s.prepared(ctx, s.take(d))
	whole := s.allocated(ctx, s.share(d, func(c resourceapi.DeviceCapacity) resource.Quantity { return c.Value }))
	s.expectRefusal(ctx, whole.proto(), "a share of the whole capacity of a device besides another share")
	if s.server != nil && s.config.Serve == nil {
		s.startAgain(ctx, stopSignal)
		s.expectRefusal(ctx, whole.proto(),
			"a share of the whole capacity besides another share, after a restart of the driver")
	}
}

// largest returns the largest amount of a capacity that its policy permits for one share.
func largest(c resourceapi.DeviceCapacity) resource.Quantity {
	switch p := c.RequestPolicy; {
	case p != nil && len(p.ValidValues) > 0:
		return p.ValidValues[len(p.ValidValues)-1]
	case p != nil && p.ValidRange != nil && p.ValidRange.Max != nil:
		return *p.ValidRange.Max
	}
	return c.Value
}

// expectRoomReturned ends the case unless a device has room for the same number of shares again after the first
// ones were unprepared.
func (s *suite) expectRoomReturned(ctx context.Context, d device) {
	// fill prepares shares until the driver refuses one, ends them, and returns their number.
	fill := func(most int, amount func(resourceapi.DeviceCapacity) resource.Quantity) int {
		var claims []*claim
		for len(claims) < most {
			c := s.allocated(ctx, s.share(d, amount))
			if _, err := s.main().tryPrepare(ctx, c.proto()); err != nil {
				s.expectResponse(err, "prepare of a share")
				break
			}
			claims = append(claims, c)
		}
		for _, c := range claims {
			s.end(ctx, c)
		}
		return len(claims)
	}
	const most = 8 // for a driver that relies on the scheduler
	for _, amount := range []func(resourceapi.DeviceCapacity) resource.Quantity{largest, smallest} {
		before := fill(most, amount)
		if after := fill(before, amount); after < before {
			s.fatal("device %s has room for %d shares after %d equal ones were unprepared", d.Name, after, before)
		}
	}
}

func casePolicyStable(ctx context.Context, s *suite) {
	d := s.find(ctx, "allows multiple allocations", device.shared)
	s.prepared(ctx, s.take(d))
	const written = time.Second // how long a driver may take to write values that it computes after prepare
	limited, cancel := context.WithTimeout(ctx, written)
	defer cancel()
	_ = poll(limited, func() error {
		s.all = nil
		isSame := func(x device) bool { return x.Name == d.Name && x.pool == d.pool }
		now := s.find(ctx, "has the name that it had before", isSame)
		for name, c := range d.Capacity {
			if !equality.Semantic.DeepEqual(c, now.Capacity[name]) {
				s.fatal("capacity %s of device %s changed while a share was prepared: it was %s, and is %s", name, d.Name,
					c.String(), ptr.To(now.Capacity[name]).String())
			}
		}
		return errNoChange
	})
}

// errNoChange makes poll continue until its time is over.
var errNoChange = errors.New("nothing changed")
