// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

const (
	loadShares   = 500
	loadWorkers  = 32
	loadDuration = 60 * time.Second
	minSamples   = 12
	// One of operationFaults operations and one of requestFaults API requests fails.
	operationFaults = 200
	requestFaults   = 30
)

// Pods are created and deleted while 500 of them run, each with a share and an address of a pool of
// 600, and 32 calls run at a time. One operation in 200 fails, and the API server refuses one request
// in 30. No pod may lose its link, no two may have the same address, and the plugin's resources must
// not grow.
//
// LOAD_FOR=10m sets another duration. LOAD_REPORT=FILE writes the measurements
// to a file.
func TestLoad_manyPodsWithFaults(t *testing.T) {
	duration := loadDuration
	if value := os.Getenv("LOAD_FOR"); value != "" {
		var err error
		if duration, err = time.ParseDuration(value); err != nil {
			t.Fatalf("environment variable LOAD_FOR: %v", err)
		}
	}
	e := newTestEnv(t)
	e.must("create the pool", e.api.AddPool(&network.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "load", UID: "load"},
		Spec: network.AddressPoolSpec{
			Network: "storage", Default: true, Subnet: "10.20.0.0/16", Ranges: []string{"10.20.0.1-10.20.2.88"},
		},
	}))
	l := &load{
		testEnv: e, stop: make(chan struct{}), durations: map[string][]time.Duration{}, addresses: map[string]string{},
	}
	l.startInProcess(pluginConfig{Node: e.node, Dir: e.dir, BPFFS: e.bpffs, URL: e.api.URL, Instance: "load", Pools: true},
		l.operationFault)
	e.api.Refuse(l.requestFault)
	var workers sync.WaitGroup
	for range loadWorkers {
		workers.Go(l.replacePods)
	}
	samples := l.sample(duration)
	close(l.stop)
	workers.Wait()

	l.noFaults.Store(true)
	e.api.Refuse(nil)
	for _, p := range l.running {
		if err := l.removePod(p); err != nil {
			t.Error(err)
		}
	}
	if len(l.lost) > 0 {
		t.Errorf("%d pods lost their links; the first: %s", len(l.lost), l.lost[0])
	}
	if l.operationFaults.Load() == 0 || l.requestFaults.Load() == 0 {
		t.Errorf("%d operations and %d API requests failed, want some of each: is the injector in use?",
			l.operationFaults.Load(), l.requestFaults.Load())
	}
	e.eventually("the node has no state of claims", e.nothingLeft)
	l.checkSamples(samples)
	l.report(duration, samples)
}

type load struct {
	*testEnv
	stop     chan struct{}
	noFaults atomic.Bool
	created  atomic.Int64 // pods

	operationFaults, requestFaults atomic.Int64

	// calls is locked for reading while a worker replaces a pod, and for writing during a measurement.
	calls sync.RWMutex

	mu        sync.Mutex
	running   []*loadPod // oldest first
	lost      []string
	addresses map[string]string          // the pods that have them
	durations map[string][]time.Duration // of successful calls
}

type loadPod struct {
	claim   *resourceapi.ResourceClaim
	address string
	sandbox *sandbox
	link    int
}

// startInProcess starts a plugin in the test's own process. The test can then measure its goroutines, memory, and
// files, and carry out its operations.
func (e *testEnv) startInProcess(c pluginConfig, failpoints failpoint.Injector) {
	e.t.Helper()
	e.config = c
	p, err := newPlugin(c, failpoints)
	if err != nil {
		e.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(klog.NewContext(e.t.Context(), logr.Discard()))
	wait, err := p.Start(ctx)
	if err != nil {
		cancel()
		e.t.Fatalf("start the plugin: %v", err)
	}
	e.t.Cleanup(func() {
		cancel()
		if err := errors.Join(wait(), p.node.Close()); err != nil {
			e.t.Errorf("stop the plugin: %v", err)
		}
	})
}

var errInjected = errors.New("injected")

var _ failpoint.Injector = (*load)(nil).operationFault

// operationFault makes operations fail, with or without their effect. It does not affect the plugin's start, because a
// plugin that does not find a NIC exits.
func (l *load) operationFault(_ string, operation func() error) error {
	if l.noFaults.Load() || l.created.Load() == 0 || rand.N(operationFaults) > 0 {
		return operation()
	}
	l.operationFaults.Add(1)
	return failing(operation)()
}

// requestFault returns the error that the API server answers a request with.
func (l *load) requestFault(r *http.Request) error {
	isSliceRead := r.Method == http.MethodGet && strings.Contains(r.URL.Path, "resourceslices")
	if isSliceRead || rand.N(requestFaults) > 0 {
		return nil
	}
	l.requestFaults.Add(1)
	claims := schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}
	faults := []error{
		errInjected, // breaks the connection
		apierrors.NewConflict(claims, "c", errInjected), apierrors.NewForbidden(claims, "c", errInjected),
		apierrors.NewInternalError(errInjected), apierrors.NewServiceUnavailable("injected"),
	}
	return faults[rand.N(len(faults))]
}

