// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/dra-shared/dra-driver-shared/conformance/fakeapi"
)

// unknown returns a claim that the driver has never prepared.
func (s *suite) unknown() *dra.Claim {
	return &dra.Claim{Namespace: s.config.Namespace, Name: missingClaim, Uid: string(uuid.NewUUID())}
}

// released ends the case unless the CDI devices are gone and each device that the claim
// had as a whole can be prepared for another claim.
func (s *suite) released(ctx context.Context, c *claim, ids []string) {
	if s.env.CDIDir != "" {
		s.resolves(ids, false)
	}
	for _, r := range c.results() {
		if r.ShareID != nil {
			continue
		}
		if _, err := s.main().tryPrepare(ctx, s.allocated(ctx, r).proto()); err != nil {
			s.fatal("after unprepare, device %s cannot be prepared for another claim: %v", r.Device, err)
		}
	}
}

func caseUnprepareUndoes(ctx context.Context, s *suite) {
	c, devices := s.prepared(ctx, s.some(ctx, 2)...)
	var other *claim
	var kept []string
	if s.free(ctx) {
		var others []*dra.Device
		other, others = s.prepared(ctx)
		kept = s.present(cdiIDs(others))
	}
	s.unprepare(ctx, c)
	s.resolves(kept, true)
	if other != nil {
		s.end(ctx, other)
	}
	s.released(ctx, c, cdiIDs(devices))
	for _, d := range s.devices(ctx) {
		if d.shared() {
			s.expectRoomReturned(ctx, d)
			return
		}
	}
}

func caseUnprepareEntries(ctx context.Context, s *suite) {
	c, _ := s.prepared(ctx)
	if s.free(ctx) {
		s.prepared(ctx) // a claim that the call does not name
	}
	unknown := s.unknown()
	responses, err := s.main().unprepare(ctx, c.proto(), unknown)
	s.must(err, "unprepare a prepared and an unknown claim")
	for _, uid := range []string{string(c.UID), unknown.Uid} {
		if _, ok := responses[uid]; !ok {
			s.fatal("the response has no entry for claim UID %s", uid)
		}
	}
	if len(responses) != 2 {
		s.fatal("the request has 2 claims, but the response has %d entries, and the kubelet refuses unknown ones",
			len(responses))
	}
}

func caseUnprepareUnknown(ctx context.Context, s *suite) { s.unprepareOn(ctx, s.main(), s.unknown()) }

func caseUnprepareTwice(ctx context.Context, s *suite) {
	c, _ := s.prepared(ctx)
	s.unprepare(ctx, c)
	s.unprepare(ctx, c)
}

func caseUnprepareDeleted(ctx context.Context, s *suite) {
	c, devices := s.prepared(ctx)
	s.must(s.delete(ctx, c), "delete the claim")
	s.unprepare(ctx, c)
	s.released(ctx, c, cdiIDs(devices))
}

func caseUnprepareNamesake(ctx context.Context, s *suite) {
	first, _ := s.prepared(ctx)
	s.must(s.delete(ctx, first), "delete the claim")
	r := s.pick(ctx)
	second := s.createNamed(ctx, first.Name, request)
	second = s.allocate(ctx, second, allocationOf(r))
	devices := s.prepare(ctx, second)
	s.unprepare(ctx, first)
	if s.env.CDIDir != "" {
		s.resolves(cdiIDs(devices), true)
	}
	s.same(devices, s.prepare(ctx, second), "after unprepare of an earlier claim of the same name")
	s.unprepare(ctx, second)
	s.released(ctx, second, cdiIDs(devices))
	if s.server != nil && s.free(ctx) {
		s.otherNamespace(ctx)
	}
}

// otherNamespace prepares claims with one name in two namespaces.
func (s *suite) otherNamespace(ctx context.Context) {
	a, _ := s.prepared(ctx)
	if !s.free(ctx) {
		return
	}
	b := s.createAs(ctx, metav1.ObjectMeta{Namespace: "conformance-other", Name: a.Name}, request)
	b = s.allocate(ctx, b, allocationOf(s.pick(ctx)))
	devices := s.prepare(ctx, b)
	kept := s.present(cdiIDs(devices))
	s.unprepare(ctx, a)
	s.resolves(kept, true)
	s.same(devices, s.prepare(ctx, b), "after unprepare of a claim of the same name in another namespace")
}

