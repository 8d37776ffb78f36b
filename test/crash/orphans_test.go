package crash

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

func (w *world) path(elements ...string) string {
	return filepath.Join(append([]string{w.dir}, elements...)...)
}

func (w *world) write(content string, elements ...string) string {
	w.t.Helper()
	path := w.path(elements...)
	if err := os.WriteFile(path, []byte(content), 0o700); err != nil {
		w.t.Fatal(err)
	}
	return path
}

// socket leaves a socket at which nobody listens any more.
func (w *world) deadSocket(elements ...string) {
	w.t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: w.path(elements...), Net: "unix"})
	if err != nil {
		w.t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close()
}

func TestWhatBelongsToNobodyGoesAndWhatIsNotOursStays(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	c := w.claim("c")
	w.surviving(func(ctx context.Context) error { return w.prepare(ctx, c) })
	pod := w.sandbox("p")
	w.surviving(func(ctx context.Context) error { return pod.hook(ctx, w.dir, c, time.Second) })
	link, err := pod.link()
	if err != nil {
		t.Fatal(err)
	}

	// Ours, and nobody's.
	w.write("{}", "cdi", "dra-shared.dev-share_00000000-0000-0000-0000-000000000000.json")
	w.write("half", "cdi", "dra-shared.dev-share_1.json.writing")
	w.write("half", "plugin", "claims", "x.json.writing")
	w.write("half", "run", "attached", "x.json.writing")
	w.write("old", "hook", "dra-shared-hook-0123456789abcdef")
	w.deadSocket("run", "attach.d", "gone.sock")
	w.deadSocket("registry", "dra-shared.dev-gone-reg.sock")
	w.deadSocket("plugin", "dra-gone.sock")
	w.orphansInKernel()
	// Somebody else's.
	theirs := []string{
		w.write("{}", "cdi", "other.example-share_1.json"), w.write("x", "cdi", "dra-shared.dev.json"),
		w.write("x", "hook", "another"), w.write("x", "registry", "other.example-reg.sock"),
	}
	other := netlink.NewLinkAttrs()
	other.Name = "ifb-other"
	if err := netlink.LinkAdd(&netlink.Ifb{LinkAttrs: other}); err != nil {
		t.Fatal(err)
	}

	w.eventually(func() error {
		for _, pattern := range []string{"cdi/dra-shared.dev-share_[01]*", "*/*.writing", "*/*/*.writing", "hook/dra-shared-hook-0123*", "*/*gone*", "*/*/*gone*"} {
			left, err := filepath.Glob(w.path(pattern))
			if err != nil || len(left) > 0 && !strings.Contains(left[0], string(c.UID)) {
				return fmt.Errorf("left: %v, %w", left, err)
			}
		}
		if _, err := net.InterfaceByName("ifb-nobody"); err == nil {
			return fmt.Errorf("ifb-nobody is left")
		}
		return w.classified([]*sandbox{pod})
	})
	for _, path := range theirs {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("somebody else's: %v", err)
		}
	}
	if _, err := net.InterfaceByName("ifb-other"); err != nil {
		t.Errorf("somebody else's ifb-other: %v", err)
	}
	if now, err := pod.link(); err != nil || now != link {
		t.Errorf("the pod had link %d and has %d: %v", link, now, err)
	}
	log, err := os.ReadFile(w.path("log"))
	if err != nil {
		t.Fatal(err)
	}
	for _, what := range []string{"CDI spec of claim 00000000", "hook-0123456789abcdef", "class cf0 of NIC nic0", "classification of 02:00:00:00:00:99", "IFB device ifb-nobody", "attach.d/gone.sock"} {
		if !strings.Contains(string(log), what) {
			t.Errorf("the log does not say that %s was removed", what)
		}
	}
}