// replacePods creates pods until loadShares of them run, and then replaces the
// oldest pod again and again.
func (l *load) replacePods() {
	for {
		select {
		case <-l.stop:
			return
		default:
		}
		if err := l.replacePod(); err != nil {
			l.t.Error(err)
			return
		}
	}
}

// replacePod removes the oldest pod if enough pods run, and creates a pod.
func (l *load) replacePod() error {
	l.calls.RLock()
	defer l.calls.RUnlock()
	if oldest := l.takeOldest(); oldest != nil {
		if err := l.removePod(oldest); err != nil {
			return err
		}
	}
	p, err := l.createPod()
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running = append(l.running, p)
	return nil
}

// takeOldest returns the oldest pod, or nil if fewer than loadShares pods run.
func (l *load) takeOldest() (oldest *loadPod) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.running) >= loadShares {
		oldest, l.running = l.running[0], l.running[1:]
	}
	return oldest
}

// createPod creates a pod with a claim and attaches the claim.
func (l *load) createPod() (*loadPod, error) {
	name := fmt.Sprintf("load-%d", l.created.Add(1))
	p := &loadPod{claim: newClaim(name)}
	if err := l.api.Client.Tracker().Add(p.claim); err != nil {
		return nil, err
	}
	var err error
	if p.sandbox, err = newSandbox(l.path("bundle-"+name), name); err != nil {
		return nil, err
	}
	err = l.retryTimed("prepare", func(ctx context.Context) error { return l.prepare(ctx, p.claim) })
	if err != nil {
		return nil, err
	}
	err = l.retryTimed("attach", func(ctx context.Context) error { return p.sandbox.hook(ctx, l.dir, p.claim, timeout) })
	if err != nil {
		return nil, err
	}
	p.link, err = p.sandbox.link()
	if p.link == 0 && err == nil {
		err = fmt.Errorf("pod %s started without its link", name)
	}
	if err != nil {
		return nil, err
	}
	return p, l.noteAddress(p)
}

// noteAddress fails if a pod's link does not have an address, or has another pod's address.
func (l *load) noteAddress(p *loadPod) (err error) {
	if p.address, err = p.sandbox.address(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if other, taken := l.addresses[p.address]; taken || p.address == "" {
		return fmt.Errorf("pod %s has the address %q; pod %q had it before", p.sandbox.name, p.address, other)
	}
	l.addresses[p.address] = p.sandbox.name
	return nil
}

// removePod checks the pod's link and removes the pod and its claim.
func (l *load) removePod(p *loadPod) error {
	if now, err := p.sandbox.link(); err != nil || now != p.link {
		lost := fmt.Sprintf("pod %s: got link index %d and error %v, want %d", p.sandbox.name, now, err, p.link)
		l.mu.Lock()
		l.lost = append(l.lost, lost)
		l.mu.Unlock()
	}
	l.mu.Lock()
	delete(l.addresses, p.address)
	l.mu.Unlock()
	if rand.N(2) == 0 { // a sandbox may end before or after its claim is unprepared
		p.sandbox.end()
	}
	defer p.sandbox.end()
	err := l.retryTimed("unprepare", func(ctx context.Context) error { return l.unprepare(ctx, p.claim) })
	if err != nil {
		return err
	}
	claims := resourceapi.SchemeGroupVersion.WithResource("resourceclaims")
	return l.api.Client.Tracker().Delete(claims, namespace, p.claim.Name)
}

// retryTimed repeats a call until it succeeds, as the kubelet does, and records
// the duration of the successful attempt.
func (l *load) retryTimed(call string, f func(context.Context) error) error {
	err := eventually.Poll(l.t.Context(), timeout, func() error {
		start := time.Now()
		if err := f(l.t.Context()); err != nil {
			return err
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.durations[call] = append(l.durations[call], time.Since(start))
		return nil
	})
	if err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	return nil
}

// sample has the measurements that must not grow.
type sample struct {
	Goroutines int    `json:"goroutines"`
	HeapBytes  uint64 `json:"heapBytes"`
	OpenFiles  int    `json:"openFiles"`
}

// sample measures once per second while loadShares pods run. It ends after the duration. On a machine that
// needs most of the duration to create the pods, it ends when it has minSamples, after at most five times the
// duration. While it measures, no call is in progress.
func (l *load) sample(duration time.Duration) (samples []sample) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	start := time.Now()
	for now := range tick.C {
		elapsed := now.Sub(start)
		if elapsed >= 5*duration || elapsed >= duration && len(samples) >= minSamples {
			break
		}
		l.mu.Lock()
		full := len(l.running) >= loadShares-loadWorkers
		l.mu.Unlock()
		if full {
			samples = append(samples, l.measure())
		}
	}
	return samples
}

func (l *load) measure() sample {
	l.calls.Lock()
	defer l.calls.Unlock()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		l.t.Errorf("count open files: %v", err)
	}
	sandboxes := len(l.running) // each is a goroutine of the test
	return sample{Goroutines: runtime.NumGoroutine() - sandboxes, HeapBytes: m.HeapAlloc, OpenFiles: len(files)}
}

