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

func (e *testEnv) path(elements ...string) string {
	return filepath.Join(append([]string{e.dir}, elements...)...)
}

func (e *testEnv) write(content string, elements ...string) string {
	e.t.Helper()
	path := e.path(elements...)
	if err := os.WriteFile(path, []byte(content), 0o700); err != nil {
		e.t.Fatal(err)
	}
	return path
}

// socket leaves a socket at which nobody listens any more.
func (e *testEnv) deadSocket(elements ...string) {
	e.t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: e.path(elements...), Net: "unix"})
	if err != nil {
		e.t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close()
}

func TestWhatBelongsToNobodyGoesAndWhatIsNotOursStays(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	c := e.claim("c")
	e.surviving(func(ctx context.Context) error { return e.prepare(ctx, c) })
	pod := e.sandbox("p")
	e.surviving(func(ctx context.Context) error { return pod.hook(ctx, e.dir, c, time.Second) })
	link, err := pod.link()
	if err != nil {
		t.Fatal(err)
	}

	// Ours, and nobody's.
	e.write("{}", "cdi", "dra-shared.dev-share_00000000-0000-0000-0000-000000000000.json")
	e.write("half", "cdi", "dra-shared.dev-share_1.json.writing")
	e.write("half", "plugin", "claims", "x.json.writing")
	e.write("half", "run", "attached", "x.json.writing")
	e.write("old", "hook", "dra-shared-hook-0123456789abcdef")
	e.deadSocket("run", "attach.d", "gone.sock")
	e.deadSocket("registry", "dra-shared.dev-gone-reg.sock")
	e.deadSocket("plugin", "dra-gone.sock")
	e.orphansInKernel()
	// Somebody else's.
	theirs := []string{
		e.write("{}", "cdi", "other.example-share_1.json"), e.write("x", "cdi", "dra-shared.dev.json"),
		e.write("x", "hook", "another"), e.write("x", "registry", "other.example-reg.sock"),
	}
	other := netlink.NewLinkAttrs()
	other.Name = "ifb-other"
	if err := netlink.LinkAdd(&netlink.Ifb{LinkAttrs: other}); err != nil {
		t.Fatal(err)
	}

	e.eventually(func() error {
		for _, pattern := range []string{"cdi/dra-shared.dev-share_[01]*", "*/*.writing", "*/*/*.writing", "hook/dra-shared-hook-0123*", "*/*gone*", "*/*/*gone*"} {
			left, err := filepath.Glob(e.path(pattern))
			if err != nil || len(left) > 0 && !strings.Contains(left[0], string(c.UID)) {
				return fmt.Errorf("left: %v, %w", left, err)
			}
		}
		if _, err := net.InterfaceByName("ifb-nobody"); err == nil {
			return fmt.Errorf("ifb-nobody is left")
		}
		return e.classified([]*sandbox{pod})
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
	log, err := os.ReadFile(e.path("log"))
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
func (e *testEnv) orphansInKernel() {
	e.t.Helper()
	nic := nstest.FindNIC(e.t, "nic0").Index
	ifb, err := net.InterfaceByName(shape.IFBName("nic0"))
	if err != nil {
		e.t.Fatal(err)
	}
	conn, err := rtnl.Open()
	if err != nil {
		e.t.Fatal(err)
	}
	defer conn.Close()
	shaper := shape.New(conn, nil)
	if err := shaper.SetClass(nic, ifb.Index, shape.NICRates{Line: 10e9}, 0xcf0, shape.Rates{Floor: 1e6, Ceil: 1e6}); err != nil {
		e.t.Fatal(err)
	}
	classifier, err := classify.Open(e.bpffs, nil)
	if err != nil {
		e.t.Fatal(err)
	}
	defer classifier.Close()
	if err := classifier.AddMember(classify.Member{Parent: nic, Cookie: 99, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 0x99}}, 0xd5acf0); err != nil {
		e.t.Fatal(err)
	}
	gone := netlink.NewLinkAttrs()
	gone.Name = "nobody"
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: gone}); err != nil {
		e.t.Fatal(err)
	}
	link, err := netlink.LinkByName("nobody")
	if err != nil {
		e.t.Fatal(err)
	}
	if _, err := shaper.Setup("nobody", link.Attrs().Index, shape.NICRates{Line: 1e9}, true); err != nil {
		e.t.Fatal(err)
	}
	if err := netlink.LinkDel(link); err != nil {
		e.t.Fatal(err)
	}
}

