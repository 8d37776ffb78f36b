// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// mustFail fails the test unless the call failed with an error that contains want.
func (e *testEnv) mustFail(call, want string, err error) {
	e.t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		e.t.Errorf("%s: got error %v, want one that contains %q", call, err, want)
	}
}

// must fails the test if the call failed.
func (e *testEnv) must(call string, err error) {
	e.t.Helper()
	if err != nil {
		e.t.Errorf("%s: %v", call, err)
	}
}

func TestPlugin_repeatedLateAndConcurrentCalls(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	ctx := t.Context()
	e.must("unprepare a claim that was never prepared", e.unprepare(ctx, newClaim("unknown")))

	c := e.claim("c")
	e.must("prepare claim c", e.prepare(ctx, c))
	e.must("unprepare claim c", e.unprepare(ctx, c))
	e.must("unprepare claim c a second time", e.unprepare(ctx, c))
	e.must("prepare claim c after unprepare", e.prepare(ctx, c))
	e.must("unprepare claim c again", e.unprepare(ctx, c))

	e.deleteClaim("c")
	e.mustFail("prepare a deleted claim", "resourceclaims.resource.k8s.io c", e.prepare(ctx, c))
	namesake := e.claim("c")
	e.mustFail("prepare a claim that was replaced by one of the same name", "got replaced", e.prepare(ctx, c))
	e.must("prepare the replacement", e.prepare(ctx, namesake))
	e.must("unprepare the replaced claim late", e.unprepare(ctx, c))
	pod := e.sandbox("p")
	e.must("attach the replacement after the late unprepare", pod.hook(ctx, e.dir, namesake, time.Second))
	e.must("unprepare the replacement", e.unprepare(ctx, namesake))
	pod.checkNoLink(t)

	many := e.claim("many")
	var calls sync.WaitGroup
	for i := range 40 {
		calls.Go(func() {
			if i%2 == 0 {
				e.must("concurrent prepare", e.prepare(ctx, many))
			} else {
				e.must("concurrent unprepare", e.unprepare(ctx, many))
			}
		})
	}
	calls.Wait()
	e.must("last unprepare", e.unprepare(ctx, many))
	e.eventually("the node has no state of claims", e.nothingLeft)
}

// A pod that is deleted by force frees its bandwidth for the scheduler immediately, but its containers run for a while
// (kubernetes/kubernetes#141471).
func TestPlugin_forceDeletedPodKeepsGrant(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	ctx := t.Context()
	bigClaim := func(name string) *resourceapi.ResourceClaim {
		c := newClaim(name)
		c.Status.Allocation.Devices.Results[0].ConsumedCapacity["bandwidth"] = resource.MustParse("6G")
		return e.addClaim(c)
	}
	first := bigClaim("first")
	e.must("prepare the first claim", e.prepare(ctx, first))
	pod := e.sandbox("forced")
	e.must("attach the first claim", pod.hook(ctx, e.dir, first, time.Second))
	e.deleteClaim("first")
	second := bigClaim("second")
	e.mustFail("prepare a claim to the bandwidth of a running pod",
		"and 6G are granted to other claims on this node", e.prepare(ctx, second))
	same := newClaim("same")
	same.Status.Allocation.Devices.Results[0].ShareID = first.Status.Allocation.Devices.Results[0].ShareID
	e.addClaim(same)
	e.mustFail("prepare a claim to the share of a running pod", "is in use by another claim", e.prepare(ctx, same))
	pod.mustLink(t)
	pod.end()
	e.retry("prepare the second claim after the pod has ended", func(ctx context.Context) error {
		return e.prepare(ctx, second)
	})
	e.must("unprepare the second claim", e.unprepare(ctx, second))
	e.must("unprepare the first claim late", e.unprepare(ctx, first))
	e.eventually("the node has no state of claims", e.nothingLeft)
}

// Another share must not get the class of a share with a lost claim record: unpreparing either claim would remove the
// class.
func TestPlugin_classOfShareWithoutClaimRecord(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	lost, other := e.claim("lost"), e.claim("other")
	first := e.prepareAndAttach(lost, "first")
	e.remove("plugin/claims", string(lost.UID)+".json")
	second := e.prepareAndAttach(other, "second")
	e.must("check enforcement of both", e.enforced(first, second))
	e.must("unprepare the claim without a record", e.unprepare(t.Context(), lost))
	e.must("check enforcement of the other claim", e.enforced(second))
	e.must("unprepare the other claim", e.unprepare(t.Context(), other))
	e.eventually("the node has no state of claims", e.nothingLeft)
}

