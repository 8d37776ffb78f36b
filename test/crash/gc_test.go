// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// write writes a file below the node's directory and returns its path.
func (e *testEnv) write(content string, elements ...string) string {
	e.t.Helper()
	path := e.path(elements...)
	if err := os.WriteFile(path, []byte(content), 0o700); err != nil {
		e.t.Fatal(err)
	}
	return path
}

// writeDeadSocket creates a socket that no process listens on.
func (e *testEnv) writeDeadSocket(elements ...string) {
	e.t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: e.path(elements...), Net: "unix"})
	if err != nil {
		e.t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		e.t.Fatal(err)
	}
}

// prepareAndAttach prepares a claim and attaches it to a new pod.
func (e *testEnv) prepareAndAttach(c *resourceapi.ResourceClaim, pod string) *sandbox {
	e.t.Helper()
	e.retry("prepare claim "+c.Name, func(ctx context.Context) error { return e.prepare(ctx, c) })
	s := e.sandbox(pod)
	e.retry("attach claim "+c.Name+" to pod "+pod, func(ctx context.Context) error {
		return s.hook(ctx, e.dir, c, time.Second)
	})
	return s
}

func TestGC_removesOrphansAndKeepsForeignObjects(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	c := e.claim("c")
	pod := e.prepareAndAttach(c, "p")
	link := pod.mustLink(t)

	orphans := []string{
		e.write("{}", "cdi", "dra-shared.dev-share_00000000-0000-0000-0000-000000000000.json"),
		e.write("half", "cdi", "dra-shared.dev-share_1.json.writing"),
		e.write("half", "plugin", "claims", "x.json.writing"),
		e.write("half", "run", "attached", "x.json.writing"),
		e.write("old", "hook", "dra-shared-hook-0123456789abcdef"),
	}
	for _, socket := range []string{
		"run/attach.d/gone.sock", "registry/dra-shared.dev-gone-reg.sock", "plugin/dra-gone.sock",
	} {
		e.writeDeadSocket(socket)
		orphans = append(orphans, e.path(socket))
	}
	e.createKernelOrphans()
	foreign := []string{
		e.write("{}", "cdi", "other.example-share_1.json"), e.write("x", "cdi", "dra-shared.dev.json"),
		e.write("x", "hook", "another"), e.write("x", "registry", "other.example-reg.sock"),
	}
	attributes := netlink.NewLinkAttrs()
	attributes.Name = "ifb-other"
	if err := netlink.LinkAdd(&netlink.Ifb{LinkAttrs: attributes}); err != nil {
		t.Fatal(err)
	}

	e.eventually("the plugin has removed all orphans", func() error {
		for _, path := range orphans {
			if err := checkRemoved(path); err != nil {
				return err
			}
		}
		exists, err := linkExists("ifb-removed0")
		if err == nil && exists {
			err = errors.New("IFB device ifb-removed0 exists")
		}
		return errors.Join(err, e.enforced(pod))
	})
	for _, path := range foreign {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("the plugin removed a file of another program: %v", err)
		}
	}
	if exists, err := linkExists("ifb-other"); err != nil || !exists {
		t.Errorf("the plugin removed IFB device ifb-other of another program: %v", err)
	}
	if now, err := pod.link(); err != nil || now != link {
		t.Errorf("link of the running pod: got index %d and error %v, want %d", now, err, link)
	}
	log, err := os.ReadFile(e.path("log"))
	if err != nil {
		t.Fatal(err)
	}
	for _, orphan := range []string{
		"CDI spec of claim 00000000", "hook-0123456789abcdef", "class cf0 of NIC nic0",
		"classification of 02:00:00:00:00:99", "IFB device ifb-removed0", "attach.d/gone.sock",
	} {
		if !strings.Contains(string(log), orphan) {
			t.Errorf("the plugin's log does not name the removed %s", orphan)
		}
	}
}

// linkExists reports whether a network interface of the node exists.
func linkExists(name string) (bool, error) {
	links, err := net.Interfaces()
	return slices.ContainsFunc(links, func(l net.Interface) bool { return l.Name == name }), err
}

