// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"

	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// switchConsumableCapacity makes the API server of p drop the fields of consumable capacity while the
// returned value is true.
func (p *plugin) switchConsumableCapacity() *atomic.Bool {
	off := &atomic.Bool{}
	drop := func(action clienttesting.Action) (bool, runtime.Object, error) {
		slice, ok := action.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		for i := range slice.Spec.Devices {
			if ok && off.Load() {
				slice.Spec.Devices[i].AllowMultipleAllocations = nil
			}
		}
		return false, nil, nil
	}
	p.client.PrependReactor("create", "resourceslices", drop)
	p.client.PrependReactor("update", "resourceslices", drop)
	return off
}

func TestPublish_featureGateEnabledLater(t *testing.T) {
	p := newPlugin(t)
	p.stop()
	recorder, registry := events.NewFakeRecorder(100), prometheus.NewRegistry()
	p.options.Events, p.options.Metrics = recorder, registry
	off := p.switchConsumableCapacity()
	off.Store(true)
	p.start()
	for _, step := range []struct {
		off   bool
		want  float64
		event string
	}{
		{true, 1, "Warning FeaturesDisabled"},
		{false, 0, "Normal FeaturesEnabled"},
	} {
		off.Store(step.off)
		eventually.Eventually(t, timeout, fmt.Sprintf("gate off: %t; the metric shows it", step.off), func() error {
			p.RefreshDevices()
			return wantDegraded(t, registry, params.DegradedFeaturesDisabled, step.want)
		})
		wantEvent(t, recorder, step.event)
	}
}

// wantDegraded returns an error if the metric of a degraded condition does not have a value.
func wantDegraded(t *testing.T, registry *prometheus.Registry, condition string, want float64) error {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			if f.GetName() == "dra_shared_degraded" && m.Label[0].GetValue() == condition && m.Gauge.GetValue() == want {
				return nil
			}
		}
	}
	return fmt.Errorf("dra_shared_degraded of %s is not %v", condition, want)
}