// The kubelet has lost its state: nobody will ever unprepare.
func TestAClaimThatIsGoneIsUnpreparedOnceNoPodHasIt(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	gone, running, reallocated := e.claim("gone"), e.claim("running"), e.claim("reallocated")
	e.surviving(func(ctx context.Context) error { return e.prepare(ctx, gone, running, reallocated) })
	pod := e.sandbox("p")
	e.surviving(func(ctx context.Context) error { return pod.hook(ctx, e.dir, running, time.Second) })
	api := e.api.Client.ResourceV1().ResourceClaims(namespace)
	for _, name := range []string{"gone", "running"} { // both by force
		if err := api.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	e.claim("gone") // and one of that name is made anew
	reallocated.Status.Allocation = nil
	if _, err := api.UpdateStatus(t.Context(), reallocated, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	records := func() (names []string) {
		paths, err := filepath.Glob(e.path("plugin/claims/*.json"))
		if err != nil {
			t.Fatal(err)
		}
		return paths
	}
	e.eventually(func() error {
		if r := records(); len(r) != 1 || !strings.Contains(r[0], string(running.UID)) {
			return fmt.Errorf("records: %v, want that of %s alone", r, running.UID)
		}
		return nil
	})
	if link, err := pod.link(); err != nil || link == 0 {
		t.Errorf("the pod that runs has lost its link: %v", err)
	}
	pod.end()
	e.eventually(e.nothingLeft)
}

// What was in the kernel before a boot is not there after it; what was on disk is.
func TestAfterARebootNothingOfBeforeIsTrusted(t *testing.T) {
	e := newTestEnv(t)
	boot := e.write("first boot", "boot")
	of := func(c *pluginConfig) { c.BootIDFile = boot }
	e.start(of)
	stays, gone := e.claim("stays"), e.claim("gone")
	e.surviving(func(ctx context.Context) error { return e.prepare(ctx, stays, gone) })
	before := e.sandbox("before")
	e.surviving(func(ctx context.Context) error { return before.hook(ctx, e.dir, stays, time.Second) })
	e.eventually(func() error { return e.reported(t.Context(), stays, driver.ReasonAttached) })

	e.kill()
	before.end()
	e.asNew()
	specs, err := filepath.Glob(e.path("cdi/*")) // on a tmpfs
	if err != nil || len(specs) != 4 {
		t.Fatal(specs, err)
	}
	for _, s := range specs {
		if err := os.Remove(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.api.Client.ResourceV1().ResourceClaims(namespace).Delete(t.Context(), "gone", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	e.write("second boot", "boot")
	e.start(of)
	if err := e.attachedPods(0); err != nil {
		t.Errorf("attach records of another boot: %v", err)
	}
	e.surviving(func(ctx context.Context) error { return e.prepare(ctx, stays) })
	if specs, err := filepath.Glob(e.path("cdi/*")); err != nil || len(specs) != 2 { // its own, and its metadata's
		t.Errorf("CDI specs after prepare: %v, %v", specs, err)
	}
	raw, err := os.ReadFile(e.path("plugin/claims", string(stays.UID)+".json"))
	if err != nil || !strings.Contains(string(raw), "second boot") {
		t.Errorf("the record is %s, %v", raw, err)
	}
	after := e.sandbox("after")
	e.surviving(func(ctx context.Context) error { return after.hook(ctx, e.dir, stays, time.Second) })
	e.eventually(func() error {
		if paths, err := filepath.Glob(e.path("plugin/claims/*.json")); err != nil || len(paths) != 1 {
			return fmt.Errorf("records %v, %w", paths, err)
		}
		return e.classified([]*sandbox{after})
	})
	e.surviving(func(ctx context.Context) error { return e.unprepare(ctx, stays) })
	after.end()
	e.eventually(e.nothingLeft)
}

// Whatever somebody takes away while a pod runs, its containers can start again.
func TestWhatARunningPodNeedsIsKeptOrMadeAgain(t *testing.T) {
	for name, harm := range map[string]func(*testEnv, string){
		"its claim's record is lost":       func(e *testEnv, uid string) { e.remove("plugin/claims", uid+".json") },
		"its claim's record is corrupt":    func(e *testEnv, uid string) { e.write("garbage", "plugin", "claims", uid+".json") },
		"its attach record is corrupt":     func(e *testEnv, uid string) { e.corrupt("run/attached", uid+"_*") },
		"its attach record is lost":        func(e *testEnv, uid string) { e.remove("run/attached", uid+"_*") },
		"its metadata is lost":             func(e *testEnv, _ string) { e.remove("plugin/dra-device-metadata/default_c/nic", "metadata.json") },
		"its CDI spec is lost":             func(e *testEnv, uid string) { e.remove("cdi", "*"+uid+"*") },
		"a stray file is among the others": func(e *testEnv, _ string) { e.write("x", "run", "attached", "0_1-aa.json") },
	} {
		t.Run(name, func(t *testing.T) {
			e := newTestEnv(t)
			e.start(nil)
			c := e.claim("c")
			e.must("prepare", e.prepare(t.Context(), c))
			pod := e.sandbox("p")
			e.must("attach", pod.hook(t.Context(), e.dir, c, time.Second))
			e.eventually(func() error { return e.reported(t.Context(), c, driver.ReasonAttached) })
			harm(e, string(c.UID))
			e.kill()
			e.start(nil)
			e.orphan()                                                                       // once it is gone, the collector has looked at everything twice
			if specs, err := filepath.Glob(e.path("cdi/*")); err != nil || len(specs) != 2 { // its own, and its metadata's
				t.Errorf("CDI specs: %v, %v", specs, err)
			}
			e.must("classes", e.classified([]*sandbox{pod}))
			e.must("prepare again", e.prepare(t.Context(), c))
			e.must("a container that starts again", pod.hook(t.Context(), e.dir, c, time.Second))
			if link, err := pod.link(); err != nil || link == 0 {
				t.Errorf("link %d, %v", link, err)
			}
			e.must("unprepare", e.unprepare(t.Context(), c))
			pod.end()
			e.remove("plugin/claims", "*.unreadable") // kept for whoever wants to know
			e.eventually(e.nothingLeft)
		})
	}
}

func (e *testEnv) each(dir, pattern string, do func(path string) error) {
	e.t.Helper()
	paths, err := filepath.Glob(e.path(dir, pattern))
	for _, path := range paths {
		err = errors.Join(err, do(path))
	}
	if err != nil {
		e.t.Fatal(err)
	}
}

func (e *testEnv) remove(dir, pattern string) { e.each(dir, pattern, os.Remove) }

func (e *testEnv) corrupt(dir, pattern string) {
	e.each(dir, pattern, func(path string) error { return os.WriteFile(path, []byte("garbage"), 0o600) })
}

// orphan leaves something that is nobody's, and waits until it is gone.
func (e *testEnv) orphan() {
	e.t.Helper()
	path := e.write("{}", "cdi", "dra-shared.dev-share_orphan.json")
	e.eventually(func() error {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s is still there: %w", path, err)
		}
		return nil
	})
}

// A slip in the configuration must not lift the limits of pods that run.
func TestANICThatIsTakenOutOfTheConfigurationKeepsItsLimitsWhileItHasShares(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	c := e.claim("c")
	e.must("prepare", e.prepare(t.Context(), c))
	pod := e.sandbox("p")
	e.must("attach", pod.hook(t.Context(), e.dir, c, time.Second))
	e.kill()
	e.start(func(config *pluginConfig) { config.Interfaces = "another" })
	e.orphan()
	e.must("classes", e.classified([]*sandbox{pod}))
	e.eventually(func() error { return e.reported(t.Context(), c, "DeviceGone") })
	e.must("unprepare", e.unprepare(t.Context(), c))
	e.eventually(func() error {
		owned, err := shape.Owned(nstest.FindNIC(t, "nic0").Index)
		if _, ifbErr := net.InterfaceByName(shape.IFBName("nic0")); owned || ifbErr == nil {
			err = errors.Join(err, errors.New("the NIC was not given back once it had no shares"))
		}
		return err
	})
}