// createKernelOrphans creates a class, a classifier entry, and an IFB device
// that no claim uses.
func (e *testEnv) createKernelOrphans() {
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
	rates := shape.Rates{Floor: 1e6, Ceil: 1e6}
	if err := shaper.SetClass(nic, ifb.Index, shape.OneTree, shape.NICRates{Line: 10e9}, 0xcf0, rates); err != nil {
		e.t.Fatal(err)
	}
	classifier, err := classify.Open(e.bpffs, nil, classify.AttachClsact, classify.KeyMAC)
	if err != nil {
		e.t.Fatal(err)
	}
	defer classifier.Close()
	member := classify.Member{Parent: nic, Cookie: 99, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 0x99}}
	if err := classifier.AddMember(member, 0xd5acf0); err != nil {
		e.t.Fatal(err)
	}
	// The IFB device outlives the NIC that it was created for.
	attributes := netlink.NewLinkAttrs()
	attributes.Name = "removed0"
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attributes}); err != nil {
		e.t.Fatal(err)
	}
	link, err := netlink.LinkByName("removed0")
	if err != nil {
		e.t.Fatal(err)
	}
	if _, err := shaper.Setup("removed0", link.Attrs().Index, shape.OneTree, shape.NICRates{Line: 1e9}, true); err != nil {
		e.t.Fatal(err)
	}
	if exists, err := linkExists("ifb-removed0"); err != nil || !exists {
		e.t.Fatalf("IFB device ifb-removed0 was not created: %v", err)
	}
	if err := netlink.LinkDel(link); err != nil {
		e.t.Fatal(err)
	}
}

