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

func (w *world) mustNot(what, want string, err error) {
	w.t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		w.t.Errorf("%s: got %v, want %s", what, err, want)
	}
}

func (w *world) must(what string, err error) {
	w.t.Helper()
	if err != nil {
		w.t.Errorf("%s: %v", what, err)
	}
}

func TestCallsThatComeLateOrTwiceOrTogether(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	ctx := t.Context()
	w.must("unprepare of a claim that was never prepared", w.unprepare(ctx, newClaim("unknown")))

	c := w.claim("c")
	w.must("prepare", w.prepare(ctx, c))
	w.must("unprepare", w.unprepare(ctx, c))
	w.must("unprepare again", w.unprepare(ctx, c))
	w.must("the same claim comes back", w.prepare(ctx, c))
	w.must("and goes", w.unprepare(ctx, c))

	api := w.api.Client.ResourceV1().ResourceClaims(namespace)
	if err := api.Delete(ctx, "c", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.mustNot("prepare of a claim that is gone", "resourceclaims.resource.k8s.io c", w.prepare(ctx, c))
	namesake := w.claim("c")
	w.mustNot("prepare of a claim that was made anew under its name", "got replaced", w.prepare(ctx, c))
	w.must("prepare of the new one", w.prepare(ctx, namesake))
	w.must("a late unprepare of the old one", w.unprepare(ctx, c))
	pod := w.sandbox("p")
	w.must("which leaves the new one alone", pod.hook(ctx, w.dir, namesake, time.Second))
	w.must("unprepare", w.unprepare(ctx, namesake))
	if link, err := pod.link(); err != nil || link != 0 {
		t.Errorf("link %d, %v", link, err)
	}

	many := w.claim("many")
	var calls sync.WaitGroup
	for i := range 40 {
		calls.Go(func() {
			if i%2 == 0 {
				w.must("prepare among others", w.prepare(ctx, many))
			} else {
				w.must("unprepare among others", w.unprepare(ctx, many))
			}
		})
	}
	calls.Wait()
	w.must("the last unprepare", w.unprepare(ctx, many))
	w.eventually(w.nothingLeft)
}

// A pod that is deleted by force frees its bandwidth for the scheduler at once,
// and runs on for a while (kubernetes/kubernetes#141471).
func TestWhatAForceDeletedPodHasIsNotGivenToAnother(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	ctx := t.Context()
	big := func(name string) *resourceapi.ResourceClaim {
		c := newClaim(name)
		c.Status.Allocation.Devices.Results[0].ConsumedCapacity["bandwidth"] = resource.MustParse("6G")
		return w.add(c)
	}
	first := big("first")
	w.must("prepare", w.prepare(ctx, first))
	pod := w.sandbox("forced")
	w.must("attach", pod.hook(ctx, w.dir, first, time.Second))
	if err := w.api.Client.ResourceV1().ResourceClaims(namespace).Delete(ctx, "first", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	second := big("second")
	w.mustNot("the bandwidth of a pod that still runs", "of which 6G are granted to other claims on this node", w.prepare(ctx, second))
	same := newClaim("same")
	same.Status.Allocation.Devices.Results[0].ShareID = first.Status.Allocation.Devices.Results[0].ShareID
	w.mustNot("the very share", "is in use by another claim", w.prepare(ctx, w.add(same)))
	if link, err := pod.link(); err != nil || link == 0 {
		t.Errorf("the pod that runs has link %d, %v", link, err)
	}
	pod.end()
	w.surviving(func(ctx context.Context) error { return w.prepare(ctx, second) }) // the kubelet tries again
	w.must("unprepare", w.unprepare(ctx, second))
	w.must("late unprepare of the first", w.unprepare(ctx, first))
	w.eventually(w.nothingLeft)
}

func TestADiskThatIsFull(t *testing.T) {
	w := newWorld(t)
	for _, dir := range []string{"plugin", "cdi"} {
		if err := unix.Mount("tmpfs", w.path(dir), "tmpfs", 0, "size=256k"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(w.path(dir), unix.MNT_DETACH) })
	}
	w.start(nil)
	ctx := t.Context()
	before := w.claim("before")
	w.must("prepare", w.prepare(ctx, before))
	for _, dir := range []string{"plugin", "cdi"} {
		ballast := w.path(dir, "ballast")
		if err := os.WriteFile(ballast, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		c := w.claim("full-" + dir)
		w.mustNot("prepare with "+dir+" full", "no space left on device: free some space (or inodes) on the node; nothing was changed, and it is tried again", w.prepare(ctx, c))
		if left, err := filepath.Glob(w.path(dir, "*", "*.writing")); err != nil || len(left) > 0 {
			t.Errorf("half written: %v, %v", left, err)
		}
		pod := w.sandbox("full-" + dir)
		w.must("attach of what is prepared", pod.hook(ctx, w.dir, before, time.Second))
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
		w.must("prepare again", w.prepare(ctx, c))
		w.must("unprepare", w.unprepare(ctx, c))
	}
	w.must("unprepare", w.unprepare(ctx, before))
	w.eventually(w.nothingLeft)
}

func TestRecordsThatNobodyOrOnlyANewerPluginCanRead(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	ctx := t.Context()
	torn, newer, other := w.claim("torn"), w.claim("newer"), w.claim("other")
	w.must("prepare", w.prepare(ctx, torn, newer))
	pod := w.sandbox("p")
	w.must("attach", pod.hook(ctx, w.dir, torn, time.Second))
	link, err := pod.link()
	w.must("link", err)
	w.kill()
	record := func(c *resourceapi.ResourceClaim) string { return w.path("plugin/claims", string(c.UID)+".json") }
	w.write(`{"version": 1, "uid`, "plugin", "claims", string(torn.UID)+".json")
	w.write(`{"version": 2, "uid": "`+string(newer.UID)+`", "what": "is not known yet"}`, "plugin", "claims", string(newer.UID)+".json")
	w.write(`{"cdiVersion": `, "cdi", "dra-shared.dev-share_"+string(torn.UID)+".json")
	w.start(nil)

	w.must("another claim", w.prepare(ctx, other))
	if _, err := os.Stat(record(torn) + ".unreadable"); err != nil {
		t.Errorf("the corrupt record was not kept: %v", err)
	}
	w.must("prepare of the one whose record was lost", w.prepare(ctx, torn))
	if now, err := pod.link(); err != nil || now != link {
		t.Errorf("its pod had link %d and has %d, %v", link, now, err)
	}
	w.must("a container that starts again", pod.hook(ctx, w.dir, torn, time.Second))
	w.mustNot("prepare of what a newer plugin wrote", "it has version 2, this plugin reads up to 1: update the plugin again, or drain the node before going back", w.prepare(ctx, newer))
	w.must("unprepare of all", w.unprepare(ctx, torn, newer, other))
	for _, kept := range []string{record(torn), record(newer)} {
		if err := os.Remove(kept + ".unreadable"); err != nil {
			t.Errorf("not kept: %v", err)
		}
	}
	w.eventually(w.nothingLeft)
}

// Whatever the API server answers, the status is the truth in the end.
func TestTheStatusIsTheTruthAfterAnyOutage(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	c := w.claim("c")
	w.must("prepare", w.prepare(t.Context(), c))
	gr := schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}
	answers := []error{
		apierrors.NewConflict(gr, "c", nil), apierrors.NewForbidden(gr, "c", nil), apierrors.NewTooManyRequests("slow down", 1),
		apierrors.NewInternalError(errInjected), errInjected,
	}
	var mu sync.Mutex
	refused := 0
	w.api.Refuse(func(r *http.Request) error {
		if !strings.Contains(r.URL.Path, "resourceclaims") {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		refused++
		return answers[refused%len(answers)]
	})
	pod := w.sandbox("p")
	w.must("attach, which asks no API server", pod.hook(t.Context(), w.dir, c, time.Second))
	w.eventually(func() error {
		mu.Lock()
		defer mu.Unlock()
		if refused < 2*len(answers) {
			return errors.New("not tried often enough")
		}
		return nil
	})
	if err := w.reported(t.Context(), c, driver.ReasonAttached); err == nil {
		t.Error("it was reported while the API server refused everything")
	}
	w.api.Refuse(nil)
	w.eventually(func() error { return w.reported(t.Context(), c, driver.ReasonAttached) })
	w.must("unprepare", w.unprepare(t.Context(), c))
	w.eventually(w.nothingLeft)
}