// orphansInKernel are a class, an entry of the classifier, an IFB device.
func (w *world) orphansInKernel() {
	w.t.Helper()
	nic := nstest.Find(w.t, "nic0").Index
	ifb, err := net.InterfaceByName(shape.IFBName("nic0"))
	if err != nil {
		w.t.Fatal(err)
	}
	conn, err := rtnl.Open()
	if err != nil {
		w.t.Fatal(err)
	}
	defer conn.Close()
	shaper := shape.New(conn, nil)
	if err := shaper.Set(nic, ifb.Index, shape.Link{Line: 10e9}, 0xcf0, shape.Rates{Floor: 1e6, Ceil: 1e6}); err != nil {
		w.t.Fatal(err)
	}
	classifier, err := classify.Open(w.bpffs, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	defer classifier.Close()
	if err := classifier.Add(classify.Member{Parent: nic, Cookie: 99, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 0x99}}, 0xd5acf0); err != nil {
		w.t.Fatal(err)
	}
	gone := netlink.NewLinkAttrs()
	gone.Name = "nobody"
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: gone}); err != nil {
		w.t.Fatal(err)
	}
	link, err := netlink.LinkByName("nobody")
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err := shaper.Setup("nobody", link.Attrs().Index, shape.Link{Line: 1e9}, true); err != nil {
		w.t.Fatal(err)
	}
	if err := netlink.LinkDel(link); err != nil {
		w.t.Fatal(err)
	}
}

