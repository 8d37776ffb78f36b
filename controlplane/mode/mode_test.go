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
	denies answer = func(pg *schedulingapi.PodGroup) (runtime.Object, error) {
		if pg.Labels["app.kubernetes.io/name"] != "" && pg.Labels["app.kubernetes.io/managed-by"] != "" {
			return nil, apierrors.NewForbidden(podGroups, pg.Name,
				errors.New("ValidatingAdmissionPolicy 'teams' with binding 'teams' denied request: no label team"))
		}
		return nil, apierrors.NewForbidden(podGroups, pg.Name, errors.New("the PodGroup has none of the common labels"))
	}
	deniesByWebhook answer = func(*schedulingapi.PodGroup) (runtime.Object, error) {
		return nil, apierrors.NewBadRequest(`admission webhook "validate.example.com" denied the request: no label team`)
	}
	forbids answer = func(pg *schedulingapi.PodGroup) (runtime.Object, error) {
		return nil, apierrors.NewForbidden(podGroups, pg.Name, errors.New(`User "x" cannot create resource "podgroups"`))
	}
)

var podGroups = schema.GroupResource{Group: schedulingapi.GroupName, Resource: "podgroups"}

// newWatchedCluster returns an API server that starts its next answer with each discovery, and the number of dry runs.
// Discovery fails if the API server is not available, and does not list PodGroups if it lacks the type.
func newWatchedCluster(t *testing.T, answers []answer) (cluster *fake.Clientset, dryRuns *int) {
	t.Helper()
	dryRuns = new(int)
	ticks := 0
	cluster = newCluster(t, func() answer {
		*dryRuns++
		return answers[ticks-1]
	})
	cluster.Resources = []*metav1.APIResourceList{{
		GroupVersion: schedulingapi.SchemeGroupVersion.String(), APIResources: []metav1.APIResource{{Name: "podgroups"}},
	}}
	cluster.PrependReactor("get", "resource", func(clienttesting.Action) (bool, runtime.Object, error) {
		ticks++
		_, err := answers[ticks-1](&schedulingapi.PodGroup{})
		if apierrors.IsForbidden(err) || apierrors.IsBadRequest(err) {
			return false, nil, nil // discovery succeeds
		}
		return err != nil, nil, err
	})
	return cluster, dryRuns
}

// newCluster returns an API server that gets its current answer from next.
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
		denied bool
	}{
		{"the API server keeps claims", keepsClaims, Native, false},
		{"the API server drops claims", dropsClaims, Bridge, false},
		{"the API server does not have PodGroups", lacksType, Bridge, false},
		{"the API server is not available", unavailable, "", false},
		{"a policy denies the PodGroup", denies, "", true},
		{"a webhook denies the PodGroup", deniesByWebhook, "", true},
		{"a right is missing", forbids, "", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cluster := newCluster(t, func() answer { return tc.answer })
			got, err := Detect(t.Context(), cluster, "ns")
			if got != tc.want || (err != nil) != (tc.want == "") || errors.Is(err, ErrDenied) != tc.denied {
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
		{"the feature gate is turned off", Native,
			append(slices.Repeat([]answer{keepsClaims}, dryRunTicks), dropsClaims, lacksType, dropsClaims), true},
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
			cluster, _ := newWatchedCluster(t, tc.answers)
			stopped := make(chan error, 1)
			w := &Watcher{Cluster: cluster, Namespace: "ns", Mode: tc.mode}
			go func() { stopped <- w.watch(ctx, ticks) }()
			for i := range tc.answers {
				select {
				case ticks <- time.Time{}:
				case err := <-stopped:
					t.Fatalf("the watcher stopped after %d of %d ticks: %v", i, len(tc.answers), err)
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

// The audit log has each dry run, and policies of a cluster can deny it.
func TestWatcher_repeatsDryRunOncePerMinute(t *testing.T) {
	for _, tc := range []struct {
		name   string
		mode   Mode
		answer answer
		want   int
	}{
		{"the API server keeps claims", Native, keepsClaims, 3},
		{"the API server drops claims", Bridge, dropsClaims, 3},
		{"the API server does not have PodGroups", Bridge, lacksType, 0},
		{"a policy denies the PodGroup", Native, denies, 3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, ctx := ktesting.NewTestContext(t)
			const ticks = 2*dryRunTicks + 1
			cluster, dryRuns := newWatchedCluster(t, slices.Repeat([]answer{tc.answer}, ticks))
			w := &Watcher{Cluster: cluster, Namespace: "ns", Mode: tc.mode}
			for tick := range ticks {
				got, err := w.detect(ctx, false)
				if err != nil && !errors.Is(err, ErrDenied) || err == nil && got != tc.mode {
					t.Fatalf("tick %d: got %q, %v, want %q", tick, got, err, tc.mode)
				}
			}
			if *dryRuns != tc.want {
				t.Errorf("got %d dry runs in %d ticks, want %d", *dryRuns, ticks, tc.want)
			}
		})
	}
}

func TestWatcher_runsOnEveryReplica(t *testing.T) {
	if (&Watcher{}).NeedLeaderElection() {
		t.Error("only the leading replica watches the mode, but every replica serves admission")
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
func TestNewClient_opensConnectionForEachRequest(t *testing.T) {
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
