// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2/ktesting"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// test/controlplane tests Run against an API server that is started later.
func TestRun_whileTheAPIServerIsUnavailable(t *testing.T) {
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

func TestRun_endsIfAnAddressIsInUse(t *testing.T) {
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

// freeAddress returns a host:port on which no program listens.
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
		{"the API server does not answer", errors.New("connection refused"), "connection refused"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := withRemedy(tc.err); !errors.Is(got, tc.err) || !strings.Contains(got.Error(), tc.want) {
				t.Errorf("withRemedy returned %v, want it to contain %q", got, tc.want)
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
