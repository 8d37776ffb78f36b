// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/failpointtest"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// The plugin is killed before and after each failpoint of a claim's lifecycle.
// Its successor must finish the lifecycle and leave nothing behind. The list of
// failpoints is recorded from a lifecycle without a kill, after one that leaves
// the sockets of a killed plugin for garbage collection.
//
// Lifecycles mostly wait for the kernel, so `make test-crash` runs the parts in several
// processes at a time.
func TestPlugin_killedAtEachFailpoint(t *testing.T) {
	const parts = 2
	for part := range parts {
		t.Run(fmt.Sprintf("part=%d", part), func(t *testing.T) { newTestEnv(t).killAtEachFailpoint(part, parts) })
	}
}

// killAtEachFailpoint kills plugins at the failpoints that belong to one part of the test.
func (e *testEnv) killAtEachFailpoint(part, parts int) {
	e.runLifecycle(nil)
	points := e.recordLifecycle()
	e.t.Logf("%d failpoints: %s", len(points), names(points))
	killed, reachedKinds := 0, map[failpointtest.Point]bool{}
	for _, point := range points {
		for _, after := range []bool{false, true} {
			point.After = after
			kind := kindOf(point)
			if kindPart(kind, parts) != part {
				continue
			}
			reached := e.killDuringLifecycle(point)
			reachedKinds[kind] = reachedKinds[kind] || reached
			if reached {
				killed++
			} else if !isTimeDependent(point) {
				e.t.Errorf("the plugin did not reach failpoint %s again: it was not killed %s", point.Name, point)
			}
		}
	}
	for kind, reached := range reachedKinds {
		if !reached {
			e.t.Errorf("no plugin was killed %s", kind)
		}
	}
	e.t.Logf("killed the plugin at %d points, %d kinds", killed, len(reachedKinds))
}

// The hook looks up a file below /proc/sys only for pods that may have IPv6 addresses on a share.
func TestHook_announcesIPv6(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	for _, announce := range []bool{false, true} {
		c := e.claim(fmt.Sprintf("announce-%t", announce))
		e.must("prepare the claim", e.prepare(t.Context(), c))
		pod := e.sandbox(c.Name)
		state, err := pod.state()
		if err != nil {
			t.Fatal(err)
		}
		hook := attach.Hook{
			RunDir: e.path("run"), ClaimUID: string(c.UID), Share: nicShare(c), Wait: timeout, AnnounceIPv6: announce,
		}
		e.must("run the hook", hook.Run(t.Context(), strings.NewReader(state)))
		var got string
		e.must("read ndisc_notify", pod.do(func() error {
			raw, err := os.ReadFile("/proc/sys/net/ipv6/conf/net1/ndisc_notify")
			got = strings.TrimSpace(string(raw))
			return err
		}))
		if want := map[bool]string{false: "0", true: "1"}[announce]; got != want {
			t.Errorf("hook with AnnounceIPv6 %t: ndisc_notify of the link is %s, want %s", announce, got, want)
		}
	}
}

// kindOf returns a point without its number: the operation and the side.
func kindOf(p failpointtest.Point) failpointtest.Point {
	p.N = 0
	return p
}

// kindPart returns the part that a kind belongs to. It depends on the kind alone, because the
// parts record their failpoints separately, and how often a time-dependent one occurs varies.
func kindPart(kind failpointtest.Point, parts int) int {
	sum := crc32.ChecksumIEEE([]byte(kind.Name))
	if kind.After {
		sum++
	}
	return int(sum % uint32(parts))
}

// isTimeDependent reports whether the number of times that a plugin reaches the
// failpoint depends on timing: status reports are batched, and garbage
// collection runs at intervals.
func isTimeDependent(p failpointtest.Point) bool {
	return strings.Contains(p.Name, "PATCH") || strings.Contains(p.Name, "orphan")
}

