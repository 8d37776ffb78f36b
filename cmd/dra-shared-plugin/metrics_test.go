// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2/ktesting"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/internal/probe"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

const timeout = 15 * time.Second

// startDriver starts a driver without devices, which reports to recorder. The test acts as the kubelet that registers
// it. ready returns the answer to the readiness probe.
func startDriver(t *testing.T, recorder events.EventRecorder) (d *driver.Driver, ready func() error) {
	t.Helper()
	// Paths of sockets have at most 107 characters, and t.TempDir() is longer.
	dir, err := os.MkdirTemp("", "dra")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	o := driver.Options{
		DriverName: "dra-shared.dev", NodeName: "n1", Instance: "1", Hook: "/hook", Events: recorder,
		Client:    fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "node"}}),
		PluginDir: filepath.Join(dir, "plugin"), RegistryDir: filepath.Join(dir, "registry"),
		CDIDir: filepath.Join(dir, "cdi"), RunDir: filepath.Join(dir, "run"),
	}
	for _, path := range []string{o.PluginDir, o.RegistryDir, o.CDIDir, o.RunDir} {
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if d, err = driver.New(o); err != nil {
		t.Fatal(err)
	}
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	wait, err := d.Start(ctx)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := wait(); err != nil {
			t.Error(err)
		}
	})
	register(t, o.RegistryDir)
	return d, func() error { return probe.Ask(o.RunDir, o.Instance, probe.Ready) }
}

// register does what the kubelet does when it has found the plugin's socket.
func register(t *testing.T, dir string) {
	t.Helper()
	sockets, err := filepath.Glob(filepath.Join(dir, "*.sock"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("sockets for registration: %v, error %v; want one", sockets, err)
	}
	conn, err := grpc.NewClient("unix://"+sockets[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := registerapi.NewRegistrationClient(conn).NotifyRegistrationStatus(t.Context(),
		&registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
}

// serveMetrics serves metrics at an address until stop is called or the test ends. It tries again at once after a
// failure.
func serveMetrics(t *testing.T, address string, problems problemReporter) (stop func()) {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewCounter(prometheus.CounterOpts{Name: "test_total"}))
	s := (&flags{metricsAddress: address}).newMetricsServer(ctx, registry, problems)
	s.interval = time.Millisecond
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.run(ctx)
	}()
	stop = func() {
		cancel()
		<-ended
	}
	t.Cleanup(stop)
	return stop
}

// getMetrics returns an error if no metrics are served at an address.
func getMetrics(address string) error {
	response, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && !strings.Contains(string(body), "test_total 0") {
		err = fmt.Errorf("got status %s and %q, want the metric test_total", response.Status, body)
	}
	return err
}

func wantEvent(t *testing.T, recorder *events.FakeRecorder, want ...string) {
	t.Helper()
	select {
	case e := <-recorder.Events:
		for _, part := range want {
			if !strings.Contains(e, part) {
				t.Errorf("got the event %q, want %q in it", e, part)
			}
		}
	case <-time.After(timeout):
		t.Fatalf("no event, want one with %q", want)
	}
}

// Another program uses the port of the metrics, without SO_REUSEPORT, and ends later.
func TestMetricsServer_portInUse(t *testing.T) {
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	recorder := events.NewFakeRecorder(100)
	d, ready := startDriver(t, recorder)
	serveMetrics(t, other.Addr().String(), d)
	wantEvent(t, recorder, "Warning MetricsNotServed", other.Addr().String(), "in use", "plugin.metricsAddress")
	eventually.Eventually(t, timeout, "the plugin is ready", ready)
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	wantEvent(t, recorder, "Normal MetricsServed")
	if err := getMetrics(other.Addr().String()); err != nil {
		t.Error(err)
	}
	if err := ready(); err != nil {
		t.Error(err)
	}
}

// noProblems fails the test if a problem is reported. It receives a value whenever a server listens.
type noProblems struct {
	t         *testing.T
	listening chan struct{}
}

func (n noProblems) Warn(w driver.Warning)     { n.t.Errorf("got the event %s: %s", w.Reason, w.Message) }
func (n noProblems) EndWarning(driver.Warning) { n.listening <- struct{}{} }

// freeAddress returns an address that no program listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	return free.Addr().String()
}

// The plugin also ends because of an error, while its context continues.
func TestFlags_startMetrics_stopClosesServer(t *testing.T) {
	address := freeAddress(t)
	_, ctx := ktesting.NewTestContext(t)
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewCounter(prometheus.CounterOpts{Name: "test_total"}))
	problems := noProblems{t, make(chan struct{}, 1)}
	stop := (&flags{metricsAddress: address}).startMetrics(ctx, registry, problems)
	eventually.Eventually(t, timeout, "the plugin serves metrics", func() error { return getMetrics(address) })
	stop()
	other, err := net.Listen("tcp", address) // without SO_REUSEPORT
	if err != nil {
		t.Fatalf("the server still listens: %v", err)
	}
	defer other.Close()
	(&flags{}).startMetrics(ctx, registry, problems)() // without --metrics-address
}

func TestMetricsServer_duringRollingUpdate(t *testing.T) {
	address := freeAddress(t)
	problems := noProblems{t, make(chan struct{}, 2)}
	var stopOld func()
	for _, plugin := range []string{"old", "new"} {
		stop := serveMetrics(t, address, problems)
		if plugin == "old" {
			stopOld = stop
		}
		select {
		case <-problems.listening:
		case <-time.After(timeout):
			t.Fatalf("the %s plugin does not listen", plugin)
		}
	}
	stopOld()
	if err := getMetrics(address); err != nil {
		t.Errorf("metrics of the new plugin: %v", err)
	}
}
