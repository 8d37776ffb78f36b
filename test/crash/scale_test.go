// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/measure"
)

const (
	scaleWorkers = 16
	// restPeriod is a multiple of the plugin's intervals for resyncing (30 s) and garbage collection (1 min): a shorter
	// time would have more of these than an hour has, in proportion.
	restPeriod = time.Minute
	// scaleSamples is the largest number of attachments that are measured one at a time.
	scaleSamples = 50
)

// TestScale_resourcesOfPlugin measures a plugin with as many shares as the environment
// variable SCALE_SHARES lists, such as "10 1000", each of a separate pod. It appends
// a row of a table for each number to the file SCALE_REPORT.
func TestScale_resourcesOfPlugin(t *testing.T) {
	if os.Getenv("SCALE_SHARES") == "" {
		t.Skip("SCALE_SHARES is not set: make bench-node sets it")
	}
	for _, field := range strings.Fields(os.Getenv("SCALE_SHARES")) {
		shares, err := strconv.Atoi(field)
		if err != nil {
			t.Fatalf("environment variable SCALE_SHARES: %v", err)
		}
		t.Run(field, func(t *testing.T) {
			newScale(t).run(shares)
		})
	}
}

type scale struct {
	*testEnv
	requests, writes atomic.Int64 // to the API server
	blockWrites      atomic.Int64 // of AddressBlocks
	claimWrites      atomic.Int64 // of ResourceClaims
	created          atomic.Int64 // pods
}

// tuned configures the plugin's process as in production, with enough bandwidth for all shares.
func tuned(c *pluginConfig) { c.Bandwidth, c.Production = "100G", true }

// shipped configures the environment to run the program of the image.
func shipped(t testing.TB) func(*pluginConfig) {
	program := buildProgram(t, "dra-shared-plugin")
	return func(c *pluginConfig) {
		tuned(c)
		c.Program = program
	}
}

// newScale returns an environment that counts the requests to the API server.
func newScale(t testing.TB) *scale {
	s := &scale{testEnv: newTestEnv(t)}
	s.way = s.strongest()
	s.api.Refuse(func(r *http.Request) error {
		s.requests.Add(1)
		if r.Method != http.MethodGet {
			s.writes.Add(1)
			switch {
			case strings.Contains(r.URL.Path, "/addressblocks"):
				s.blockWrites.Add(1)
			case strings.Contains(r.URL.Path, "/resourceclaims/"):
				s.claimWrites.Add(1)
			}
		}
		return nil
	})
	return s
}

func (s *scale) run(shares int) {
	start := shipped(s.t)
	s.start(start)
	s.register()
	// The pod of loop has the last share.
	claims := s.fill(max(shares-scaleSamples-1, 1))
	s.settle() // the program may then send 100 requests without waiting for its own rate limit
	attach := s.samples(min(scaleSamples, shares-1))
	s.settle()
	s.kill()
	restarted := time.Now()
	s.start(start)
	ready := time.Since(restarted)
	s.register()
	s.settle()
	s.must("get the status of a claim", s.reported(s.t.Context(), claims[len(claims)-1], "Attached"))
	requests, writes, cpu := s.requests.Load(), s.writes.Load(), s.cpuTime()
	<-time.After(restPeriod)
	requests, writes, cpu = s.requests.Load()-requests, s.writes.Load()-writes, s.cpuTime()-cpu
	loop, loopWrites := s.loop()
	row := fmt.Sprintf("| %d | %.1f ms | %.1f ms | %.2f s | %.1f %% | %d | %d | %.1f %% | %d | %d MiB | %d MiB |\n",
		shares, ms(attach[len(attach)/2]), ms(attach[len(attach)*9/10]), ready.Seconds(),
		percent(cpu, restPeriod), requests, writes, percent(max(loop-cpu, 0), restPeriod), loopWrites,
		s.memory("VmRSS"), s.memory("RssAnon"))
	s.t.Log(row)
	if path := os.Getenv("SCALE_REPORT"); path != "" {
		appendLine(path, strings.TrimSpace(row))
	}
}

// loop returns the processor time that the plugin uses, and how often it writes the status of a claim, while its pod
// changes its link in a loop for restPeriod.
func (s *scale) loop() (cpu time.Duration, writes int64) {
	s.t.Helper()
	pod := s.attachOne()
	s.settle()
	writes, cpu = s.claimWrites.Load(), s.cpuTime()
	s.flapFor(pod, restPeriod)
	return s.cpuTime() - cpu, s.claimWrites.Load() - writes
}

