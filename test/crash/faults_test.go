package crash

import (
	"context"
	"errors"
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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dra-shared/dra-driver-shared/driver"
)

func (e *testEnv) mustNot(what, want string, err error) {
	e.t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		e.t.Errorf("%s: got %v, want %s", what, err, want)
	}
}

func (e *testEnv) must(what string, err error) {
	e.t.Helper()
	if err != nil {
		e.t.Errorf("%s: %v", what, err)
	}
}

func TestCallsThatComeLateOrTwiceOrTogether(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	ctx := t.Context()
	e.must("unprepare of a claim that was never prepared", e.unprepare(ctx, newClaim("unknown")))

	c := e.claim("c")
	e.must("prepare", e.prepare(ctx, c))
	e.must("unprepare", e.unprepare(ctx, c))
	e.must("unprepare again", e.unprepare(ctx, c))
	e.must("the same claim comes back", e.prepare(ctx, c))
	e.must("and goes", e.unprepare(ctx, c))

	api := e.api.Client.ResourceV1().ResourceClaims(namespace)
	if err := api.Delete(ctx, "c", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	e.mustNot("prepare of a claim that is gone", "resourceclaims.resource.k8s.io c", e.prepare(ctx, c))
	namesake := e.claim("c")
	e.mustNot("prepare of a claim that was made anew under its name", "got replaced", e.prepare(ctx, c))
	e.must("prepare of the new one", e.prepare(ctx, namesake))
	e.must("a late unprepare of the old one", e.unprepare(ctx, c))
	pod := e.sandbox("p")
	e.must("which leaves the new one alone", pod.hook(ctx, e.dir, namesake, time.Second))
	e.must("unprepare", e.unprepare(ctx, namesake))
	if link, err := pod.link(); err != nil || link != 0 {
		t.Errorf("link %d, %v", link, err)
	}

	many := e.claim("many")
	var calls sync.WaitGroup
	for i := range 40 {
		calls.Go(func() {
			if i%2 == 0 {
				e.must("prepare among others", e.prepare(ctx, many))
			} else {
				e.must("unprepare among others", e.unprepare(ctx, many))
			}
		})
	}
	calls.Wait()
	e.must("the last unprepare", e.unprepare(ctx, many))
	e.eventually(e.nothingLeft)
}

// A pod that is deleted by force frees its bandwidth for the scheduler at once,
// and runs on for a while (kubernetes/kubernetes#141471).
func TestWhatAForceDeletedPodHasIsNotGivenToAnother(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	ctx := t.Context()
	big := func(name string) *resourceapi.ResourceClaim {
		c := newClaim(name)
		c.Status.Allocation.Devices.Results[0].ConsumedCapacity["bandwidth"] = resource.MustParse("6G")
		return e.add(c)
	}
	first := big("first")
	e.must("prepare", e.prepare(ctx, first))
	pod := e.sandbox("forced")
	e.must("attach", pod.hook(ctx, e.dir, first, time.Second))
	if err := e.api.Client.ResourceV1().ResourceClaims(namespace).Delete(ctx, "first", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	second := big("second")
	e.mustNot("the bandwidth of a pod that still runs", "of which 6G are granted to other claims on this node", e.prepare(ctx, second))
	same := newClaim("same")
	same.Status.Allocation.Devices.Results[0].ShareID = first.Status.Allocation.Devices.Results[0].ShareID
	e.mustNot("the very share", "is in use by another claim", e.prepare(ctx, e.add(same)))
	if link, err := pod.link(); err != nil || link == 0 {
		t.Errorf("the pod that runs has link %d, %v", link, err)
	}
	pod.end()
	e.surviving(func(ctx context.Context) error { return e.prepare(ctx, second) }) // the kubelet tries again
	e.must("unprepare", e.unprepare(ctx, second))
	e.must("late unprepare of the first", e.unprepare(ctx, first))
	e.eventually(e.nothingLeft)
}

func TestADiskThatIsFull(t *testing.T) {
	e := newTestEnv(t)
	for _, dir := range []string{"plugin", "cdi"} {
		if err := unix.Mount("tmpfs", e.path(dir), "tmpfs", 0, "size=256k"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(e.path(dir), unix.MNT_DETACH) })
	}
	e.start(nil)
	ctx := t.Context()
	before := e.claim("before")
	e.must("prepare", e.prepare(ctx, before))
	for _, dir := range []string{"plugin", "cdi"} {
		ballast := e.path(dir, "ballast")
		if err := os.WriteFile(ballast, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		c := e.claim("full-" + dir)
		e.mustNot("prepare with "+dir+" full", "no space left on device: free some space (or inodes) on the node; nothing was changed, and it is tried again", e.prepare(ctx, c))
		if left, err := filepath.Glob(e.path(dir, "*", "*.writing")); err != nil || len(left) > 0 {
			t.Errorf("half written: %v, %v", left, err)
		}
		pod := e.sandbox("full-" + dir)
		e.must("attach of what is prepared", pod.hook(ctx, e.dir, before, time.Second))
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
		e.must("prepare again", e.prepare(ctx, c))
		e.must("unprepare", e.unprepare(ctx, c))
	}
	e.must("unprepare", e.unprepare(ctx, before))
	e.eventually(e.nothingLeft)
}

func TestRecordsThatNobodyOrOnlyANewerPluginCanRead(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	ctx := t.Context()
	torn, newer, other := e.claim("torn"), e.claim("newer"), e.claim("other")
	e.must("prepare", e.prepare(ctx, torn, newer))
	pod := e.sandbox("p")
	e.must("attach", pod.hook(ctx, e.dir, torn, time.Second))
	link, err := pod.link()
	e.must("link", err)
	e.kill()
	record := func(c *resourceapi.ResourceClaim) string { return e.path("plugin/claims", string(c.UID)+".json") }
	e.write(`{"version": 1, "uid`, "plugin", "claims", string(torn.UID)+".json")
	e.write(`{"version": 2, "uid": "`+string(newer.UID)+`", "what": "is not known yet"}`, "plugin", "claims", string(newer.UID)+".json")
	e.write(`{"cdiVersion": `, "cdi", "dra-shared.dev-share_"+string(torn.UID)+".json")
	e.start(nil)

	e.must("another claim", e.prepare(ctx, other))
	if _, err := os.Stat(record(torn) + ".unreadable"); err != nil {
		t.Errorf("the corrupt record was not kept: %v", err)
	}
	e.must("prepare of the one whose record was lost", e.prepare(ctx, torn))
	if now, err := pod.link(); err != nil || now != link {
		t.Errorf("its pod had link %d and has %d, %v", link, now, err)
	}
	e.must("a container that starts again", pod.hook(ctx, e.dir, torn, time.Second))
	e.mustNot("prepare of what a newer plugin wrote", "it has version 2, this plugin reads up to 1: update the plugin again, or drain the node before going back", e.prepare(ctx, newer))
	e.must("unprepare of all", e.unprepare(ctx, torn, newer, other))
	for _, kept := range []string{record(torn), record(newer)} {
		if err := os.Remove(kept + ".unreadable"); err != nil {
			t.Errorf("not kept: %v", err)
		}
	}
	e.eventually(e.nothingLeft)
}

// Whatever the API server answers, the status is the truth in the end.
func TestTheStatusIsTheTruthAfterAnyOutage(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	c := e.claim("c")
	e.must("prepare", e.prepare(t.Context(), c))
	gr := schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}
	answers := []error{
		apierrors.NewConflict(gr, "c", nil), apierrors.NewForbidden(gr, "c", nil), apierrors.NewTooManyRequests("slow down", 1),
		apierrors.NewInternalError(errInjected), errInjected,
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
		return answers[refused%len(answers)]
	})
	pod := e.sandbox("p")
	e.must("attach, which asks no API server", pod.hook(t.Context(), e.dir, c, time.Second))
	e.eventually(func() error {
		mu.Lock()
		defer mu.Unlock()
		if refused < 2*len(answers) {
			return errors.New("not tried often enough")
		}
		return nil
	})
	if err := e.reported(t.Context(), c, driver.ReasonAttached); err == nil {
		t.Error("it was reported while the API server refused everything")
	}
	e.api.Refuse(nil)
	e.eventually(func() error { return e.reported(t.Context(), c, driver.ReasonAttached) })
	e.must("unprepare", e.unprepare(t.Context(), c))
	e.eventually(e.nothingLeft)
}