// A kubelet that has lost its state never unprepares its earlier claims.
func TestGC_unpreparesDeletedClaimWithoutPods(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	gone, running, reallocated := e.claim("gone"), e.claim("running"), e.claim("reallocated")
	e.retry("prepare three claims", func(ctx context.Context) error { return e.prepare(ctx, gone, running, reallocated) })
	pod := e.prepareAndAttach(running, "p")
	e.deleteClaim("gone")
	e.deleteClaim("running") // by force: its pod runs
	e.claim("gone")          // another claim of the same name
	reallocated.Status.Allocation = nil
	claims := e.api.Client.ResourceV1().ResourceClaims(namespace)
	if _, err := claims.UpdateStatus(t.Context(), reallocated, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	e.eventually("only the claim of the running pod has a claim record", func() error {
		paths, err := filepath.Glob(e.path("plugin/claims/*.json"))
		if err != nil {
			return err
		}
		if len(paths) != 1 || !strings.Contains(paths[0], string(running.UID)) {
			return fmt.Errorf("claim records %v, want that of claim %s only", paths, running.UID)
		}
		return nil
	})
	pod.mustLink(t)
	pod.end()
	e.eventually("the node has no state of claims", e.nothingLeft)
}

// After a boot the files on disk describe kernel state that no longer exists.
func TestPlugin_discardsStateOfPreviousBoot(t *testing.T) {
	e := newTestEnv(t)
	boot := e.write("first boot", "boot")
	withBootID := func(c *pluginConfig) { c.BootIDFile = boot }
	e.start(withBootID)
	kept, gone := e.claim("stays"), e.claim("gone")
	e.retry("prepare claim gone", func(ctx context.Context) error { return e.prepare(ctx, gone) })
	before := e.prepareAndAttach(kept, "before")
	e.awaitReason(kept, v1alpha1.ReasonAttached)

	e.kill()
	before.end()
	e.resetNode()
	e.removeCDISpecs(4) // they are on a tmpfs: two for each claim
	e.deleteClaim("gone")
	e.write("second boot", "boot")
	e.start(withBootID)
	if err := e.attachedPods(0); err != nil {
		t.Errorf("attachment records of the previous boot: %v", err)
	}
	e.retry("prepare the claim again", func(ctx context.Context) error { return e.prepare(ctx, kept) })
	e.checkCDISpecs()
	raw, err := os.ReadFile(e.path("plugin/claims", string(kept.UID)+".json"))
	if err != nil || !strings.Contains(string(raw), "second boot") {
		t.Errorf("claim record after the boot: got %s and error %v, want boot ID %q", raw, err, "second boot")
	}
	after := e.prepareAndAttach(kept, "after")
	e.eventually("one claim is prepared and enforced", func() error {
		paths, err := filepath.Glob(e.path("plugin/claims/*.json"))
		if err == nil && len(paths) != 1 {
			err = fmt.Errorf("claim records %v, want one", paths)
		}
		return errors.Join(err, e.enforced(after))
	})
	e.retry("unprepare the claim", func(ctx context.Context) error { return e.unprepare(ctx, kept) })
	after.end()
	e.eventually("the node has no state of claims", e.nothingLeft)
}

// removeCDISpecs removes all CDI specs. There must be want of them.
func (e *testEnv) removeCDISpecs(want int) {
	e.t.Helper()
	specs, err := filepath.Glob(e.path("cdi/*"))
	if err != nil || len(specs) != want {
		e.t.Fatalf("got CDI specs %v and error %v, want %d specs", specs, err, want)
	}
	for _, s := range specs {
		if err := os.Remove(s); err != nil {
			e.t.Fatal(err)
		}
	}
}

// checkCDISpecs checks that the CDI specs belong to one claim: its own and
// its metadata's.
func (e *testEnv) checkCDISpecs() {
	e.t.Helper()
	if specs, err := filepath.Glob(e.path("cdi/*")); err != nil || len(specs) != 2 {
		e.t.Errorf("got CDI specs %v and error %v, want two", specs, err)
	}
}

// Containers of a running pod can start again after the loss or corruption of
// any file of its claim.
func TestPlugin_restoresFilesOfRunningPod(t *testing.T) {
	for name, damage := range map[string]func(e *testEnv, uid string){
		"the claim record is lost":            func(e *testEnv, uid string) { e.remove("plugin/claims", uid+".json") },
		"the claim record is corrupt":         func(e *testEnv, uid string) { e.corrupt("plugin/claims", uid+".json") },
		"the attachment record is corrupt":    func(e *testEnv, uid string) { e.corrupt("run/attached", uid+"_*") },
		"the attachment record is lost":       func(e *testEnv, uid string) { e.remove("run/attached", uid+"_*") },
		"the metadata is lost":                func(e *testEnv, _ string) { e.remove(metadataDir, "*.json") },
		"the CDI specs are lost":              func(e *testEnv, uid string) { e.remove("cdi", "*"+uid+"*") },
		"a foreign file is among the records": func(e *testEnv, _ string) { e.write("x", "run", "attached", "0_1-aa.json") },
	} {
		t.Run(name, func(t *testing.T) {
			e := newTestEnv(t)
			e.start(nil)
			c := e.claim("c")
			pod := e.prepareAndAttach(c, "p")
			e.awaitReason(c, v1alpha1.ReasonAttached)
			damage(e, string(c.UID))
			e.kill()
			e.start(nil)
			e.awaitCollection()
			e.checkCDISpecs()
			e.must("check enforcement", e.enforced(pod))
			e.must("prepare the claim again", e.prepare(t.Context(), c))
			e.must("start another container of the pod", pod.hook(t.Context(), e.dir, c, time.Second))
			pod.mustLink(t)
			e.must("unprepare the claim", e.unprepare(t.Context(), c))
			pod.end()
			for _, path := range e.glob("plugin/claims", "*.unreadable") { // kept for inspection
				if err := os.Remove(path); err != nil {
					t.Error(err)
				}
			}
			e.eventually("the node has no state of claims", e.nothingLeft)
		})
	}
}

// metadataDir has the metadata of request nic of claim default/c.
const metadataDir = "plugin/dra-device-metadata/default_c/nic"

func (e *testEnv) glob(dir, pattern string) []string {
	e.t.Helper()
	paths, err := filepath.Glob(e.path(dir, pattern))
	if err != nil {
		e.t.Fatal(err)
	}
	return paths
}

// mustGlob returns the files that match the pattern. There must be at least one.
func (e *testEnv) mustGlob(dir, pattern string) []string {
	e.t.Helper()
	paths := e.glob(dir, pattern)
	if len(paths) == 0 {
		e.t.Fatalf("no file in %s matches %s: has its name changed?", dir, pattern)
	}
	return paths
}

// remove removes the files that match the pattern.
func (e *testEnv) remove(dir, pattern string) {
	e.t.Helper()
	for _, path := range e.mustGlob(dir, pattern) {
		if err := os.Remove(path); err != nil {
			e.t.Fatal(err)
		}
	}
}

// corrupt overwrites the files that match the pattern.
func (e *testEnv) corrupt(dir, pattern string) {
	e.t.Helper()
	for _, path := range e.mustGlob(dir, pattern) {
		if err := os.WriteFile(path, []byte("garbage"), 0o600); err != nil {
			e.t.Fatal(err)
		}
	}
}

// awaitCollection writes an orphan and waits until the plugin has removed it. The
// garbage collector has then run twice.
func (e *testEnv) awaitCollection() {
	e.t.Helper()
	path := e.write("{}", "cdi", "dra-shared.dev-share_orphan.json")
	e.eventually("the plugin has removed an orphan", func() error { return checkRemoved(path) })
}

// checkRemoved returns an error unless the file does not exist.
func checkRemoved(path string) error {
	_, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = fmt.Errorf("%s exists", path)
	}
	return err
}

