// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package mode

import (
	"context"
	"encoding/pem"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2/ktesting"
)

// answer is how the API server handles the creation of a PodGroup.
type answer func(*schedulingapi.PodGroup) (runtime.Object, error)

// Answers of API servers.
var (
	keepsClaims answer = func(pg *schedulingapi.PodGroup) (runtime.Object, error) { return pg, nil }
	dropsClaims answer = func(pg *schedulingapi.PodGroup) (runtime.Object, error) {
		pg.Spec.ResourceClaims = nil
		return pg, nil
	}
	lacksType answer = func(*schedulingapi.PodGroup) (runtime.Object, error) {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "podgroups"}, "")
	}
	unavailable answer = func(*schedulingapi.PodGroup) (runtime.Object, error) {
		return nil, errors.New("connection refused")
	}
)

// newCluster returns an API server whose current answer is given by next.
func newCluster(t *testing.T, next func() answer) *fake.Clientset {
	t.Helper()
	cluster := fake.NewClientset()
	cluster.PrependReactor("create", "podgroups", func(a clienttesting.Action) (bool, runtime.Object, error) {
		create, ok := a.(clienttesting.CreateActionImpl)
		if !ok || len(create.CreateOptions.DryRun) == 0 {
			t.Error("Detect created a PodGroup, not as a dry run")
		}
		pg, ok := create.Object.(*schedulingapi.PodGroup)
		if !ok {
			t.Errorf("Detect created a %T", create.Object)
			return false, nil, nil
		}
		o, err := next()(pg.DeepCopy())
		return true, o, err
	})
	return cluster
}

func TestDetect(t *testing.T) {
	for _, tc := range []struct {
		name   string
		answer answer
		want   Mode
	}{
		{"the API server keeps claims", keepsClaims, Native},
		{"the API server drops claims", dropsClaims, Bridge},
		{"the API server does not have PodGroups", lacksType, Bridge},
		{"the API server is not available", unavailable, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cluster := newCluster(t, func() answer { return tc.answer })
			got, err := Detect(t.Context(), cluster, "ns")
			if got != tc.want || (err != nil) != (tc.want == "") {
				t.Errorf("Detect = %q, %v, want %q", got, err, tc.want)
			}
		})
	}
}

func TestWatcher_watch(t *testing.T) {
	for _, tc := range []struct {
		name    string
		mode    Mode
		answers []answer // one per tick
		changed bool
	}{
		{"native mode stays available", Native, []answer{keepsClaims, keepsClaims}, false},
		{"bridge mode stays necessary", Bridge, []answer{dropsClaims, lacksType}, false},
		{"the type appears", Bridge, []answer{lacksType, keepsClaims, keepsClaims, keepsClaims}, true},
		{"the feature gate is turned off", Native, []answer{keepsClaims, dropsClaims, lacksType, dropsClaims}, true},
		{"a failed detection changes nothing", Native, []answer{unavailable, keepsClaims}, false},
		{"two contrary answers change nothing", Native,
			[]answer{dropsClaims, dropsClaims, keepsClaims, dropsClaims}, false},
		{"the mode changes during an outage", Native,
			[]answer{unavailable, lacksType, unavailable, lacksType, lacksType}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, ctx := ktesting.NewTestContext(t)
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			ticks := make(chan time.Time)
			detections := 0
			cluster := newCluster(t, func() answer {
				detections++
				return tc.answers[detections-1]
			})
			stopped := make(chan error, 1)
			w := &Watcher{Cluster: cluster, Namespace: "ns", Mode: tc.mode}
			go func() { stopped <- w.watch(ctx, ticks) }()
			for range tc.answers {
				select {
				case ticks <- time.Time{}:
				case err := <-stopped:
					t.Fatalf("the watcher stopped after %d of %d detections: %v", detections, len(tc.answers), err)
				}
			}
			if !tc.changed {
				cancel()
			}
			err := <-stopped
			if errors.Is(err, ErrChanged) != tc.changed || err != nil && !tc.changed {
				t.Errorf("the watcher returned %v, changed: want %t", err, tc.changed)
			}
		})
	}
}

func TestWatcher_runsOnEveryReplica(t *testing.T) {
	if (&Watcher{}).NeedLeaderElection() {
		t.Error("only the leader watches the mode, but every replica serves admission")
	}
}

func TestParse(t *testing.T) {
	for _, name := range []string{"auto", "bridge", "native"} {
		if m, err := Parse(name); err != nil || string(m) != name {
			t.Errorf("Parse(%q) = %q, %v", name, m, err)
		}
	}
	_, err := Parse("Native")
	if err == nil || err.Error() != `mode "Native": must be auto, bridge, or native` {
		t.Errorf(`Parse("Native") returned the error %v`, err)
	}
}

func TestVersions(t *testing.T) {
	cluster := fake.NewClientset()
	list := func(version string, resources ...string) *metav1.APIResourceList {
		l := &metav1.APIResourceList{GroupVersion: version}
		for _, name := range resources {
			l.APIResources = append(l.APIResources, metav1.APIResource{Name: name})
		}
		return l
	}
	cluster.Resources = []*metav1.APIResourceList{
		list("apps/v1", "podgroups"), list("scheduling.k8s.io/v1", "priorityclasses"),
		list("scheduling.k8s.io/v1alpha2", "podgroups", "podgroups/status", "workloads"),
	}
	got, err := Versions(cluster.Discovery())
	if want := []string{"v1alpha2"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

// While the API servers of a cluster are upgraded, the answers of one do not describe the others.
func TestNewClient_opensAConnectionForEachRequest(t *testing.T) {
	var connections atomic.Int64
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.EnableHTTP2 = true
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			connections.Add(1)
		}
	}
	server.StartTLS()
	t.Cleanup(server.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	cluster, err := NewClient(&rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{CAData: ca}})
	if err != nil {
		t.Fatal(err)
	}
	for range modeChangeThreshold {
		if got, err := Detect(t.Context(), cluster, "ns"); err != nil || got != Bridge {
			t.Fatalf("got %q, %v, want %q", got, err, Bridge)
		}
	}
	if got := connections.Load(); got != modeChangeThreshold {
		t.Errorf("%d requests over %d connections", modeChangeThreshold, got)
	}
}
