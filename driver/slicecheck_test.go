// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"
)

func TestIsRefusal(t *testing.T) {
	slices := resourceapi.Resource("resourceslices")
	kind := schema.GroupKind{Group: resourceapi.GroupName, Kind: "ResourceSlice"}
	for name, c := range map[string]struct {
		err  error
		want bool
	}{
		"no error":                {nil, false},
		"no connection":           {errors.New("connection refused"), false},
		"RBAC":                    {apierrors.NewForbidden(slices, "", errors.New("cannot create")), true},
		"invalid":                 {apierrors.NewInvalid(kind, "s", nil), true},
		"denied by a webhook":     {&apierrors.StatusError{ErrStatus: metav1.Status{Code: http.StatusTeapot}}, true},
		"API not served":          {apierrors.NewGenericServerResponse(404, "post", slices, "", "", 0, true), true},
		"the slice was deleted":   {apierrors.NewNotFound(slices, "s"), false},
		"changed by another":      {apierrors.NewConflict(slices, "s", errors.New("modified")), false},
		"token not accepted":      {apierrors.NewUnauthorized("not known"), false},
		"overload":                {apierrors.NewTooManyRequests("later", 1), false},
		"webhook does not run":    {apierrors.NewInternalError(errors.New("failed calling webhook")), false},
		"API server stops":        {apierrors.NewServiceUnavailable("stopping"), false},
		"request took too long":   {apierrors.NewTimeoutError("slow", 1), false},
		"resource version is old": {apierrors.NewResourceExpired("too old"), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := isRefusal(fmt.Errorf("create resource slice: %w", c.err)); got != c.want {
				t.Errorf("is a refusal: got %t, want %t", got, c.want)
			}
		})
	}
}

// pool returns the slices of a node with devices that can or cannot be shared.
func pool(shared ...bool) resourceslice.DriverResources {
	var s resourceslice.Slice
	for _, can := range shared {
		d := resourceapi.Device{}
		if can {
			d.AllowMultipleAllocations = ptr.To(true)
		}
		s.Devices = append(s.Devices, d)
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{"n1": {Slices: []resourceslice.Slice{s}}}}
}

func TestPublication_check(t *testing.T) {
	refused, dropped := errors.New("refused"), errors.New("dropped")
	for name, c := range map[string]struct {
		devices resourceslice.DriverResources
		change  func(*publication)
		want    error // nil: any, if unready
		ready   bool
	}{
		"not published":           {pool(true), func(*publication) {}, nil, false},
		"published":               {pool(true), func(p *publication) { p.confirm() }, nil, true},
		"refused":                 {pool(true), func(p *publication) { p.confirm(); p.setRefused(refused) }, refused, false},
		"published after refusal": {pool(true), func(p *publication) { p.setRefused(refused); p.confirm() }, nil, true},
		"fields dropped":          {pool(true, true), func(p *publication) { p.setDropped(dropped) }, dropped, false},
		"other fields dropped":    {pool(true, true), func(p *publication) { p.setDropped(nil) }, nil, true},
		"fields restored": {pool(true), func(p *publication) {
			p.setDropped(dropped)
			p.clearDropped()
		}, nil, true},
		"some work without fields": {pool(true, false), func(p *publication) { p.setDropped(dropped) }, nil, true},
		"no devices":               {pool(), func(p *publication) { p.setDropped(dropped) }, nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			var p publication
			p.setWanted(c.devices)
			c.change(&p)
			if err := p.check(); (err == nil) != c.ready || c.want != nil && !errors.Is(err, c.want) {
				t.Errorf("got %v, want ready: %t, error: %v", err, c.ready, c.want)
			}
		})
	}
}

func TestPublication_nextCheck(t *testing.T) {
	var p publication
	for _, want := range []time.Duration{confirmInterval, 2 * confirmInterval, 4 * confirmInterval} {
		if got := p.nextCheck(); got != want {
			t.Errorf("before the slices are confirmed: got %v, want %v", got, want)
		}
	}
	p.confirm()
	if got := p.nextCheck(); got != resyncInterval {
		t.Errorf("after the slices were confirmed: got %v, want %v", got, resyncInterval)
	}
	p.setRefused(errors.New("refused"))
	if got := p.nextCheck(); got != confirmInterval {
		t.Errorf("after a refusal: got %v, want %v", got, confirmInterval)
	}
	for range 10 {
		p.setRefused(errors.New("refused"))
		p.nextCheck()
	}
	if got := p.nextCheck(); got != resyncInterval {
		t.Errorf("after many refusals: got %v, want %v", got, resyncInterval)
	}
}
