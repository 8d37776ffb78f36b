// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/measure"
)

// otherPods is the number of other pods with an IPAM plugin's addresses while the plugin is measured.
const otherPods = 50

// ipam is an IPAM plugin behind the CNI plugin macvlan.
type ipam struct {
	plugins *cni
	// api counts the requests of the plugin; nil if it does not have an API server.
	api  *controlPlane
	next int // number of the next pod
}

// BenchmarkIPAM measures the CNI plugin macvlan with two IPAM plugins, next to pods with addresses of the same plugin:
// pods that start one at a time, and 50 that start together. The metrics of whereabouts:
//
//   - start-writes/pod, end-writes/pod: requests to the API server that create, change, or delete an object, while
//     pods start and end, including those that a conflict made fail
//   - start-reads/pod, end-reads/pod: the others
//   - left/pod: addresses that are still allocated although their pods have ended. DEL succeeds although an
//     address could not be released.
func BenchmarkIPAM(b *testing.B) {
	b.Run("ipam=host-local", func(b *testing.B) {
		newIPAM(b, nil, fmt.Sprintf(`{"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": %q}]]}`,
			b.TempDir(), ipamRange)).benchmark(b)
	})
	b.Run("ipam=whereabouts", func(b *testing.B) {
		directory := os.Getenv(envControlPlane)
		if directory == "" {
			b.Skip("needs a control plane: run `make bench-addresses`")
		}
		api := newControlPlane(b, directory)
		newIPAM(b, api, fmt.Sprintf(`{"type": "whereabouts", "range": %q, "configuration_path": %q}`,
			ipamRange, api.path("whereabouts.conf"))).benchmark(b)
	})
}

// ipamRange is the range of the addresses of all IPAM plugins.
const ipamRange = "10.50.0.0/16"

// newIPAM returns an IPAM plugin with a NIC.
func newIPAM(b *testing.B, api *controlPlane, config string) *ipam {
	b.Helper()
	newNode(b)
	plugins := newCNI(b, fmt.Sprintf(`[{"type": "macvlan", "master": "nic0", "mode": "private", "ipam": %s}]`, config))
	return &ipam{plugins: plugins, api: api}
}

func (p *ipam) benchmark(b *testing.B) {
	p.startOthers(b)
	for _, parallel := range []int{1, 50} {
		b.Run(fmt.Sprintf("parallel=%d", parallel), func(b *testing.B) { p.measure(b, parallel) })
	}
}

// startOthers starts the other pods, which end with the benchmark.
func (p *ipam) startOthers(b *testing.B) {
	b.Helper()
	for range otherPods {
		id, pod := p.newID(), nstest.New(b)
		if err := p.plugins.add(b.Context(), id, pod); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() {
			if err := p.plugins.del(context.Background(), id, pod); err != nil {
				b.Error(err)
			}
		})
	}
}

func (p *ipam) newID() string {
	p.next++
	return fmt.Sprintf("pod-%d", p.next)
}

// measure starts and ends b.N pods in rounds, and counts the requests of the starts and of the ends of each round.
func (p *ipam) measure(b *testing.B, parallel int) {
	var startTimes, endTimes measure.Latencies
	ids, pods := make([]string, b.N), make([]*nstest.Namespace, b.N)
	for i := range b.N {
		ids[i], pods[i] = p.newID(), nstest.New(b)
		defer pods[i].Close()
	}
	start := func(i int) error {
		return startTimes.Time(func() error { return p.plugins.add(b.Context(), ids[i], pods[i]) })
	}
	end := func(i int) error {
		return endTimes.Time(func() error { return p.plugins.del(b.Context(), ids[i], pods[i]) })
	}
	before := p.requests(b)
	var starts, ends requests
	b.ResetTimer()
	for first := 0; first < b.N; first += parallel {
		n := min(parallel, b.N-first)
		for _, phase := range []struct {
			do    func(i int) error
			count *requests
		}{{start, &starts}, {end, &ends}} {
			if err := measure.InParallel(n, n, func(i int) error { return phase.do(first + i) }); err != nil {
				b.Fatal(err)
			}
			after := p.requests(b)
			phase.count.add(after.minus(before))
			before = after
		}
	}
	b.StopTimer()
	startTimes.Report(b, "start")
	endTimes.Report(b, "end")
	p.report(b, starts, ends)
}

// requests returns the requests that the plugin has sent to the API server.
func (p *ipam) requests(b *testing.B) requests {
	b.Helper()
	if p.api == nil {
		return requests{}
	}
	return p.api.count(b)
}

func (p *ipam) report(b *testing.B, starts, ends requests) {
	b.Helper()
	if p.api == nil {
		return
	}
	perPod := func(count int, name string) { b.ReportMetric(float64(count)/float64(b.N), name+"/pod") }
	perPod(starts.writes, "start-writes")
	perPod(starts.reads, "start-reads")
	perPod(ends.writes, "end-writes")
	perPod(ends.reads, "end-reads")
	perPod(p.api.allocated(b)-otherPods, "left")
}