func caseUnprepareRestart(ctx context.Context, s *suite) {
	s.requireRestart()
	c, devices := s.prepared(ctx)
	s.startAgain(ctx, stopSignal)
	s.unprepare(ctx, c)
	s.released(ctx, c, cdiIDs(devices))
}

func caseUnprepareKilled(ctx context.Context, s *suite) {
	s.requireKill()
	c, devices := s.prepared(ctx)
	s.startAgain(ctx, syscall.SIGKILL)
	s.unprepare(ctx, c)
	s.released(ctx, c, cdiIDs(devices))
}

func caseUnprepareUnreachable(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	c, devices := s.prepared(ctx)
	s.server.Intercept(func(*http.Request, runtime.Object) error { return fakeapi.ErrUnreachable })
	s.unprepare(ctx, c)
	if s.env.CDIDir != "" {
		s.resolves(cdiIDs(devices), false)
	}
	s.server.Intercept(nil)
	if !s.free(ctx) {
		s.used = nil // the same device again
	}
	c, devices = s.prepared(ctx)
	release := make(chan struct{})
	defer close(release)
	s.server.Intercept(func(r *http.Request, _ runtime.Object) error { // accepts connections, but does not respond
		select {
		case <-release:
		case <-r.Context().Done():
		}
		return fakeapi.ErrUnreachable
	})
	s.unprepare(ctx, c)
	if s.env.CDIDir != "" {
		s.resolves(cdiIDs(devices), false)
	}
}

// obstruct prevents the driver from removing the CDI specs with devices of only one claim: it replaces
// each file with a directory that is not empty. restore removes the directories. It writes the files
// again if the claim is still prepared.
func (s *suite) obstruct(devices []*dra.Device) (restore func(prepared bool)) {
	if s.server == nil {
		return func(bool) {} // the runtime of the node reads the specs
	}
	ids, cache := s.ofClaim(cdiIDs(devices)), s.cdiCache()
	files := map[string][]byte{}
	for _, id := range ids {
		d := cache.GetDevice(id)
		if d == nil || files[d.GetSpec().GetPath()] != nil {
			continue // CDI-02
		}
		others := slices.ContainsFunc(d.GetSpec().Devices, func(x specs.Device) bool {
			return !slices.Contains(ids, d.GetSpec().Kind+"="+x.Name)
		})
		if others {
			continue
		}
		path := d.GetSpec().GetPath()
		raw, err := os.ReadFile(path)
		err = errors.Join(err, os.Remove(path), os.MkdirAll(filepath.Join(path, "not-empty"), 0o700))
		s.must(err, "replace CDI spec %s with a directory", path)
		files[path] = raw
	}
	return func(prepared bool) {
		for path, raw := range files {
			s.must(os.RemoveAll(path), "remove directory %s", path)
			if prepared {
				s.must(os.WriteFile(path, raw, 0o600), "write CDI spec %s again", path)
			}
		}
		clear(files)
	}
}

func caseUnprepareOneFails(ctx context.Context, s *suite) {
	bad, devices := s.prepared(ctx)
	first, a := s.prepared(ctx)
	second, b := s.prepared(ctx)
	invalid := &dra.Claim{Namespace: s.config.Namespace, Name: missingClaim, Uid: "conformance-not-a-uid"}
	restore := s.obstruct(devices)
	defer restore(false)
	responses, err := s.main().unprepare(ctx, bad.proto(), invalid, first.proto(), second.proto())
	failed := err == nil && responses[string(bad.UID)].GetError() != ""
	restore(failed)
	s.must(err, "unprepare of two claims, of one whose CDI spec cannot be removed, and of one with the UID %q",
		invalid.Uid)
	for _, c := range []*claim{first, second} {
		if r := responses[string(c.UID)]; r == nil || r.GetError() != "" {
			s.fatal("unprepare of claim %s failed because of another one: %q", c.Name, r.GetError())
		}
	}
	if s.env.CDIDir != "" {
		s.resolves(slices.Concat(cdiIDs(a), cdiIDs(b)), false)
	}
	if !failed && responses[invalid.Uid].GetError() == "" {
		s.skip("the driver unprepared all claims without an error, even one whose CDI spec is a directory, and one whose " +
			"UID is invalid")
	}
	s.unprepare(ctx, bad) // the cause is gone
	if s.env.CDIDir != "" {
		s.resolves(cdiIDs(devices), false)
	}
}