// killDuringLifecycle runs a lifecycle during which the plugin is killed at
// point, and reports whether the plugin reached the point. A time-dependent
// point gets several attempts.
func (e *testEnv) killDuringLifecycle(point failpointtest.Point) bool {
	e.t.Helper()
	attempts := 1
	if isTimeDependent(point) {
		attempts = 3
	}
	for range attempts {
		killed := e.runLifecycle(func(c *pluginConfig) { c.Kill = point })
		if e.t.Failed() {
			e.t.Fatalf("the lifecycle failed after the plugin was killed %s", point)
		}
		if killed {
			return true
		}
	}
	return false
}

// recordLifecycle returns the failpoints of a lifecycle without a kill.
func (e *testEnv) recordLifecycle() []failpointtest.Point {
	e.t.Helper()
	file := e.path("failpoints")
	e.runLifecycle(func(c *pluginConfig) { c.Record = file })
	return e.readPoints(file)
}

// readPoints reads the failpoints that a plugin has recorded, one NAME#N a line.
func (e *testEnv) readPoints(file string) (points []failpointtest.Point) {
	e.t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		e.t.Fatalf("read the recorded failpoints: %v", err)
	}
	for line := range strings.Lines(string(raw)) {
		name, number, _ := strings.Cut(strings.TrimSpace(line), "#")
		n, err := strconv.Atoi(number)
		if err != nil {
			e.t.Fatalf("recorded failpoint %q: %v", line, err)
		}
		points = append(points, failpointtest.Point{Name: name, N: n})
	}
	if len(points) == 0 {
		e.t.Fatal("the plugin recorded no failpoints: are its components built with the injector?")
	}
	return points
}

func names(points []failpointtest.Point) string {
	var all []string
	for _, p := range points {
		all = append(all, fmt.Sprintf("%s#%d", p.Name, p.N))
	}
	return strings.Join(all, ", ")
}

// runLifecycle starts a plugin, takes a claim with two pods through prepare,
// attach, report, detach, and unprepare, and checks the result of each. It
// repeats calls that fail because the plugin was killed, and starts a new plugin
// for them. It reports whether the first plugin was killed on the way.
func (e *testEnv) runLifecycle(change func(*pluginConfig)) (killed bool) {
	e.t.Helper()
	e.kill()
	e.resetNode()
	e.start(change)
	first := e.plugin
	claim := e.addClaim(withHairpin(withFabric(newClaim(fmt.Sprintf("lifecycle-%d", e.instance)))))
	e.retry("prepare the claim", func(ctx context.Context) error { return e.prepare(ctx, claim) })

	pod := e.longLivedPods(1)[0]
	second := e.sandbox("second-" + claim.Name)
	for _, s := range []*sandbox{pod, second} {
		e.retry("attach the claim to pod "+s.name, func(ctx context.Context) error {
			return s.hook(ctx, e.dir, claim, 200*time.Millisecond)
		})
	}
	link := pod.mustLink(e.t)
	e.retry("the claim's status is Attached", func(ctx context.Context) error {
		return e.reported(ctx, claim, v1alpha1.ReasonAttached)
	})
	second.end()
	e.retry("one pod is attached", func(context.Context) error { return e.attachedPods(1) })

	// The kubelet repeats the call after its restart: nothing changes.
	e.retry("prepare the claim again", func(ctx context.Context) error { return e.prepare(ctx, claim) })
	if now, err := pod.link(); err != nil || now != link {
		e.t.Errorf("link of pod %s after a second prepare: got index %d and error %v, want %d", pod.name, now, err, link)
	}
	e.retry("the kernel enforces one share", func(context.Context) error { return e.enforcedOn(3, pod) })

	e.retry("unprepare the claim", func(ctx context.Context) error { return e.unprepare(ctx, claim) })
	if now, err := pod.link(); err != nil || now != 0 {
		e.t.Errorf("link of pod %s after unprepare: got index %d and error %v, want none", pod.name, now, err)
	}
	e.retry("the node has no state of claims", func(context.Context) error { return e.nothingLeft() })
	e.deleteClaim(claim.Name)
	return e.plugin != first
}

