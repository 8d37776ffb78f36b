// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/meta/testrestmapper"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2/ktesting"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// test/controlplane tests Run against an API server that is started later.
func TestRun_whileAPIServerIsUnavailable(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	health, metrics := freeAddress(t), freeAddress(t)
	ended := make(chan error, 1)
	go func() {
		ended <- Run(ctx, &rest.Config{Host: freeAddress(t)}, Options{
			DriverName: "dra-shared.dev", Config: &config.DriverConfig{}, Namespace: "ns", Mode: mode.Auto,
			HealthAddress: health, MetricsAddress: metrics,
		})
	}()
	for url, want := range map[string]int{
		health + "/healthz":  http.StatusOK,
		health + "/readyz":   http.StatusInternalServerError,
		metrics + "/metrics": http.StatusOK,
	} {
		eventually.Eventually(t, 10*time.Second, "the controller serves "+url, func() error {
			response, err := http.Get("http://" + url) //nolint:noctx // ends with the server
			if err != nil {
				return err
			}
			if response.StatusCode != want {
				t.Errorf("GET %s: %s, want %d", url, response.Status, want)
			}
			return response.Body.Close()
		})
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run returned %v after its context ended", err)
	}
}

func TestRun_failsIfAddressIsInUse(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	err = Run(ctx, &rest.Config{Host: freeAddress(t)}, Options{
		DriverName: "dra-shared.dev", Config: &config.DriverConfig{}, Namespace: "ns", Mode: mode.Auto,
		HealthAddress: listener.Addr().String(), MetricsAddress: "0",
	})
	if err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("Run returned %v, want that the address is in use", err)
	}
}

// freeAddress returns a host:port that no program listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

func TestWithRemedy(t *testing.T) {
	for _, tc := range []struct {
		name string
		err  error
		want string
	}{
		{"the type is missing", &meta.NoKindMatchError{}, "CustomResourceDefinition"},
		{"a right is missing", apierrors.NewForbidden(schema.GroupResource{}, "", nil), "ClusterRoleBinding"},
		{"a policy denies the dry run", fmt.Errorf("%w: %w",
			apierrors.NewForbidden(schema.GroupResource{}, "", nil), mode.ErrDenied), "controller.mode)"},
		{"the API server does not answer", errors.New("connection refused"), "connection refused"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := withRemedy(tc.err); !errors.Is(got, tc.err) || !strings.Contains(got.Error(), tc.want) {
				t.Errorf("withRemedy returned %v, want it to contain %q", got, tc.want)
			}
			if got := withRemedy(tc.err); errors.Is(got, mode.ErrDenied) && strings.Contains(got.Error(), "ClusterRole") {
				t.Errorf("withRemedy returned %v, which blames RBAC for a denial of admission", got)
			}
		})
	}
}

func TestNewServers_withoutAddresses(t *testing.T) {
	for _, metrics := range []string{"", "0"} {
		servers, err := newServers(&rest.Config{}, Options{HealthAddress: "0", MetricsAddress: metrics}, nil)
		if err != nil || len(servers) > 0 {
			t.Errorf("metrics address %q: got %d servers and error %v, want none", metrics, len(servers), err)
		}
	}
}

// stalledAPIServer serves an empty list of pods after release is closed. It closes requested at the first request.
func stalledAPIServer(t *testing.T, requested, release chan struct{}) *httptest.Server {
	t.Helper()
	var once sync.Once
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") != "" {
			http.Error(w, "no watch", http.StatusBadRequest) // the client lists the pods then
			return
		}
		once.Do(func() { close(requested) })
		<-release
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}`))
	}))
	t.Cleanup(server.Close)
	return server
}

// standbyManager returns a manager with a cache of pods. Its replica never becomes the leading one.
func standbyManager(t *testing.T, host string) manager.Manager {
	t.Helper()
	m, err := ctrl.NewManager(&rest.Config{Host: host}, ctrl.Options{
		Scheme: clientscheme.Scheme, Metrics: metricsserver.Options{BindAddress: "0"},
		LeaderElection: true, LeaderElectionResourceLockInterface: heldLock{},
		MapperProvider: func(*rest.Config, *http.Client) (meta.RESTMapper, error) {
			return testrestmapper.TestOnlyStaticRESTMapper(clientscheme.Scheme), nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.GetCache().GetInformer(t.Context(), &corev1.Pod{}, cache.BlockUntilSynced(false)); err != nil {
		t.Fatal(err)
	}
	return m
}

// heldLock is the lock of an election that another replica has won.
type heldLock struct{ resourcelock.Interface }

func (heldLock) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	now := metav1.Now()
	return &resourcelock.LeaderElectionRecord{HolderIdentity: "other", RenewTime: now, LeaseDurationSeconds: 3600},
		[]byte(now.String()), nil
}

func (heldLock) Identity() string { return "standby" }

func (heldLock) Describe() string { return "held lock" }

func TestReadiness_check_whileCachesAreNotFilled(t *testing.T) {
	requested, release := make(chan struct{}), make(chan struct{})
	server := stalledAPIServer(t, requested, release)
	m := standbyManager(t, server.URL)
	var ready readiness
	if err := ready.follow(m, false); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Start(ctx) }()
	<-requested
	if err := ready.check(nil); err == nil || !strings.Contains(err.Error(), "waits for its caches") {
		t.Errorf("readiness while the API server lists pods: got %v, want that the controller waits for its caches", err)
	}
	close(release)
	eventually.Eventually(t, 10*time.Second, "a replica that does not lead is ready", func() error {
		return ready.check(nil)
	})
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("the manager returned %v after its context ended", err)
	}
}
