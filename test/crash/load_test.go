package crash

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
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

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
)

const (
	loadShares   = 500
	loadParallel = 32
	loadDefault  = 60 * time.Second
	// One step, and one request to the API server, in so many fails.
	stepFaults    = 200
	requestFaults = 30
)

// 500 pods with a share each come and go, 32 at once, while one step in 200
// fails and the API server refuses one request in 30. LOAD_FOR=10m makes it
// longer; LOAD_REPORT=FILE writes down what was measured.
func TestManyAtOnceWithFaults(t *testing.T) {
	duration := loadDefault
	if d, err := time.ParseDuration(os.Getenv("LOAD_FOR")); err == nil {
		duration = d
	}
	e := newTestEnv(t)
	l := &load{testEnv: e, ended: make(chan struct{}), operations: map[string][]time.Duration{}}
	l.startInProcess()
	deadline := time.After(duration)
	var workers sync.WaitGroup
	for range loadParallel {
		workers.Go(l.work)
	}
	samples := l.sample(deadline)
	close(l.ended)
	workers.Wait()

	l.calm.Store(true)
	e.api.Refuse(nil)
	for _, p := range l.live {
		if err := l.remove(p); err != nil {
			t.Error(err)
		}
	}
	if len(l.lost) > 0 {
		t.Errorf("%d pods lost their link, the first: %s", len(l.lost), l.lost[0])
	}
	e.eventually(e.nothingLeft)
	l.report(duration, samples)
}

type load struct {
	*testEnv
	ended chan struct{}
	calm  atomic.Bool // no more faults
	next  atomic.Int64

	mu         sync.Mutex
	live       []*loadPod // oldest first
	lost       []string
	operations map[string][]time.Duration
	faults     atomic.Int64
}

type loadPod struct {
	claim   *resourceapi.ResourceClaim
	sandbox *sandbox
	link    int
}

// startInProcess starts a plugin in the test's process, whose goroutines and
// memory are to be counted.
func (l *load) startInProcess() {
	l.t.Helper()
	l.config = pluginConfig{Dir: l.dir, BPFFS: l.bpffs, URL: l.api.URL, Instance: "load"}
	p, err := newPlugin(l.config, l.faulty())
	if err != nil {
		l.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(klog.NewContext(l.t.Context(), logr.Discard()))
	wait, err := p.Start(ctx)
	if err != nil {
		cancel()
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() {
		cancel()
		if err := errors.Join(wait(), p.node.Close()); err != nil {
			l.t.Error(err)
		}
	})
	l.api.Refuse(l.refuse)
}

var errInjected = errors.New("injected")

// faulty makes steps fail, before or after they are done. Not those of the
// start: without a NIC there is nothing to load.
func (l *load) faulty() failpoint.Injector {
	return func(_ string, do func() error) error {
		if l.calm.Load() || l.next.Load() == 0 || rand.N(stepFaults) > 0 {
			return do()
		}
		l.faults.Add(1)
		if rand.N(2) == 0 {
			return errInjected
		}
		return errors.Join(do(), errInjected)
	}
}

func (l *load) refuse(r *http.Request) error {
	if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "resourceslices") || rand.N(requestFaults) > 0 {
		return nil
	}
	l.faults.Add(1)
	claims := schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}
	return []error{
		errInjected, // the connection breaks
		apierrors.NewConflict(claims, "c", errInjected), apierrors.NewForbidden(claims, "c", errInjected),
		apierrors.NewInternalError(errInjected), apierrors.NewServiceUnavailable("injected"),
	}[rand.N(5)]
}

// work brings pods until so many live, then replaces the oldest.
func (l *load) work() {
	for {
		select {
		case <-l.ended:
			return
		default:
		}
		l.mu.Lock()
		var oldest *loadPod
		if len(l.live) >= loadShares {
			oldest, l.live = l.live[0], l.live[1:]
		}
		l.mu.Unlock()
		if oldest != nil {
			if err := l.remove(oldest); err != nil {
				l.t.Error(err)
				return
			}
		}
		p, err := l.add()
		if err != nil {
			l.t.Error(err)
			return
		}
		l.mu.Lock()
		l.live = append(l.live, p)
		l.mu.Unlock()
	}
}