func caseUnprepareFailed(ctx context.Context, s *suite) {
	c := s.gone(ctx)
	_, _ = s.main().tryPrepare(ctx, c.proto()) // PREP-14 reports success
	s.unprepare(ctx, c)
	for _, path := range s.files() {
		if strings.Contains(path, string(c.UID)) || strings.Contains(path, c.Name) {
			s.fatal("the driver left %s behind", path)
		}
	}
	r := s.pick(ctx)
	missing := resultFor(r, "missing")
	missing.Device = missingDevice
	c = s.allocated(ctx, r, missing)
	_, _ = s.main().tryPrepare(ctx, c.proto()) // PREP-14 reports success
	s.unprepare(ctx, c)
	if r.ShareID == nil {
		_, err := s.main().tryPrepare(ctx, s.allocated(ctx, r).proto())
		s.must(err, "prepare of device %s after unprepare of a claim of which another device was missing", r.Device)
	}
}

func caseUnprepareNever(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	c, devices := s.prepared(ctx)
	ids := s.ofClaim(s.withIDs(devices))
	s.must(s.delete(ctx, c), "delete the claim")
	if s.free(ctx) {
		c, devices = s.prepared(ctx)
		ids = append(ids, s.ofClaim(cdiIDs(devices))...)
		s.must(s.delete(ctx, c), "delete another claim")
		s.createNamed(ctx, c.Name, request) // with another UID
	}
	s.startAgain(ctx, stopSignal)
	ctx, cancel := context.WithTimeout(ctx, s.config.Quiet.Duration)
	defer cancel()
	err := poll(ctx, func() error {
		for _, id := range ids {
			if s.cdiCache().GetDevice(id) != nil {
				return errors.New(id)
			}
		}
		return nil
	})
	if err != nil {
		s.fatal("%v after a restart, the CDI device of a claim that was deleted still exists: %v", s.config.Quiet, err)
	}
}

func caseUnpreparePrepare(ctx context.Context, s *suite) {
	c, _ := s.prepared(ctx)
	check := func() {
		devices := s.prepare(ctx, c)
		for _, d := range devices {
			allocated := slices.ContainsFunc(c.results(), func(r resourceapi.DeviceRequestAllocationResult) bool {
				return r.Device == d.DeviceName && (d.GetShareId() == "" || d.GetShareId() == string(ptr.Deref(r.ShareID, "")))
			})
			if !allocated { // PREP-01 compares the pool too
				s.fatal("the response has device %s, share %q, which is not allocated to the claim now", d.DeviceName,
					d.GetShareId())
			}
		}
		if s.env.CDIDir != "" {
			s.resolves(cdiIDs(devices), true)
		}
	}
	s.unprepare(ctx, c)
	check()
	s.unprepare(ctx, c)
	if !s.free(ctx) {
		s.used = nil // the same device again
	}
	c = s.reallocate(ctx, c, s.pick(ctx))
	check()
}

// Limits of Config.Cycles for a slow driver, such as one with a client that has the default limit of requests.
const (
	fewestCycles = 10
	cyclesTime   = 8 * time.Second
)

// cycles calls f as often as the configuration states, or less often if that takes too long.
// It returns the number of calls.
func (s *suite) cycles(f func()) (n int) {
	for start := time.Now(); n < s.config.Cycles && (n < fewestCycles || time.Since(start) < cyclesTime); n++ {
		f()
	}
	return n
}