func TestPlugin_fullDisk(t *testing.T) {
	e := newTestEnv(t)
	directories := []string{"plugin", "cdi"}
	for _, dir := range directories {
		mountTmpfs(t, e.path(dir), "size=256k")
	}
	e.start(nil)
	ctx := t.Context()
	before := e.claim("before")
	e.must("prepare a claim before the disk is full", e.prepare(ctx, before))
	for _, dir := range directories {
		ballast := e.path(dir, "ballast")
		if err := os.WriteFile(ballast, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("fill %s: got error %v, want %v", dir, err, unix.ENOSPC)
		}
		c := e.claim("full-" + dir)
		e.mustFail("prepare a claim with "+dir+" full",
			"no space left on device: free space or inodes on the node; nothing was changed, and the plugin retries",
			e.prepare(ctx, c))
		e.checkNoUnfinishedFiles(dir)
		pod := e.sandbox("full-" + dir)
		e.must("attach a prepared claim with "+dir+" full", pod.hook(ctx, e.dir, before, time.Second))
		e.must("unprepare a claim with "+dir+" full", e.unprepare(ctx, before)) // eviction depends on it
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
		e.must("prepare the claim again with free space in "+dir, e.prepare(ctx, before))
		e.must("prepare the claim with free space in "+dir, e.prepare(ctx, c))
		e.must("unprepare the claim", e.unprepare(ctx, c))
	}
	e.must("unprepare the first claim", e.unprepare(ctx, before))
	e.eventually("the node has no state of claims", e.nothingLeft)
}

// checkNoUnfinishedFiles fails the test if a directory, or one directly below it,
// has a file that the plugin did not finish.
func (e *testEnv) checkNoUnfinishedFiles(dir string) {
	e.t.Helper()
	var left []string
	for _, pattern := range []string{"*.writing", "*/*.writing"} {
		paths, err := filepath.Glob(e.path(dir, pattern))
		if err != nil {
			e.t.Fatal(err)
		}
		left = append(left, paths...)
	}
	if len(left) > 0 {
		e.t.Errorf("unfinished files in %s: %v", dir, left)
	}
}

func TestPlugin_renamesCorruptAndNewerRecords(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	ctx := t.Context()
	torn, newer, other := e.claim("torn"), e.claim("newer"), e.claim("other")
	e.must("prepare two claims", e.prepare(ctx, torn, newer))
	pod := e.sandbox("p")
	e.must("attach claim torn", pod.hook(ctx, e.dir, torn, time.Second))
	link := pod.mustLink(t)
	e.kill()
	record := func(c *resourceapi.ResourceClaim) string { return e.path("plugin/claims", string(c.UID)+".json") }
	newerRecord := fmt.Sprintf(`{"version": 2, "uid": %q, "what": "is not known yet"}`, newer.UID)
	e.write(`{"version": 1, "uid`, "plugin", "claims", string(torn.UID)+".json")
	e.write(newerRecord, "plugin", "claims", string(newer.UID)+".json")
	e.write(`{"cdiVersion": `, "cdi", "dra-shared.dev-share_"+string(torn.UID)+".json")
	e.start(nil)

	e.must("prepare a third claim", e.prepare(ctx, other))
	if _, err := os.Stat(record(torn) + ".unreadable"); err != nil {
		t.Errorf("the plugin did not keep the corrupt claim record: %v", err)
	}
	e.must("prepare the claim with the corrupt record", e.prepare(ctx, torn))
	if now, err := pod.link(); err != nil || now != link {
		t.Errorf("link of the pod of claim torn: got index %d and error %v, want %d", now, err, link)
	}
	e.must("start another container of that pod", pod.hook(ctx, e.dir, torn, time.Second))
	e.mustFail("prepare the claim with a newer plugin's record",
		"it has version 2, this plugin reads up to 1: upgrade the plugin again, or drain the node before a rollback",
		e.prepare(ctx, newer))
	e.must("unprepare all claims", e.unprepare(ctx, torn, newer, other))
	for _, kept := range []string{record(torn), record(newer)} {
		if err := os.Remove(kept + ".unreadable"); err != nil {
			t.Errorf("the plugin did not keep an unreadable claim record: %v", err)
		}
	}
	e.eventually("the node has no state of claims", e.nothingLeft)
}

// The claim's status is correct after the API server has refused or dropped all
// requests for a while.
func TestPlugin_reportsStatusAfterAPIOutage(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	c := e.claim("c")
	e.must("prepare the claim", e.prepare(t.Context(), c))
	gr := schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}
	failures := []error{
		apierrors.NewConflict(gr, "c", nil), apierrors.NewForbidden(gr, "c", nil),
		apierrors.NewTooManyRequests("slow down", 1), apierrors.NewInternalError(errInjected), errInjected,
	}
	var mu sync.Mutex
	refused := 0
	e.api.Refuse(func(r *http.Request) error {
		if !strings.Contains(r.URL.Path, "resourceclaims") {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		refused++
		return failures[refused%len(failures)]
	})
	pod := e.sandbox("p")
	e.must("attach the claim without an API server", pod.hook(t.Context(), e.dir, c, time.Second))
	e.eventually("each failure has occurred twice", func() error {
		mu.Lock()
		defer mu.Unlock()
		if refused < 2*len(failures) {
			return fmt.Errorf("the plugin made %d requests", refused)
		}
		return nil
	})
	if err := e.reported(t.Context(), c, v1alpha1.ReasonAttached); err == nil {
		t.Error("the status is Attached although the API server refused all requests")
	}
	e.api.Refuse(nil)
	e.awaitReason(c, v1alpha1.ReasonAttached)
	e.must("unprepare the claim", e.unprepare(t.Context(), c))
	e.eventually("the node has no state of claims", e.nothingLeft)
}
