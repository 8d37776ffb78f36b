// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// Only the controller may create claims that use a fabric without counting as a
// group.
func TestAdmission_rejectsZeroGroups(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "zero")
	zero := func(name resourceapi.QualifiedName) *resourceapi.CapacityRequirements {
		requests := map[resourceapi.QualifiedName]resource.Quantity{name: resource.MustParse("0")}
		return &resourceapi.CapacityRequirements{Requests: requests}
	}
	const class = "fabric." + driverName
	for name, request := range map[string]resourceapi.DeviceRequest{
		"one device": {
			Name: "f", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, Capacity: zero("groups")},
		},
		"capacity with its domain": {
			Name: "f", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, Capacity: zero(driverName + "/groups")},
		},
		"second alternative": {Name: "f", FirstAvailable: []resourceapi.DeviceSubRequest{
			{Name: "a", DeviceClassName: class}, {Name: "b", DeviceClassName: class, Capacity: zero("groups")},
		}},
	} {
		spec := fabricSpec()
		spec.Devices.Requests[0] = request
		meta := metav1.ObjectMeta{Namespace: ns, Name: "zero"}
		template := resourceapi.ResourceClaimTemplateSpec{Spec: spec}
		for _, o := range []client.Object{
			&resourceapi.ResourceClaim{ObjectMeta: meta, Spec: spec},
			&resourceapi.ResourceClaimTemplate{ObjectMeta: meta, Spec: template},
		} {
			// The API server applies the chart's policies some time after they were created.
			condition := fmt.Sprintf("%s: the API server refuses a %T", name, o)
			eventually.Eventually(t, timeout, condition, func() error {
				o.SetResourceVersion("") // an attempt that succeeded has set it
				err := e.client.Create(t.Context(), o, client.DryRunAll)
				if err == nil {
					return errors.New("it accepted the object")
				}
				if !strings.Contains(err.Error(), "would use a fabric without counting as a group: request 1") {
					return fmt.Errorf("want the reason that it would not count as a group: %w", err)
				}
				return nil
			})
		}
	}
}

// hangingWebhook accepts connections at the port of the webhooks, and answers none. It returns the
// number of connections so far.
func hangingWebhook(t *testing.T) (connections func() int64) {
	t.Helper()
	listener, err := net.Listen("tcp", net.JoinHostPort(controlPlaneAddress, "9443"))
	if err != nil {
		t.Fatalf("listen in place of the controller: %v", err)
	}
	var accepted atomic.Int64
	var open sync.WaitGroup
	done := make(chan struct{})
	open.Go(func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return // the test has ended
			}
			accepted.Add(1)
			open.Go(func() {
				<-done
				_ = connection.Close()
			})
		}
	})
	t.Cleanup(func() {
		close(done)
		_ = listener.Close()
		open.Wait()
	})
	return accepted.Load
}

// A controller that hangs delays only requests that its webhooks must check, by at most their
// timeout.
func TestAdmission_hangingController(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)() // it leaves the certificates of the webhooks
	connections := hangingWebhook(t)
	e.requestsWithoutController(t, "hanging", 2*time.Second, func(called bool) func(*testing.T) {
		before := connections()
		return func(t *testing.T) {
			t.Helper()
			if got := connections() > before; got != called {
				t.Errorf("the API server called a webhook: got %t, want %t", got, called)
			}
		}
	})
}

// A controller that is absent refuses connections. It does not delay requests.
func TestAdmission_absentController(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)() // it leaves the certificates of the webhooks
	e.requestsWithoutController(t, "absent", 0, func(bool) func(*testing.T) { return func(*testing.T) {} })
}

// webhookOverhead is the time that the API server may use for a webhook's call in addition to waiting, on
// a slow machine.
const webhookOverhead = 250 * time.Millisecond

// requestsWithoutController creates objects while the controller does not answer, and checks that the API
// server waits for it at most as long as wait in each request. observe returns a check of whether a
// webhook was called.
func (e *testEnv) requestsWithoutController(
	t *testing.T, prefix string, wait time.Duration, observe func(called bool) func(*testing.T),
) {
	t.Helper()
	ns := e.createNamespace(t, prefix)
	ordinary := newPod(ns, "ordinary", 0)
	ordinary.Annotations, ordinary.Spec.ResourceClaims = nil, nil
	referenced := newPodWithClaim(ns, "referenced", 0, "gpu")
	reference := corev1.ResourceClaim{Name: referenced.Spec.ResourceClaims[0].Name}
	referenced.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{reference}
	unreferenced := newPodWithClaim(ns, "unreferenced", 0, "gpu")
	for _, tc := range []struct {
		name    string
		object  client.Object
		called  bool
		refused bool
	}{
		{"pod without claims", ordinary, false, false},
		{"claim of another driver", &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "gpu"}, Spec: resourceapi.ResourceClaimSpec{},
		}, false, false},
		{"pod whose containers reference its claims", referenced, false, false},
		{"pod with a claim that no container references", unreferenced, true, false},
		{"pod of a PodGroup", newPod(ns, "group", 0), true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before, start, check := e.webhookTime(t), time.Now(), observe(tc.called)
			err := e.client.Create(t.Context(), tc.object)
			took := time.Since(start)
			if refused := err != nil; refused != tc.refused {
				t.Errorf("refused: got %t (%v), want %t", refused, err, tc.refused)
			}
			check(t)
			waited, limit := e.webhookTime(t)-before, wait+webhookOverhead
			if !tc.called {
				limit = 0
			}
			if waited > limit {
				t.Errorf("the API server waited %v for the webhooks, want at most %v", waited, limit)
			}
			t.Logf("took %v, of which the API server waited %v for the webhooks",
				took.Round(time.Millisecond), waited.Round(time.Millisecond))
		})
	}
}

// webhookTime returns the time that the API server has spent in calls of the driver's webhooks so far, from
// its metrics. The time of a whole request would depend on the load of the machine.
func (e *testEnv) webhookTime(t *testing.T) (sum time.Duration) {
	t.Helper()
	raw, err := e.kube.CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil {
		t.Fatalf("read the metrics of the API server: %v", err)
	}
	const name = "apiserver_admission_webhook_admission_duration_seconds_sum{"
	for line := range strings.Lines(string(raw)) {
		if !strings.HasPrefix(line, name) || !strings.Contains(line, `.`+driverName+`"`) {
			continue
		}
		seconds, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndex(line, " "):]), 64)
		if err != nil {
			t.Fatalf("metric %q: %v", line, err)
		}
		sum += time.Duration(seconds * float64(time.Second))
	}
	return sum
}
