// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/internal/probe"
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
	p.register()
	for _, step := range []struct {
		off     bool
		want    float64
		event   string
		unready string // part of the answer of the readiness probe; "" if the plugin is ready
	}{
		{true, 1, "Warning FeaturesDisabled", "enable the feature gate DRAConsumableCapacity in kube-apiserver"},
		{false, 0, "Normal FeaturesEnabled", ""},
	} {
		off.Store(step.off)
		eventually.Eventually(t, timeout, fmt.Sprintf("gate off: %t; the metric shows it", step.off), func() error {
			p.RefreshDevices()
			return wantDegraded(t, registry, v1alpha1.DegradedFeaturesDisabled, step.want)
		})
		wantEvent(t, recorder, step.event)
		p.awaitReadiness(step.unready)
	}
}

// awaitReadiness waits until the readiness probe fails with an error that contains text, or succeeds if text is "".
func (p *plugin) awaitReadiness(text string) {
	p.t.Helper()
	eventually.Eventually(p.t, timeout, fmt.Sprintf("readiness fails with %q", text), func() error {
		if text == "" {
			return p.healthy(probe.Ready)
		}
		return wantFailure(p.healthy(probe.Ready), text)
	})
}

// slicesFail makes the API server of p answer some requests for ResourceSlices with an error.
type slicesFail struct {
	err     atomic.Pointer[error] // nil: the requests succeed
	answers atomic.Int32          // answers with an error
}

func (p *plugin) failSlices(verbs ...string) *slicesFail {
	f := &slicesFail{}
	for _, verb := range verbs {
		p.client.PrependReactor(verb, "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
			err := f.err.Load()
			if err == nil {
				return false, nil, nil
			}
			f.answers.Add(1)
			return true, nil, *err
		})
	}
	return f
}

// resourceSlices is the resource of the errors of these tests.
var resourceSlices = resourceapi.Resource("resourceslices")

// forbidden is the answer if RBAC does not permit a request.
func forbidden() error {
	return apierrors.NewForbidden(resourceSlices, "", errors.New(`User "plugin" cannot write resource "resourceslices"`))
}

// deniedByPolicy is the answer if a ValidatingAdmissionPolicy denies a request. The name is another in each answer.
func deniedByPolicy() error {
	denied := errors.New("ValidatingAdmissionPolicy 'p' denied request")
	err := apierrors.NewForbidden(resourceSlices, "00000-x7f2k", denied)
	err.ErrStatus.Reason, err.ErrStatus.Code = metav1.StatusReasonInvalid, http.StatusUnprocessableEntity
	return err
}

func TestPublish_refused(t *testing.T) {
	for name, c := range map[string]struct {
		verb string
		err  error
		want string // part of the answer of the readiness probe
	}{
		"by RBAC": {"create", forbidden(), `create resource slice: resourceslices.resource.k8s.io is forbidden: ` +
			`User "plugin" cannot write resource "resourceslices": do the plugin's ClusterRole and ClusterRoleBinding`},
		"by RBAC for lists": {"list", forbidden(), `list the ResourceSlices of this node: resourceslices.resource.k8s.io ` +
			`is forbidden`},
		"by a policy": {"create", deniedByPolicy(), `create resource slice: resourceslices.resource.k8s.io is forbidden: ` +
			`ValidatingAdmissionPolicy 'p' denied request: does an admission webhook or a ValidatingAdmissionPolicy, ` +
			`such as the chart's RELEASE-slices, deny the request?`},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlugin(t)
			eventually.Eventually(t, timeout, "nic0 is published", p.published)
			p.stop()
			p.deleteSlices()
			recorder, registry := events.NewFakeRecorder(100), prometheus.NewRegistry()
			p.options.Events, p.options.Metrics = recorder, registry
			f := p.failSlices(c.verb)
			f.err.Store(&c.err)
			p.start()
			p.register()
			p.awaitReadiness(c.want)
			wantEvent(t, recorder, "Warning SlicesRefused the API server refuses the ResourceSlices of this node")
			if err := wantDegraded(t, registry, v1alpha1.DegradedSlicesRefused, 1); err != nil {
				t.Error(err)
			}
			f.err.Store(nil)
			p.awaitReadiness("")
			wantEvent(t, recorder, "Normal SlicesStored")
			if err := wantDegraded(t, registry, v1alpha1.DegradedSlicesRefused, 0); err != nil {
				t.Error(err)
			}
		})
	}
}

// A plugin that has published its devices stays ready while no API server answers: an outage must not stop a rollout.
// If the API server refuses the devices, it is not ready.
func TestPublish_updateFails(t *testing.T) {
	for name, c := range map[string]struct {
		err     error
		unready string
	}{
		"no connection":  {errors.New("dial tcp 10.96.0.1:443: connect: connection refused"), ""},
		"overload":       {apierrors.NewTooManyRequests("try again later", 1), ""},
		"internal error": {apierrors.NewInternalError(errors.New("etcdserver: request timed out")), ""},
		"forbidden":      {forbidden(), "update resource slice: resourceslices.resource.k8s.io is forbidden"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlugin(t)
			p.stop()
			p.deleteSlices()
			p.generateNames()
			p.start()
			p.register()
			p.awaitReadiness("")
			f := p.failSlices("update")
			f.err.Store(&c.err)
			p.setMTU(1500)
			eventually.Eventually(t, timeout, "two updates have failed", func() error {
				p.RefreshDevices()
				if n := f.answers.Load(); n < 2 {
					return fmt.Errorf("%d have", n)
				}
				return nil
			})
			p.awaitReadiness(c.unready)
			f.err.Store(nil)
			eventually.Eventually(t, timeout, "the plugin is ready after the update", func() error {
				p.RefreshDevices()
				return p.healthy(probe.Ready)
			})
		})
	}
}

// generateNames makes the API server of p generate the name of a slice, without which the helper replaces slices
// instead of updating them.
func (p *plugin) generateNames() {
	p.client.PrependReactor("create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if slice, ok := a.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice); ok && slice.Name == "" {
			slice.Name = slice.GenerateName + "x7f2k"
		}
		return false, nil, nil
	})
}

// setMTU sets the MTU of the NIC, which is an attribute of the device.
func (p *plugin) setMTU(mtu int) {
	p.t.Helper()
	link, err := netlink.LinkByName("nic0")
	if err == nil {
		err = netlink.LinkSetMTU(link, mtu)
	}
	if err != nil {
		p.t.Fatal(err)
	}
}

// deleteSlices deletes the ResourceSlices of all plugins.
func (p *plugin) deleteSlices() {
	p.t.Helper()
	api := p.client.ResourceV1().ResourceSlices()
	list, err := api.List(p.t.Context(), metav1.ListOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	for i := range list.Items {
		if err := api.Delete(p.t.Context(), list.Items[i].Name, metav1.DeleteOptions{}); err != nil {
			p.t.Fatal(err)
		}
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
