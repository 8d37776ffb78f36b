// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/test/measure"
)

// BenchmarkPlugin measures what the kubelet and the container runtime wait for when a pod
// starts and ends next to other shares: preparing the claim, the hook, and unpreparing the
// claim, which detaches the link. "hook" includes the start of the hook's process; "attach"
// is the same without a process: the part of the plugin.
func BenchmarkPlugin(b *testing.B) {
	s := newScale(b)
	s.start(tuned)
	s.connect()
	hook := buildProgram(b, "dra-shared-hook")
	filled := 0
	for _, shares := range []int{10, 100, 1000, 2900} {
		b.Run(fmt.Sprintf("shares=%d", shares), func(b *testing.B) {
			s.fill(shares - filled)
			filled = shares
			for _, parallel := range []int{1, 8, 32} {
				b.Run(fmt.Sprintf("parallel=%d", parallel), func(b *testing.B) { s.benchmark(b, hook, parallel) })
			}
		})
	}
}

// BenchmarkAddresses compares attaching with an address of a pool and with a static one, alternately,
// next to 50 pods with addresses of the pool. It reports the writes of AddressBlocks for each of those. "together" is
// attaching 50 more pods with addresses of the pool, which start together.
func BenchmarkAddresses(b *testing.B) {
	for _, ranges := range []string{"10.20.0.0/16", "10.20.0.0/22"} {
		b.Run("ranges="+strings.ReplaceAll(ranges, "/", "_"), func(b *testing.B) { benchmarkAddresses(b, ranges) })
	}
}

func benchmarkAddresses(b *testing.B, ranges string) {
	const others = 50
	s := newScale(b)
	s.must("create the pool", s.api.AddPool(&network.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "pool", UID: "pool"},
		Spec: network.AddressPoolSpec{
			Network: "storage", Default: true, Subnet: "10.20.0.0/16", Ranges: []string{ranges},
		},
	}))
	s.start(func(c *pluginConfig) {
		tuned(c)
		c.Pools = true
	})
	s.connect()
	s.fill(others)
	writes := s.blockWrites.Load()
	var static, pool, together measure.Latencies
	b.ResetTimer()
	for i := range b.N {
		s.timeAttach(b, &pool, newClaim(fmt.Sprintf("pool-%d", s.created.Add(1))))
		s.timeAttach(b, &static, withAddress(newClaim(fmt.Sprintf("static-%d", s.created.Add(1))), i))
	}
	s.timeTogether(b, &together, others)
	b.StopTimer()
	pool.Report(b, "pool")
	static.Report(b, "static")
	together.Report(b, "together")
	b.ReportMetric(float64(writes)/others, "writes/pod")
}

// timeAttach measures the part of the plugin in the start of a pod, and ends the pod.
func (s *scale) timeAttach(b *testing.B, latencies *measure.Latencies, claim *resourceapi.ResourceClaim) {
	b.Helper()
	s.addClaim(claim)
	pod := s.sandbox(claim.Name)
	s.must("prepare the claim", s.prepare(b.Context(), claim))
	s.must("attach the claim", latencies.Time(func() error { return pod.hook(b.Context(), s.dir, claim, timeout) }))
	s.must("unprepare the claim", s.unprepare(b.Context(), claim))
	pod.end()
	s.deleteClaim(claim.Name)
}

// timeTogether measures the part of the plugin in the start of pods that start together, and ends the pods.
func (s *scale) timeTogether(b *testing.B, latencies *measure.Latencies, count int) {
	b.Helper()
	claims, pods := make([]*resourceapi.ResourceClaim, count), make([]*sandbox, count)
	for i := range count {
		claims[i] = s.addClaim(newClaim(fmt.Sprintf("together-%d", s.created.Add(1))))
		pods[i] = s.sandbox(claims[i].Name)
		s.must("prepare the claim", s.prepare(b.Context(), claims[i]))
	}
	s.must("attach the claims", measure.InParallel(count, count, func(i int) error {
		return latencies.Time(func() error { return pods[i].hook(b.Context(), s.dir, claims[i], timeout) })
	}))
	for i := range count {
		s.must("unprepare the claim", s.unprepare(b.Context(), claims[i]))
		pods[i].end()
		s.deleteClaim(claims[i].Name)
	}
}