// resetNode removes what plugins keep for their successors: the installed hook,
// and the queues and programs of the NIC.
func (e *testEnv) resetNode() {
	e.t.Helper()
	hook := e.path("hook")
	if err := errors.Join(os.RemoveAll(hook), os.MkdirAll(hook, 0o700)); err != nil {
		e.t.Fatal(err)
	}
	node, err := netdev.NewNode(netdev.Options{BPFFS: e.bpffs})
	if err != nil {
		e.t.Fatal(err)
	}
	defer node.Close()
	if _, err := node.Unmanage("nic0", nstest.FindNIC(e.t, "nic0").Index); err != nil {
		e.t.Fatalf("remove queues and programs from nic0: %v", err)
	}
}

// longLivedPods returns n sandboxes, which all lifecycles of a test share.
func (e *testEnv) longLivedPods(n int) []*sandbox {
	for len(e.pods) < n {
		e.pods = append(e.pods, e.sandbox("long-lived-"+strconv.Itoa(len(e.pods))))
	}
	return e.pods[:n]
}

// attachedPods returns an error unless want pods have attachment records.
func (e *testEnv) attachedPods(want int) error {
	paths, err := filepath.Glob(e.path("run/attached/*.json"))
	if err == nil && len(paths) != want {
		err = fmt.Errorf("%d pods have attachment records, want %d", len(paths), want)
	}
	return err
}

// enforced returns an error unless the kernel has the classes and the classifier
// entry of each pod's share, and no others.
func (e *testEnv) enforced(pods ...*sandbox) error { return e.enforcedOn(2, pods...) }

// enforcedOn does what enforced does for shares that have classes on that many devices: three
// with a hairpin.
func (e *testEnv) enforcedOn(devices int, pods ...*sandbox) error {
	found, err := e.kernelState()
	if err != nil {
		return err
	}
	count := map[string]int{}
	for _, f := range found {
		count[strings.Fields(f)[0]]++
	}
	if count["class"] != devices*len(pods) || count["classification"] != len(pods) {
		return fmt.Errorf("for %d pods the kernel has %s", len(pods), strings.Join(found, ", "))
	}
	return nil
}

// Plugins are killed one after the other, each at the next failpoint, while many claims
// pass through their lifecycle. A plugin is killed at each failpoint of each claim.
//
// The claims come in batches because each plugin restores all claims when it starts, and the duration grows with the
// square of their number: a batch needs about 650 plugins. CRASH_BATCHES sets the number of batches. `make test-crash`
// runs several batches in two processes.
func TestPlugin_killedRepeatedlyWithManyClaims(t *testing.T) {
	batches, err := strconv.Atoi(cmp.Or(os.Getenv("CRASH_BATCHES"), "1"))
	if err != nil {
		t.Fatalf("environment variable CRASH_BATCHES: %v", err)
	}
	for batch := range batches {
		t.Run(fmt.Sprintf("batch=%d", batch), func(t *testing.T) { newTestEnv(t).killRepeatedly(10) })
	}
}

// killRepeatedly passes a batch of claims through their lifecycle.
func (e *testEnv) killRepeatedly(batchSize int) {
	// Trials take most of the time of a start, and TestPlugin_killedAtEachFailpoint covers
	// their failpoints.
	e.way = e.strongest()
	var points [][]failpointtest.Point
	for _, stage := range e.stages([]*resourceapi.ResourceClaim{e.claim("recorded")}) {
		points = append(points, e.recordStage(stage))
	}
	var claims []*resourceapi.ResourceClaim
	for i := range batchSize {
		claims = append(claims, e.claim(fmt.Sprintf("claim-%d", i)))
	}
	for i, stage := range e.stages(claims) {
		e.killUntilDone(points[i], stage)
	}
	e.kill()
	e.start(nil)
	e.eventually("the node has no state of claims", e.nothingLeft)
	e.checkKills(slices.Concat(points...), batchSize)
}

