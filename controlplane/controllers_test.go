// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"net/http"
	"reflect"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/meta/testrestmapper"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	fakediscovery "k8s.io/client-go/discovery/fake"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/controlplane/retry"
)

// recordingManager records what is added to it. It runs nothing.
type recordingManager struct {
	manager.Manager
	added []manager.Runnable
}

func (m *recordingManager) Add(r manager.Runnable) error {
	m.added = append(m.added, r)
	return nil
}

// After an outage of the API server, every controller must reconcile objects without events soon.
func TestAddControllers_retryInterval(t *testing.T) {
	controllers := 0
	for _, r := range addedRunnables(t) {
		// The type of controllers is internal to controller-runtime; these fields of it are not.
		value := reflect.Indirect(reflect.ValueOf(r))
		if value.Kind() != reflect.Struct || !value.FieldByName("RateLimiter").IsValid() {
			continue // a cache or the publisher of fabrics
		}
		controllers++
		name := value.FieldByName("Name").String()
		limiter, ok := value.FieldByName("RateLimiter").Interface().(workqueue.TypedRateLimiter[reconcile.Request])
		if !ok {
			t.Fatalf("controller %s: rate limiter %T", name, value.FieldByName("RateLimiter").Interface())
		}
		request := reconcile.Request{NamespacedName: types.NamespacedName{Name: "object"}}
		for range 30 {
			limiter.When(request)
		}
		if got := limiter.When(request); got != retry.MaxInterval {
			t.Errorf("controller %s after 30 failures: retry after %s, want %s", name, got, retry.MaxInterval)
		}
	}
	if controllers != 8 {
		t.Errorf("got %d controllers, want 8", controllers)
	}
}

// addedRunnables returns what addControllers adds to a manager when all features are enabled.
func addedRunnables(t *testing.T) []manager.Runnable {
	t.Helper()
	scheme, err := Scheme()
	if err != nil {
		t.Fatal(err)
	}
	m, err := ctrl.NewManager(&rest.Config{}, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"},
		Controller: ctrlconfig.Controller{SkipNameValidation: ptr.To(true)},
		MapperProvider: func(*rest.Config, *http.Client) (meta.RESTMapper, error) {
			return testrestmapper.TestOnlyStaticRESTMapper(scheme), nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	cluster := fake.NewClientset()
	if discovery, ok := cluster.Discovery().(*fakediscovery.FakeDiscovery); ok {
		discovery.FakedServerVersion = &version.Info{Major: "1", Minor: "36", GitVersion: "v1.36.0"}
	}
	recording := &recordingManager{Manager: m}
	err = addControllers(t.Context(), recording, cluster, Options{
		DriverName: "dra-shared.dev", Config: &config.DriverConfig{}, Mode: mode.Bridge,
		JobClaims: true, ReplicaClaims: true, EndpointSlices: true, NetworkStatus: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	return recording.added
}