// The kubelet has lost its state: nobody will ever unprepare.
func TestAClaimThatIsGoneIsUnpreparedOnceNoPodHasIt(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	gone, running, reallocated := w.claim("gone"), w.claim("running"), w.claim("reallocated")
	w.surviving(func(ctx context.Context) error { return w.prepare(ctx, gone, running, reallocated) })
	pod := w.sandbox("p")
	w.surviving(func(ctx context.Context) error { return pod.hook(ctx, w.dir, running, time.Second) })
	api := w.api.Client.ResourceV1().ResourceClaims(namespace)
	for _, name := range []string{"gone", "running"} { // both by force
		if err := api.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	w.claim("gone") // and one of that name is made anew
	reallocated.Status.Allocation = nil
	if _, err := api.UpdateStatus(t.Context(), reallocated, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	records := func() (names []string) {
		paths, err := filepath.Glob(w.path("plugin/claims/*.json"))
		if err != nil {
			t.Fatal(err)
		}
		return paths
	}
	w.eventually(func() error {
		if r := records(); len(r) != 1 || !strings.Contains(r[0], string(running.UID)) {
			return fmt.Errorf("records: %v, want that of %s alone", r, running.UID)
		}
		return nil
	})
	if link, err := pod.link(); err != nil || link == 0 {
		t.Errorf("the pod that runs has lost its link: %v", err)
	}
	pod.end()
	w.eventually(w.nothingLeft)
}

// What was in the kernel before a boot is not there after it; what was on disk is.
func TestAfterARebootNothingOfBeforeIsTrusted(t *testing.T) {
	w := newWorld(t)
	boot := w.write("first boot", "boot")
	of := func(c *pluginConfig) { c.BootIDFile = boot }
	w.start(of)
	stays, gone := w.claim("stays"), w.claim("gone")
	w.surviving(func(ctx context.Context) error { return w.prepare(ctx, stays, gone) })
	before := w.sandbox("before")
	w.surviving(func(ctx context.Context) error { return before.hook(ctx, w.dir, stays, time.Second) })
	w.eventually(func() error { return w.reported(t.Context(), stays, driver.ReasonAttached) })

	w.kill()
	before.end()
	w.asNew()
	specs, err := filepath.Glob(w.path("cdi/*")) // on a tmpfs
	if err != nil || len(specs) != 4 {
		t.Fatal(specs, err)
	}
	for _, s := range specs {
		if err := os.Remove(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.api.Client.ResourceV1().ResourceClaims(namespace).Delete(t.Context(), "gone", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.write("second boot", "boot")
	w.start(of)
	if err := w.attachedPods(0); err != nil {
		t.Errorf("attach records of another boot: %v", err)
	}
	w.surviving(func(ctx context.Context) error { return w.prepare(ctx, stays) })
	if specs, err := filepath.Glob(w.path("cdi/*")); err != nil || len(specs) != 2 { // its own, and its metadata's
		t.Errorf("CDI specs after prepare: %v, %v", specs, err)
	}
	raw, err := os.ReadFile(w.path("plugin/claims", string(stays.UID)+".json"))
	if err != nil || !strings.Contains(string(raw), "second boot") {
		t.Errorf("the record is %s, %v", raw, err)
	}
	after := w.sandbox("after")
	w.surviving(func(ctx context.Context) error { return after.hook(ctx, w.dir, stays, time.Second) })
	w.eventually(func() error {
		if paths, err := filepath.Glob(w.path("plugin/claims/*.json")); err != nil || len(paths) != 1 {
			return fmt.Errorf("records %v, %w", paths, err)
		}
		return w.classified([]*sandbox{after})
	})
	w.surviving(func(ctx context.Context) error { return w.unprepare(ctx, stays) })
	after.end()
	w.eventually(w.nothingLeft)
}

// Whatever somebody takes away while a pod runs, its containers can start again.
func TestWhatARunningPodNeedsIsKeptOrMadeAgain(t *testing.T) {
	for name, harm := range map[string]func(*world, string){
		"its claim's record is lost":       func(w *world, uid string) { w.remove("plugin/claims", uid+".json") },
		"its claim's record is corrupt":    func(w *world, uid string) { w.write("garbage", "plugin", "claims", uid+".json") },
		"its attach record is corrupt":     func(w *world, uid string) { w.corrupt("run/attached", uid+"_*") },
		"its attach record is lost":        func(w *world, uid string) { w.remove("run/attached", uid+"_*") },
		"its metadata is lost":             func(w *world, _ string) { w.remove("plugin/dra-device-metadata/default_c/nic", "metadata.json") },
		"its CDI spec is lost":             func(w *world, uid string) { w.remove("cdi", "*"+uid+"*") },
		"a stray file is among the others": func(w *world, _ string) { w.write("x", "run", "attached", "0_1-aa.json") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.start(nil)
			c := w.claim("c")
			w.must("prepare", w.prepare(t.Context(), c))
			pod := w.sandbox("p")
			w.must("attach", pod.hook(t.Context(), w.dir, c, time.Second))
			w.eventually(func() error { return w.reported(t.Context(), c, driver.ReasonAttached) })
			harm(w, string(c.UID))
			w.kill()
			w.start(nil)
			w.orphan()                                                                       // once it is gone, the collector has looked at everything twice
			if specs, err := filepath.Glob(w.path("cdi/*")); err != nil || len(specs) != 2 { // its own, and its metadata's
				t.Errorf("CDI specs: %v, %v", specs, err)
			}
			w.must("classes", w.classified([]*sandbox{pod}))
			w.must("prepare again", w.prepare(t.Context(), c))
			w.must("a container that starts again", pod.hook(t.Context(), w.dir, c, time.Second))
			if link, err := pod.link(); err != nil || link == 0 {
				t.Errorf("link %d, %v", link, err)
			}
			w.must("unprepare", w.unprepare(t.Context(), c))
			pod.end()
			w.remove("plugin/claims", "*.unreadable") // kept for whoever wants to know
			w.eventually(w.nothingLeft)
		})
	}
}

func (w *world) each(dir, pattern string, do func(path string) error) {
	w.t.Helper()
	paths, err := filepath.Glob(w.path(dir, pattern))
	for _, path := range paths {
		err = errors.Join(err, do(path))
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) remove(dir, pattern string) { w.each(dir, pattern, os.Remove) }

func (w *world) corrupt(dir, pattern string) {
	w.each(dir, pattern, func(path string) error { return os.WriteFile(path, []byte("garbage"), 0o600) })
}

// orphan leaves something that is nobody's, and waits until it is gone.
func (w *world) orphan() {
	w.t.Helper()
	path := w.write("{}", "cdi", "dra-shared.dev-share_orphan.json")
	w.eventually(func() error {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s is still there: %w", path, err)
		}
		return nil
	})
}

// A slip in the configuration must not lift the limits of pods that run.
func TestANICThatIsTakenOutOfTheConfigurationKeepsItsLimitsWhileItHasShares(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	c := w.claim("c")
	w.must("prepare", w.prepare(t.Context(), c))
	pod := w.sandbox("p")
	w.must("attach", pod.hook(t.Context(), w.dir, c, time.Second))
	w.kill()
	w.start(func(config *pluginConfig) { config.Interfaces = "another" })
	w.orphan()
	w.must("classes", w.classified([]*sandbox{pod}))
	w.eventually(func() error { return w.reported(t.Context(), c, "DeviceGone") })
	w.must("unprepare", w.unprepare(t.Context(), c))
	w.eventually(func() error {
		owned, err := shape.Owned(nstest.Find(t, "nic0").Index)
		if _, ifbErr := net.InterfaceByName(shape.IFBName("nic0")); owned || ifbErr == nil {
			err = errors.Join(err, errors.New("the NIC was not given back once it had no shares"))
		}
		return err
	})
}
