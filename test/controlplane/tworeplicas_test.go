// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane"
	"github.com/dra-shared/dra-driver-shared/controlplane/certs"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/simnode"
)

// Two replicas of the controller admit the pods of a group in turn. No claim may get more
// pods than it can be reserved for.
func TestController_twoReplicasAdmitThousandPods(t *testing.T) {
	e := requireTestEnv(t)
	if e.native {
		t.Skip("native mode has no shards")
	}
	const pods, podsOfClaim = 1000, 240
	served := e.startReplicas(t, 2)
	ns := e.createNamespace(t, "two")
	pg := e.mustCreateGroup(t, ns, "big")
	err := simnode.Parallel(pods, func(i int) error {
		// On a busy machine, calls of the webhook time out. Workload controllers retry without a limit.
		return eventually.Poll(t.Context(), timeout, func() error { return e.createPod(t.Context(), newPod(ns, "big", i)) })
	})
	if err != nil {
		t.Fatalf("create pods: %v", err)
	}
	e.awaitRunning(t, ns, pods)
	for i, n := range served() {
		t.Logf("replica %d admitted %d pods", i, n)
		if n < pods/4 {
			t.Errorf("replica %d admitted %d pods, want about half of %d", i, n, pods)
		}
	}
	_, used, err := e.claimsInUse(t.Context(), ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("pods of each claim: %v", used)
	for claim, n := range used {
		if n > claims.MaxPods {
			t.Errorf("claim %s has %d pods, and can be reserved for %d", claim, n, claims.MaxPods)
		}
	}
	// Pods that were not created after their admission count for a while.
	if want := (pods+podsOfClaim-1)/podsOfClaim + 1; len(used) > want {
		t.Errorf("%d pods use %d claims, want at most %d", pods, len(used), want)
	}
	e.checkOneDevice(t, ns)
	if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(pg), pg); err != nil {
		t.Fatal(err)
	}
	for _, condition := range []string{scheduling.ConditionClaimsReady, scheduling.ConditionReserved} {
		if !meta.IsStatusConditionTrue(pg.Status.Conditions, condition) {
			t.Errorf("condition %s is not True: %+v", condition, pg.Status.Conditions)
		}
	}
	e.deletePods(t, ns)
	e.delete(t, pg)
	e.awaitEmpty(t, ns)
}

// startReplicas starts replicas of the controller, with one leading, and a proxy that sends the API server's requests
// to each replica in turn. served returns how many pods each has admitted.
func (e *testEnv) startReplicas(t *testing.T, n int) (served func() []int64) {
	t.Helper()
	var ports []int
	for i := range n {
		ports = append(ports, 9444+i)
		e.startReplica(t, ports[i])
	}
	return e.startProxy(t, ports)
}

// startReplica starts a replica of the controller with its webhook server on a port.
func (e *testEnv) startReplica(t *testing.T, port int) {
	t.Helper()
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.Background()))
	options := controllerOptions(driverConfig())
	options.Webhook.Port, options.Webhook.PodIP = port, "127.0.0.1"
	m, err := controlplane.New(ctx, e.controllerConfig(), options)
	if err != nil {
		cancel()
		t.Fatalf("create a replica of the controller: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- m.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("a replica of the controller ended: %v", err)
		}
	})
	eventually.Eventually(t, timeout, "the replica serves webhooks", func() error {
		return m.GetWebhookServer().StartedChecker()(nil)
	})
}

// startProxy forwards the API server's requests to the ports of replicas, to each in turn.
func (e *testEnv) startProxy(t *testing.T, ports []int) (served func() []int64) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	name := webhookService + "." + system + ".svc"
	rotator := certs.NewRotator(e.kube, certs.Options{
		Namespace: system, Secret: "dra-shared-controller-ca", DNSNames: []string{name},
		Configurations: []string{"dra-shared-controller"},
	}, clock.RealClock{})
	go func() { _ = rotator.Start(ctx) }() // ends with ctx
	eventually.Eventually(t, timeout, "the proxy has a certificate", func() error {
		_, err := rotator.GetCertificate(nil)
		return err
	})
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} // on loopback
	var proxies []*httputil.ReverseProxy
	for _, port := range ports {
		proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "https", Host: fmt.Sprintf("127.0.0.1:%d", port)})
		proxy.Transport = transport
		proxies = append(proxies, proxy)
	}
	var turn atomic.Int64
	counts := make([]atomic.Int64, len(ports))
	server := &http.Server{
		ReadHeaderTimeout: timeout,
		TLSConfig:         &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: rotator.GetCertificate},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			i := int(turn.Add(1)) % len(proxies)
			if strings.HasPrefix(r.URL.Path, "/pods") {
				counts[i].Add(1)
			}
			proxies[i].ServeHTTP(w, r)
		}),
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(controlPlaneAddress, "9443"))
	if err != nil {
		t.Fatalf("listen: %v", err)
	}
	go func() {
		if err := server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("the proxy ended: %v", err)
		}
	}()
	t.Cleanup(func() { _ = server.Close() })
	return func() (n []int64) {
		for i := range counts {
			n = append(n, counts[i].Load())
		}
		return n
	}
}