func (l *load) add() (*loadPod, error) {
	name := fmt.Sprintf("load-%d", l.next.Add(1))
	p := &loadPod{claim: newClaim(name)}
	if err := l.api.Client.Tracker().Add(p.claim); err != nil {
		return nil, err
	}
	var err error
	if p.sandbox, err = newSandbox(filepath.Join(l.dir, "bundle-"+name), name); err != nil {
		return nil, err
	}
	if err := l.retry("prepare", func(ctx context.Context) error { return l.prepare(ctx, p.claim) }); err != nil {
		return nil, err
	}
	if err := l.retry("attach", func(ctx context.Context) error { return p.sandbox.hook(ctx, l.dir, p.claim, patience) }); err != nil {
		return nil, err
	}
	p.link, err = p.sandbox.link()
	if p.link == 0 && err == nil {
		err = fmt.Errorf("pod %s started without its link", name)
	}
	return p, err
}

func (l *load) remove(p *loadPod) error {
	if now, err := p.sandbox.link(); err != nil || now != p.link {
		l.mu.Lock()
		l.lost = append(l.lost, fmt.Sprintf("%s had link %d and has %d, %v", p.sandbox.name, p.link, now, err))
		l.mu.Unlock()
	}
	if rand.N(2) == 0 { // the sandbox may go before its claim is unprepared, or after
		p.sandbox.end()
	}
	defer p.sandbox.end()
	if err := l.retry("unprepare", func(ctx context.Context) error { return l.unprepare(ctx, p.claim) }); err != nil {
		return err
	}
	return l.api.Client.Tracker().Delete(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), namespace, p.claim.Name)
}

// retry repeats what fails, as the kubelet does, and notes how long the attempt
// took that did not.
func (l *load) retry(operation string, f func(context.Context) error) error {
	give := time.Now().Add(patience)
	for {
		start := time.Now()
		err := f(l.t.Context())
		if err == nil {
			l.mu.Lock()
			l.operations[operation] = append(l.operations[operation], time.Since(start))
			l.mu.Unlock()
			return nil
		}
		if time.Now().After(give) {
			return fmt.Errorf("%s: %w", operation, err)
		}
	}
}

// sample is what must not grow.
type sample struct {
	Goroutines int    `json:"goroutines"`
	HeapBytes  uint64 `json:"heapBytes"`
	OpenFiles  int    `json:"openFiles"`
}

func (l *load) sample(deadline <-chan time.Time) (samples []sample) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-deadline:
			return samples
		case <-tick.C:
		}
		l.mu.Lock()
		full := len(l.live) >= loadShares-loadParallel
		l.mu.Unlock()
		if !full {
			continue
		}
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		fds, _ := os.ReadDir("/proc/self/fd")
		samples = append(samples, sample{Goroutines: runtime.NumGoroutine(), HeapBytes: m.HeapAlloc, OpenFiles: len(fds)})
	}
}

// report checks that what was sampled is flat, and says what was measured.
func (l *load) report(duration time.Duration, samples []sample) {
	l.t.Helper()
	if len(samples) < 12 {
		l.t.Fatalf("only %d samples with %d shares: the machine is too slow for this test", len(samples), loadShares)
	}
	third := len(samples) / 3
	early, late := middle(samples[:third]), middle(samples[len(samples)-third:])
	// The test itself keeps its durations: 16 bytes each.
	if late.Goroutines > early.Goroutines+early.Goroutines/10 || late.OpenFiles > early.OpenFiles+early.OpenFiles/10 || late.HeapBytes > early.HeapBytes+early.HeapBytes/4+4<<20 {
		l.t.Errorf("it grows: %+v early, %+v late", early, late)
	}
	quantiles := map[string]map[string]string{}
	for operation, took := range l.operations {
		slices.Sort(took)
		quantiles[operation] = map[string]string{"count": fmt.Sprint(len(took)), "p50": took[len(took)/2].String(), "p99": took[len(took)*99/100].String()}
	}
	raw, err := json.MarshalIndent(map[string]any{
		"duration": duration.String(), "shares": loadShares, "parallel": loadParallel, "pods": l.next.Load(), "faults": l.faults.Load(),
		"linksLost": len(l.lost), "early": early, "late": late, "operations": quantiles,
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

func middle(s []sample) sample {
	by := func(f func(sample) int) int {
		values := make([]int, len(s))
		for i := range s {
			values[i] = f(s[i])
		}
		slices.Sort(values)
		return values[len(values)/2]
	}
	return sample{
		Goroutines: by(func(s sample) int { return s.Goroutines }), OpenFiles: by(func(s sample) int { return s.OpenFiles }),
		HeapBytes: uint64(by(func(s sample) int { return int(s.HeapBytes) })),
	}
}