// stages returns functions that prepare all claims, attach each to a pod, and
// unprepare all, one call for each claim. After an error a stage continues where
// it stopped.
func (e *testEnv) stages(claims []*resourceapi.ResourceClaim) []func(context.Context) error {
	pods := e.longLivedPods(len(claims))
	prepared, attached, unprepared := 0, 0, 0
	prepare := func(ctx context.Context) error {
		for ; prepared < len(claims); prepared++ {
			if err := e.prepare(ctx, claims[prepared]); err != nil {
				return err
			}
		}
		return nil
	}
	attach := func(ctx context.Context) error {
		for _, s := range pods[:attached] {
			s.mustLink(e.t)
		}
		for ; attached < len(claims); attached++ {
			if err := pods[attached].hook(ctx, e.dir, claims[attached], 50*time.Millisecond); err != nil {
				return err
			}
		}
		return nil
	}
	unprepare := func(ctx context.Context) error {
		for ; unprepared < len(claims); unprepared++ {
			if err := e.unprepare(ctx, claims[unprepared]); err != nil {
				return err
			}
		}
		return nil
	}
	return []func(context.Context) error{prepare, attach, unprepare}
}

// recordStage returns the failpoints that a plugin reaches while stage runs,
// without the time-dependent ones, which TestPlugin_killedAtEachFailpoint covers.
func (e *testEnv) recordStage(stage func(context.Context) error) []failpointtest.Point {
	e.t.Helper()
	file := e.path("failpoints")
	e.kill()
	e.start(func(c *pluginConfig) { c.Record = file })
	if err := os.Truncate(file, 0); err != nil {
		e.t.Fatal(err)
	}
	e.eventually("the stage succeeds without a kill", func() error { return stage(e.t.Context()) })
	return slices.DeleteFunc(e.readPoints(file), isTimeDependent)
}

// killUntilDone repeats stage until it succeeds, each time with a plugin that is killed at the next of the points,
// first before it and then after it. A claim does not reach failpoints when its stage is complete, so the claims are
// killed through the stage one after the other.
func (e *testEnv) killUntilDone(points []failpointtest.Point, stage func(context.Context) error) {
	e.t.Helper()
	for i := 0; ; i++ {
		point := points[i/2%len(points)]
		point.After = i%2 == 1
		e.kill()
		e.start(func(c *pluginConfig) { c.Kill, c.KillLog = point, e.path("kills") })
		done := false
		condition := fmt.Sprintf("the stage is complete, or the plugin is killed %s", point)
		e.eventually(condition, func() error { // the kubelet retries after an error of a running plugin
			ctx, cancel := context.WithTimeout(e.t.Context(), timeout)
			defer cancel()
			err := stage(ctx)
			done = err == nil
			if !e.running() {
				return nil
			}
			return err
		})
		if done {
			return
		}
	}
}

// checkKills checks that plugins were killed before and after each point as
// often as there are claims.
func (e *testEnv) checkKills(points []failpointtest.Point, claims int) {
	e.t.Helper()
	raw, err := os.ReadFile(e.path("kills"))
	if err != nil {
		e.t.Fatal(err)
	}
	killed := map[string]int{}
	for line := range strings.Lines(string(raw)) {
		killed[strings.TrimSpace(line)]++
	}
	want := map[string]int{} // an operation may occur several times for each claim
	for _, point := range points {
		want["before "+point.Name] += claims
		want["after "+point.Name] += claims
	}
	for line, n := range want {
		if killed[line] < n {
			e.t.Errorf("%d plugins were killed %s, want at least %d", killed[line], line, n)
		}
	}
	e.t.Logf("killed %d plugins at %d kinds of points: %v", strings.Count(string(raw), "\n"), len(want), killed)
}