// benchmark passes b.N pods through their lifecycle, as many at a time as parallel says:
// they start together, and then they end together.
func (s *scale) benchmark(b *testing.B, hook string, parallel int) {
	var prepare, run, attach, unprepare measure.Latencies
	claims := make([]*resourceapi.ResourceClaim, b.N)
	pods := make([]*sandbox, b.N)
	for i := range b.N {
		claims[i] = s.addClaim(withAddress(newClaim(fmt.Sprintf("measured-%d", s.created.Add(1))), i))
		pods[i] = s.sandbox(claims[i].Name)
	}
	beforeStart := func(i int, began time.Time) error {
		return prepare.Since(began, func() error { return s.prepare(b.Context(), claims[i]) })
	}
	withProcess := func(i int) bool { return i/parallel%2 == 0 }
	commands := make([]*exec.Cmd, b.N)
	prepared := func(i int, _ time.Time) (err error) {
		if withProcess(i) {
			commands[i], err = s.hookCommand(b.Context(), hook, pods[i], claims[i])
		}
		return err
	}
	start := func(i int, began time.Time) error {
		if withProcess(i) {
			return run.Since(began, func() error { return runHook(commands[i]) })
		}
		return attach.Since(began, func() error { return pods[i].hook(b.Context(), s.dir, claims[i], timeout) })
	}
	end := func(i int, began time.Time) error {
		return unprepare.Since(began, func() error { return s.unprepare(b.Context(), claims[i]) })
	}
	b.ResetTimer()
	if err := measure.InRounds(parallel, b.N, beforeStart, prepared, start, end); err != nil {
		b.Fatal(err)
	}
	b.StopTimer()
	for i := range claims {
		pods[i].end()
		s.deleteClaim(claims[i].Name)
	}
	prepare.Report(b, "prepare")
	run.Report(b, "hook")
	attach.Report(b, "attach")
	unprepare.Report(b, "unprepare")
}

// withAddress adds a static address to a claim, one of 65,000.
func withAddress(c *resourceapi.ResourceClaim, n int) *resourceapi.ResourceClaim {
	return withStaticAddress(c, fmt.Sprintf("10.40.%d.%d/16", n/250%250, 1+n%250))
}

// withStaticAddress adds a static address to a claim.
func withStaticAddress(c *resourceapi.ResourceClaim, address string) *resourceapi.ResourceClaim {
	parameters := fmt.Sprintf(`{"apiVersion": "dra-shared.dev/v1alpha1", "kind": "NetworkAttachment", "addresses": [%q]}`,
		address)
	c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
		Source: resourceapi.AllocationConfigSourceClaim,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driverName, Parameters: apiruntime.RawExtension{Raw: []byte(parameters)},
		}},
	}}
	return c
}

// hookCommand returns the hook as the container runtime starts it: with the arguments in the
// claim's CDI spec.
func (s *scale) hookCommand(
	ctx context.Context, hook string, pod *sandbox, c *resourceapi.ResourceClaim,
) (*exec.Cmd, error) {
	state, err := pod.state()
	if err != nil {
		return nil, err
	}
	spec, err := cdiapi.ReadSpec(s.path("cdi", "dra-shared.dev-share_"+string(c.UID)+".json"), 0)
	if err != nil {
		return nil, err
	}
	command := exec.CommandContext(ctx, hook, spec.Devices[0].ContainerEdits.Hooks[0].Args[1:]...)
	command.Stdin = strings.NewReader(state)
	return command, nil
}

func runHook(command *exec.Cmd) error {
	if out, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("run the hook: %w: %s", err, out)
	}
	return nil
}