// A pod that changes its link in a loop causes at most one write of its claim per second.
func TestPlugin_limitsWritesForRepeatedLinkChanges(t *testing.T) {
	s := newScale(t)
	s.start(tuned)
	s.register()
	pod := s.attachOne()
	s.settle()
	const period = 5 * time.Second
	before, start := s.claimWrites.Load(), time.Now()
	s.flapFor(pod, period)
	writes, most := s.claimWrites.Load()-before, int64(time.Since(start)/time.Second)+1
	if writes == 0 || writes > most {
		t.Errorf("the plugin wrote the claim %d times in %s, want 1 to %d times", writes, time.Since(start), most)
	}
}

// attachOne prepares a claim, and attaches it to a new pod, which it returns.
func (s *scale) attachOne() *sandbox {
	s.t.Helper()
	name := fmt.Sprintf("p%d", s.created.Add(1))
	c, pod := s.claim(name), s.sandbox(name)
	s.must("prepare a claim", s.prepare(s.t.Context(), c))
	s.must("attach the pod", pod.hook(s.t.Context(), s.dir, c, timeout))
	return pod
}

// flapFor lets a pod change its link in a loop.
func (s *scale) flapFor(pod *sandbox, period time.Duration) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), period)
	defer cancel()
	s.must("change the link in a loop", pod.flap(ctx))
}

func percent(part, whole time.Duration) float64 { return 100 * part.Seconds() / whole.Seconds() }

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// fill prepares claims and attaches each to a separate pod.
func (s *scale) fill(shares int) (claims []*resourceapi.ResourceClaim) {
	s.t.Helper()
	claims = make([]*resourceapi.ResourceClaim, shares)
	err := measure.InParallel(scaleWorkers, shares, func(i int) (err error) {
		claims[i], err = s.addPod()
		return err
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return claims
}

// addPod prepares a claim and attaches it to a new pod.
func (s *scale) addPod() (*resourceapi.ResourceClaim, error) {
	name := fmt.Sprintf("p%d", s.created.Add(1))
	c := newClaim(name)
	if err := s.api.Client.Tracker().Add(c); err != nil {
		return nil, err
	}
	if err := s.prepare(s.t.Context(), c); err != nil {
		return nil, err
	}
	pod, err := newSandbox(filepath.Join(s.dir, "bundle-"+name), name)
	if err != nil {
		return nil, err
	}
	s.t.Cleanup(pod.end)
	return c, pod.hook(s.t.Context(), s.dir, c, timeout)
}

// register tells the plugin that the kubelet has registered it, as a kubelet does. Until
// then, the plugin repeats its registration.
func (s *scale) register() {
	s.t.Helper()
	sockets, err := filepath.Glob(s.path("registry", "*"+s.config.Instance+"*.sock"))
	if err != nil || len(sockets) != 1 {
		s.t.Fatalf("registration sockets: got %q and error %v, want one", sockets, err)
	}
	conn, err := grpc.NewClient("unix://"+sockets[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		s.t.Fatal(err)
	}
	defer conn.Close()
	if _, err := registerapi.NewRegistrationClient(conn).NotifyRegistrationStatus(s.t.Context(),
		&registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		s.t.Fatal(err)
	}
}

// samples returns the sorted times that preparing a claim and attaching a pod take, one
// at a time.
func (s *scale) samples(count int) (times []time.Duration) {
	s.t.Helper()
	for range count {
		start := time.Now()
		if _, err := s.addPod(); err != nil {
			s.t.Fatal(err)
		}
		times = append(times, time.Since(start))
	}
	slices.Sort(times)
	return times
}

// settle waits until the plugin stops sending requests. A program sends 50 per second.
func (s *scale) settle() {
	s.t.Helper()
	err := eventually.Poll(s.t.Context(), 10*timeout, func() error {
		before := s.requests.Load()
		<-time.After(2 * time.Second)
		if after := s.requests.Load(); after != before {
			return fmt.Errorf("it sent %d requests in 2 s", after-before)
		}
		return nil
	})
	if err != nil {
		s.t.Fatalf("the plugin still reports claims: %v\n%s", err, s.logTail())
	}
}

// cpuTime returns the processor time that the plugin has used.
func (s *scale) cpuTime() time.Duration {
	s.t.Helper()
	used, err := measure.ProcessTime(s.plugin.cmd.Process.Pid)
	if err != nil {
		s.t.Fatal(err)
	}
	return used
}

// memory returns a field of proc_pid_status(5) of the plugin, in MiB.
func (s *scale) memory(field string) int {
	s.t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.plugin.cmd.Process.Pid))
	if err != nil {
		s.t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			kib, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
			if err != nil {
				s.t.Fatal(err)
			}
			return kib >> 10
		}
	}
	s.t.Fatalf("/proc/PID/status has no %s", field)
	return 0
}