// A mistake in the configuration must not lift the limits of running pods.
func TestPlugin_keepsEnforcementOnUnconfiguredNIC(t *testing.T) {
	e := newTestEnv(t)
	e.start(nil)
	c := e.claim("c")
	pod := e.prepareAndAttach(c, "p")
	e.kill()
	e.start(func(config *pluginConfig) { config.Interfaces = "another" })
	e.awaitCollection()
	e.must("check enforcement", e.enforced(pod))
	e.awaitReason(c, "DeviceGone")
	e.must("unprepare the claim", e.unprepare(t.Context(), c))
	conn, err := rtnl.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	e.eventually("the NIC without shares has neither queues nor an IFB device", func() error {
		owned, err := shape.New(conn, nil).Owned(nstest.FindNIC(t, "nic0").Index)
		exists, linkErr := linkExists(shape.IFBName("nic0"))
		if err = errors.Join(err, linkErr); err == nil && (owned || exists) {
			err = fmt.Errorf("nic0 has queues of the driver: %t, an IFB device: %t", owned, exists)
		}
		return err
	})
}

// A link for monitoring was attached without enforcement, which the administrator then turns on. The programs must
// know the link: they would drop all its frames.
func TestPlugin_identifiesAdminLinkWhenEnforcementStarts(t *testing.T) {
	e := newTestEnv(t)
	e.way = e.strongest()
	e.start(func(c *pluginConfig) { c.Enforcement = "None" })
	claim := newClaim("monitor")
	devices := &claim.Status.Allocation.Devices
	devices.Results[0].AdminAccess = ptr.To(true)
	devices.Config = []resourceapi.DeviceAllocationConfiguration{{
		Source: resourceapi.AllocationConfigSourceClaim,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driverName, Parameters: runtime.RawExtension{Raw: []byte(`{"apiVersion": "dra-shared.dev/v1alpha1", ` +
				`"kind": "NetworkAttachment", "adminLink": true}`)},
		}},
	}}
	e.addClaim(claim)
	e.must("prepare the claim", e.prepare(t.Context(), claim))
	e.must("attach the claim", e.sandbox("monitor").hook(t.Context(), e.dir, claim, timeout))
	e.kill()
	e.start(nil)
	e.eventually("the programs know the link", func() error {
		classifier, err := classify.Open(e.bpffs, nil, classify.AttachClsact, classify.KeyMAC)
		if err != nil {
			return err
		}
		defer classifier.Close()
		members, err := classifier.Members()
		if err == nil && len(members) != 1 {
			err = fmt.Errorf("they know %v", members)
		}
		return err
	})
}