// checkSamples compares the minima of the first and the last third of the samples. Idle connections
// of earlier calls increase single samples; a leak increases all later samples.
func (l *load) checkSamples(samples []sample) {
	l.t.Helper()
	if len(samples) < minSamples {
		l.t.Fatalf("got %d samples with %d shares, want at least %d: is the machine too slow for this test?",
			len(samples), loadShares, minSamples)
	}
	early, late := earlyAndLate(samples)
	// A leak of one goroutine or file for every 50 pods exceeds this.
	if late.Goroutines > early.Goroutines+early.Goroutines/4 {
		l.t.Errorf("the number of goroutines grows: %d early, %d late", early.Goroutines, late.Goroutines)
	}
	if late.OpenFiles > early.OpenFiles+early.OpenFiles/4 {
		l.t.Errorf("the number of open files grows: %d early, %d late", early.OpenFiles, late.OpenFiles)
	}
	// The test's own list of durations takes 16 bytes for each call.
	if late.HeapBytes > early.HeapBytes+early.HeapBytes/4+4<<20 {
		l.t.Errorf("the heap grows: %d bytes early, %d bytes late", early.HeapBytes, late.HeapBytes)
	}
}

func earlyAndLate(samples []sample) (early, late sample) {
	third := len(samples) / 3
	return minima(samples[:third]), minima(samples[len(samples)-third:])
}

// report logs the measurements, and writes them to the file that LOAD_REPORT names.
func (l *load) report(duration time.Duration, samples []sample) {
	l.t.Helper()
	quantiles := map[string]map[string]string{}
	for call, d := range l.durations {
		slices.Sort(d)
		quantiles[call] = map[string]string{
			"count": fmt.Sprint(len(d)), "p50": d[len(d)/2].String(), "p99": d[len(d)*99/100].String(),
		}
	}
	early, late := earlyAndLate(samples)
	raw, err := json.MarshalIndent(map[string]any{
		"duration": duration.String(), "shares": loadShares, "parallel": loadWorkers, "pods": l.created.Load(),
		"faults": l.operationFaults.Load() + l.requestFaults.Load(), "linksLost": len(l.lost),
		"early": early, "late": late, "operations": quantiles,
	}, "", "  ")
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Logf("%s", raw)
	if file := os.Getenv("LOAD_REPORT"); file != "" {
		if err := os.WriteFile(file, append(raw, '\n'), 0o644); err != nil {
			l.t.Error(err)
		}
	}
}

// minima returns the minimum of each measurement.
func minima(samples []sample) sample {
	least := samples[0]
	for _, s := range samples[1:] {
		least.Goroutines = min(least.Goroutines, s.Goroutines)
		least.OpenFiles = min(least.OpenFiles, s.OpenFiles)
		least.HeapBytes = min(least.HeapBytes, s.HeapBytes)
	}
	return least
}