func caseUnprepareLeaks(ctx context.Context, s *suite) {
	cycle := func() {
		s.used = nil
		c, _ := s.prepared(ctx)
		s.end(ctx, c)
	}
	cycle() // the first call may load something
	s.leaves(ctx, "prepare and unprepare", func() int { return s.cycles(cycle) })
	s.leaves(ctx, "two calls of prepare, and one that fails,", func() int {
		for range fewestCycles {
			s.used = nil
			c, _ := s.prepared(ctx)
			s.prepare(ctx, c)
			s.end(ctx, c)
			bad := s.gone(ctx)
			_, _ = s.main().tryPrepare(ctx, bad.proto()) // PREP-14 reports success
			s.end(ctx, bad)
		}
		return fewestCycles
	})
}

// leaves ends the case if cycles leak files or memory. run returns the number of cycles.
func (s *suite) leaves(ctx context.Context, what string, run func() int) {
	const memoryPerCycle = 1 << 20 // the heap of a program varies too
	before, process := s.files(), s.usage(ctx)
	cycles := run()
	limited, cancel := context.WithTimeout(ctx, s.config.Quiet.Duration) // a driver may clean up in the background
	defer cancel()
	err := poll(limited, func() error {
		after := s.files()
		for _, path := range after {
			for _, c := range s.claims {
				if strings.Contains(path, string(c.UID)) {
					return fmt.Errorf("the driver left %s behind", path)
				}
			}
		}
		// A driver may write a few files at any time, but not one per cycle.
		isOld := func(path string) bool { return slices.Contains(before, path) }
		if left := slices.DeleteFunc(after, isOld); len(left) >= cycles/2 {
			return fmt.Errorf("each cycle leaves files, such as %s", left[0])
		}
		now := s.usage(ctx)
		if more := now.files - process.files; more >= cycles/2 {
			return errors.New("each cycle leaves open files in the process")
		}
		if more := now.memory - process.memory; more >= cycles*memoryPerCycle {
			return errors.New("the memory of the process grows by 1 MiB or more with each cycle")
		}
		return nil
	})
	s.must(err, "after cycles of %s, each with a new claim", what)
}

// usage counts the resources of a process: open files, and memory in bytes.
type usage struct{ files, memory int }

// usage returns the usage of the driver's process, or zeros if the process is not known.
func (s *suite) usage(ctx context.Context) (u usage) {
	pid := 0
	switch {
	case s.server != nil:
		pid = s.main().pid
	case len(s.config.Hooks.PID) > 0:
		pid, _ = s.livePID(ctx)
	}
	if pid == 0 {
		return u
	}
	directory := filepath.Join("/proc", strconv.Itoa(pid))
	files, err := os.ReadDir(filepath.Join(directory, "fd"))
	if err != nil {
		return u // not Linux, or another user's
	}
	raw, err := os.ReadFile(filepath.Join(directory, "statm"))
	if fields := strings.Fields(string(raw)); err == nil && len(fields) > 1 {
		pages, _ := strconv.Atoi(fields[1])
		u.memory = pages * os.Getpagesize()
	}
	u.files = len(files)
	return u
}

func caseUnprepareRace(ctx context.Context, s *suite) {
	const parts = 10
	c := s.allocated(ctx)
	k := s.main()
	var ids []string
	took := s.config.callTimeout
	for range 3 { // the first call may be slower than the others
		start := time.Now()
		ids = cdiIDs(s.prepare(ctx, c))
		took = min(took, time.Since(start))
		s.unprepare(ctx, c)
	}
	for part := range parts {
		var wait sync.WaitGroup
		wait.Go(func() { _, _ = k.tryPrepare(ctx, c.proto()) })
		wait.Go(func() {
			<-time.After(time.Duration(part) * took / parts) // hits another part of prepare each time
			_ = k.tryUnprepare(ctx, c.proto())
		})
		wait.Wait()
		s.unprepare(ctx, c)
		if s.env.CDIDir != "" {
			s.resolves(ids, false)
		}
	}
	s.prepare(ctx, c)
}
