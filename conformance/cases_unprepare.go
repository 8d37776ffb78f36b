// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/dra-shared/dra-driver-shared/conformance/fakeapi"
)

// unknown returns a claim that the driver has never prepared.
func (s *suite) unknown() *dra.Claim {
	return &dra.Claim{Namespace: s.config.Namespace, Name: missingClaim, Uid: string(uuid.NewUUID())}
}

// released ends the case unless the CDI devices are gone and the device, which the claim
// had as a whole, can be prepared for another claim.
func (s *suite) released(ctx context.Context, c *claim, ids []string) {
	if s.env.CDIDir != "" {
		s.resolves(ids, false)
	}
	if r := c.results()[0]; r.ShareID == nil {
		if _, err := s.main().tryPrepare(ctx, s.allocated(ctx, r).proto()); err != nil {
			s.fatal("after unprepare, the device cannot be prepared for another claim: %v", err)
		}
	}
}

func caseUnprepareUndoes(ctx context.Context, s *suite) {
	c, devices := s.prepared(ctx)
	s.unprepare(ctx, c)
	s.released(ctx, c, cdiIDs(devices))
}

func caseUnprepareEntries(ctx context.Context, s *suite) {
	c, _ := s.prepared(ctx)
	unknown := s.unknown()
	responses, err := s.main().unprepare(ctx, c.proto(), unknown)
	s.ok(err, "unprepare a prepared and an unknown claim")
	for _, uid := range []string{string(c.UID), unknown.Uid} {
		if _, ok := responses[uid]; !ok {
			s.fatal("the response has no entry for claim UID %s", uid)
		}
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
	s.ok(s.delete(ctx, c), "delete the claim")
	s.unprepare(ctx, c)
	s.released(ctx, c, cdiIDs(devices))
}

func caseUnprepareNamesake(ctx context.Context, s *suite) {
	first, _ := s.prepared(ctx)
	s.ok(s.delete(ctx, first), "delete the claim")
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
}

func caseUnprepareRestart(ctx context.Context, s *suite) {
	s.canRestart()
	c, devices := s.prepared(ctx)
	s.startAgain(ctx, stopSignal)
	s.unprepare(ctx, c)
	s.released(ctx, c, cdiIDs(devices))
}

func caseUnprepareKilled(ctx context.Context, s *suite) {
	s.canKill()
	c, devices := s.prepared(ctx)
	s.startAgain(ctx, syscall.SIGKILL)
	s.unprepare(ctx, c)
	s.released(ctx, c, cdiIDs(devices))
}

func caseUnprepareUnreachable(ctx context.Context, s *suite) {
	s.fake()
	c, devices := s.prepared(ctx)
	s.server.Intercept(func(*http.Request, runtime.Object) error { return fakeapi.ErrUnreachable })
	s.unprepare(ctx, c)
	if s.env.CDIDir != "" {
		s.resolves(cdiIDs(devices), false)
	}
}

func caseUnprepareOneFails(ctx context.Context, s *suite) {
	first, a := s.prepared(ctx)
	second, b := s.prepared(ctx)
	invalid := &dra.Claim{Namespace: s.config.Namespace, Name: missingClaim, Uid: "conformance-not-a-uid"}
	responses, err := s.main().unprepare(ctx, invalid, first.proto(), second.proto())
	s.ok(err, "unprepare of two claims and one with the UID %q", invalid.Uid)
	for _, c := range []*claim{first, second} {
		if message := responses[string(c.UID)].GetError(); message != "" {
			s.fatal("unprepare of claim %s failed because of another one: %s", c.Name, message)
		}
	}
	if s.env.CDIDir != "" {
		s.resolves(slices.Concat(cdiIDs(a), cdiIDs(b)), false)
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
}

func caseUnprepareNever(ctx context.Context, s *suite) {
	s.fake()
	c, devices := s.prepared(ctx)
	ids := s.ofClaim(s.withIDs(devices))
	s.ok(s.delete(ctx, c), "delete the claim")
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
	for range 2 {
		s.unprepare(ctx, c)
		devices := s.prepare(ctx, c)
		if s.env.CDIDir != "" {
			s.resolves(cdiIDs(devices), true)
		}
	}
}

// files returns the files in the directories that the driver writes to.
func (s *suite) files() (paths []string) {
	for _, dir := range []string{s.env.PluginDir, s.env.CDIDir, s.env.StateDir} {
		if dir == "" {
			continue
		}
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return nil //nolint:nilerr // it was removed meanwhile
			}
			if !d.IsDir() {
				paths = append(paths, path)
			}
			return nil
		})
		s.ok(err, "list the driver's files")
	}
	return paths
}

// Limits of Config.Cycles for a driver that is slow, such as by the limit of requests that
// its client has by default.
const (
	fewestCycles = 10
	cyclesTime   = 8 * time.Second
)

// cycles calls f as often as the configuration says, and less often if that takes too long.
// It returns how often.
func (s *suite) cycles(f func()) (n int) {
	for start := time.Now(); n < s.config.Cycles && (n < fewestCycles || time.Since(start) < cyclesTime); n++ {
		f()
	}
	return n
}

func caseUnprepareLeaks(ctx context.Context, s *suite) {
	c, _ := s.prepared(ctx)
	s.unprepare(ctx, c)
	before := s.files()
	cycles := s.cycles(func() {
		s.prepare(ctx, c)
		s.unprepare(ctx, c)
	})
	// A driver that writes files of its own time has a few more, but not one per cycle.
	after := s.files()
	if more := len(after) - len(before); more >= cycles/2 {
		s.fatal("%d cycles of prepare and unprepare left %d more files, such as %s", cycles, more, after[len(after)-1])
	}
}

func caseUnprepareRace(ctx context.Context, s *suite) {
	const parts = 10
	c := s.allocated(ctx)
	k := s.main()
	start := time.Now()
	ids := cdiIDs(s.prepare(ctx, c))
	took := time.Since(start)
	s.unprepare(ctx, c)
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
