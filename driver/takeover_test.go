// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/attach/install"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/probe"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// successor is a plugin that starts while another runs.
type successor struct {
	*plugin
	started chan error
	events  *events.FakeRecorder
}

// succeed starts a plugin with another configuration on the node of p.
func (p *plugin) succeed(networks string, wrap func(driver.Kind) driver.Kind) *successor {
	p.t.Helper()
	s := &successor{
		plugin:  &plugin{t: p.t, dir: p.dir, client: p.client, options: p.options, sysfs: p.sysfs, wrap: wrap},
		started: make(chan error, 1),
		events:  events.NewFakeRecorder(100),
	}
	s.options.Instance, s.options.Events, s.options.Metrics = "2", s.events, nil
	node := s.build(networks)
	_, ctx := ktesting.NewTestContext(p.t)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		wait, err := s.Start(ctx)
		s.started <- err
		if err == nil {
			err = wait()
		}
		ended <- err
	}()
	p.t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-ended, node.Close()); err != nil {
			p.t.Error(err)
		}
	})
	return s
}

// wantEvent waits for an event that contains text.
func (s *successor) wantEvent(text string) {
	s.t.Helper()
	wantEvent(s.t, s.events, text)
}

func wantEvent(t *testing.T, recorder *events.FakeRecorder, text string) {
	t.Helper()
	expired := time.After(timeout)
	for {
		select {
		case e := <-recorder.Events:
			if strings.Contains(e, text) {
				return
			}
		case <-expired:
			t.Fatalf("no event contains %q", text)
		}
	}
}

func wantFailure(err error, text string) error {
	if err == nil {
		return fmt.Errorf("got no error, want one with %q", text)
	}
	if !strings.Contains(err.Error(), text) {
		return fmt.Errorf("got an error without %q: %w", text, err)
	}
	return nil
}

const network = "{name: storage, bandwidth: 1G, enforcement: None, "

func TestTakeover_newPluginServesLess(t *testing.T) {
	for name, c := range map[string]struct{ networks, want string }{
		"no interface matches": {
			"[" + network + "interfaces: [nic9]}]",
			`network "storage" matches no NIC of this node, but the running plugin shares nic0 in it`,
		},
		"the NIC is not usable": {
			"[{name: storage, interfaces: [nic0], bandwidth: 1G}]",
			"NIC nic0 cannot be shared: no BPF file system is mounted",
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlugin(t)
			eventually.Eventually(t, timeout, "nic0 is published", p.published)
			s := p.succeed(c.networks, nil)
			eventually.Eventually(t, timeout, "the plugin waits", func() error {
				return wantFailure(s.healthy(probe.Ready), c.want)
			})
			for _, check := range []string{probe.Started, probe.Alive} {
				if err := s.healthy(check); err != nil {
					t.Errorf("%s: %v; the kubelet must not restart a plugin that waits", check, err)
				}
			}
			s.wantEvent("Warning HandoverRefused")
			if _, err := os.Stat(filepath.Join(attach.SocketDir(p.options.RunDir), "2.sock")); err == nil {
				t.Error("the plugin that waits serves hooks")
			}
			p.mustPrepare(p.claim("c", "10M", ""))
			if err := p.published(); err != nil {
				t.Error(err)
			}
			p.stop() // no predecessor remains that serves more
			if err := <-s.started; err != nil {
				t.Fatal(err)
			}
			s.wantEvent("Normal HandoverCompleted")
		})
	}
}

// A file is in place of the hook's directory until the new plugin has reported that.
func TestTakeover_hookCannotBeInstalledAtFirst(t *testing.T) {
	p := newPlugin(t)
	p.options.Installation = p.installation()
	dir := filepath.Dir(p.options.Installation.Path())
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s := p.succeed("["+network+"interfaces: [nic0]}]", nil)
	s.wantEvent("Warning HookMissing")
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	p.stop() // the new plugin tries again
	if err := <-s.started; err != nil {
		t.Fatal(err)
	}
	s.wantEvent("Normal HookInstalled")
}

// The directory of the hook cannot be used for a while, and then has the hook as before.
func TestHook_temporarilyMissing(t *testing.T) {
	p := newPlugin(t)
	p.stop()
	recorder := events.NewFakeRecorder(100)
	p.options.Installation, p.options.Events = p.installation(), recorder
	p.start()
	dir := filepath.Dir(p.options.Installation.Path())
	file := dir + ".file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	exchange := func() {
		t.Helper()
		if err := unix.Renameat2(unix.AT_FDCWD, file, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE); err != nil {
			t.Fatal(err)
		}
	}
	exchange()
	if p.EnsureHook(t.Context()) {
		t.Error("the plugin installed the hook in a file")
	}
	wantEvent(t, recorder, "Warning HookMissing")
	exchange()
	if p.EnsureHook(t.Context()) {
		t.Error("the plugin installed a hook that was present")
	}
	wantEvent(t, recorder, "Normal HookInstalled")
}

// uselessKind passes the check before it changes the node, but not the one afterward.
type uselessKind struct {
	driver.Kind
	rechecks atomic.Int32
}

func (*uselessKind) CheckTakeover(context.Context, []resourceapi.Device) error { return nil }

func (k *uselessKind) RecheckTakeover([]resourceapi.Device) error {
	k.rechecks.Add(1)
	return errors.New("nic0 cannot be set up")
}

func TestTakeover_newPluginFailsToSetUpNIC(t *testing.T) {
	p := newPlugin(t)
	eventually.Eventually(t, timeout, "nic0 is published", p.published)
	useless := &uselessKind{}
	s := p.succeed("["+network+"interfaces: [nic0]}]", func(k driver.Kind) driver.Kind {
		useless.Kind = k
		return useless
	})
	eventually.Eventually(t, timeout, "the plugin waits", func() error {
		return wantFailure(s.healthy(probe.Ready), "nic0 cannot be set up")
	})
	s.wantEvent("Warning HandoverRefused")
	p.mustPrepare(p.claim("c", "10M", ""))
	p.stop() // the new plugin tries again, and has no predecessor
	if err := <-s.started; err != nil {
		t.Fatal(err)
	}
	if n := useless.rechecks.Load(); n != 1 {
		t.Errorf("the plugin changed the node and was refused %d times, want once", n)
	}
}

// brokenKind cannot set up devices until it is repaired.
type brokenKind struct {
	driver.Kind
	repaired atomic.Bool
	refused  atomic.Int32
}

func (*brokenKind) CheckTakeover(context.Context, []resourceapi.Device) error { return nil }

func (*brokenKind) RecheckTakeover([]resourceapi.Device) error { return nil }

func (k *brokenKind) Refresh(ctx context.Context, shares []record.Share) (driver.Refreshed, error) {
	if !k.repaired.Load() {
		k.refused.Add(1)
		return driver.Refreshed{}, errors.New("list links: interrupted")
	}
	return k.Kind.Refresh(ctx, shares)
}

// A plugin that fails after changing the node waits, so that it does not change the node at each restart of its
// container. Without a predecessor, it ends, and the kubelet restarts it.
func TestTakeover_newPluginFailsToListDevices(t *testing.T) {
	p := newPlugin(t)
	eventually.Eventually(t, timeout, "nic0 is published", p.published)
	broken := &brokenKind{}
	wrap := func(k driver.Kind) driver.Kind {
		broken.Kind = k
		return broken
	}
	s := p.succeed("["+network+"interfaces: [nic0]}]", wrap)
	eventually.Eventually(t, timeout, "the plugin waits", func() error {
		return wantFailure(s.healthy(probe.Ready), "list links: interrupted")
	})
	s.wantEvent("Warning HandoverRefused")
	p.mustPrepare(p.claim("c", "10M", ""))
	if n := broken.refused.Load(); n != 1 {
		t.Errorf("the plugin changed the node %d times, want once", n)
	}
	broken.repaired.Store(true)
	p.stop() // the new plugin tries again
	if err := <-s.started; err != nil {
		t.Fatal(err)
	}
}

func TestDriver_Start_failsToListDevices(t *testing.T) {
	p := newPlugin(t)
	p.stop()
	p.wrap = func(k driver.Kind) driver.Kind { return &brokenKind{Kind: k} }
	node := p.build("[" + network + "interfaces: [nic0]}]")
	_, err := p.Start(t.Context())
	if err := errors.Join(wantFailure(err, "list links: interrupted"), node.Close()); err != nil {
		t.Error(err)
	}
}

func TestTakeover_newPluginServesAsMuch(t *testing.T) {
	for name, networks := range map[string]string{
		"the same":        "[" + network + "interfaces: [nic0]}]",
		"another pattern": "[" + network + `interfaces: ["nic*"]}]`,
		"a further one without NICs": "[" + network + "interfaces: [nic0]}, " +
			"{name: other, interfaces: [nic9], bandwidth: 1G}]",
		"removed on purpose": "[{name: other, interfaces: [nic9], bandwidth: 1G}]",
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlugin(t)
			eventually.Eventually(t, timeout, "nic0 is published", p.published)
			s := p.succeed(networks, nil)
			if err := <-s.started; err != nil {
				t.Fatal(err)
			}
		})
	}
}

// A plugin without predecessor serves the NICs that it can share. It is ready if it
// can share at least one, or if the node has none of the configured NICs.
func TestReadiness_withoutPredecessor(t *testing.T) {
	const unusable = "{name: a, interfaces: [nic0], bandwidth: 1G}"
	for name, c := range map[string]struct{ networks, want string }{
		"no NIC matches":   {"[{name: a, interfaces: [nic9], bandwidth: 1G}]", ""},
		"no NIC is usable": {"[" + unusable + "]", "set plugin.mountBPFFS in the chart's values"},
		"one is usable":    {"[" + unusable + ", {name: b, interfaces: [nic1], bandwidth: 1G, enforcement: None}]", ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlugin(t)
			p.stop()
			if c.want == "" {
				nstest.NIC(t, "nic1", 9000)
			}
			recorder, registry := events.NewFakeRecorder(100), prometheus.NewRegistry()
			p.options.Events, p.options.Metrics = recorder, registry
			p.startWith(c.networks)
			p.register()
			eventually.Eventually(t, timeout, "the probe succeeds", func() error { return p.healthy(probe.Started) })
			p.awaitReadiness(c.want)
			if !strings.Contains(c.networks, unusable) {
				return
			}
			wantEvent(t, recorder, "Warning DeviceUnusable cannot share nic0: no BPF file system is mounted")
			if got := metric(t, registry, "dra_shared_device_unusable"); got != 1 {
				t.Errorf("dra_shared_device_unusable: got %v, want 1", got)
			}
		})
	}
}

// metric returns the value of the only gauge of a name.
func metric(t *testing.T, registry *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.Metric[0].GetGauge().GetValue()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// installation returns an installation of a hook that does nothing.
func (p *plugin) installation() *install.Installation {
	p.t.Helper()
	source := filepath.Join(p.dir, "hook-source")
	if err := os.WriteFile(source, []byte("#!/bin/sh\n"), 0o600); err != nil {
		p.t.Fatal(err)
	}
	installation, err := install.New(source, filepath.Join(p.dir, "hook"), "", nil)
	if err != nil {
		p.t.Fatal(err)
	}
	return installation
}

func TestHook_removed(t *testing.T) {
	p := newPlugin(t)
	p.stop()
	recorder := events.NewFakeRecorder(100)
	p.options.Installation, p.options.Events = p.installation(), recorder
	p.start()
	p.register()
	eventually.Eventually(t, timeout, "the probe succeeds", func() error { return p.healthy(probe.Ready) })
	for i, path := range []string{p.options.Installation.Path(), filepath.Dir(p.options.Installation.Path())} {
		if err := os.Rename(path, fmt.Sprintf("%s/removed-%d", p.dir, i)); err != nil {
			t.Fatal(err)
		}
		eventually.Eventually(t, timeout, "the hook is installed", p.options.Installation.Check)
		wantEvent(t, recorder, "Warning HookMissing")
		wantEvent(t, recorder, "Normal HookInstalled")
	}
	// It cannot be installed again: a file is in place of the directory. They change places
	// at once, because the plugin would create the directory again in between.
	dir := filepath.Dir(p.options.Installation.Path())
	file := dir + ".file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Renameat2(unix.AT_FDCWD, file, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE); err != nil {
		t.Fatal(err)
	}
	if err := wantFailure(p.healthy(probe.Ready), "the hook is missing"); err != nil {
		t.Error(err)
	}
}

// Another program removes the hook of an earlier release, which the specs of its claims name.
func TestHook_hookOfEarlierReleaseRemoved(t *testing.T) {
	p := newPlugin(t)
	p.stop()
	p.options.Installation = p.installation()
	p.start()
	claim := p.claim("former", "100M", "")
	p.mustPrepare(claim)
	specs, err := filepath.Glob(filepath.Join(p.options.CDIDir, "*"+string(claim.UID)+"*"))
	if err != nil || len(specs) == 0 {
		t.Fatalf("got CDI specs %v and error %v, want that of the claim", specs, err)
	}
	own, former := p.options.Installation.Path(), filepath.Join(p.dir, "former-hook")
	for _, exists := range []bool{true, false} {
		if exists {
			err = os.WriteFile(former, nil, 0o600)
		} else {
			err = os.Remove(former)
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range specs {
			raw, err := os.ReadFile(path)
			if err == nil {
				err = os.WriteFile(path, []byte(strings.ReplaceAll(string(raw), own, former)), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		p.mustPrepare(claim)
		named := ""
		for _, path := range specs {
			raw, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			named += string(raw)
		}
		if got := strings.Contains(named, former); got != exists {
			t.Errorf("former hook exists: %t; the spec names it: %t", exists, got)
		}
		if got := strings.Contains(named, own); got == exists {
			t.Errorf("former hook exists: %t; the spec names the current one: %t", exists, got)
		}
	}
	p.unprepare(claim)
}

// The last plugin of a node removes the hook when it stops. One that starts at this
// moment installs it afterwards.
func TestHook_predecessorStops(t *testing.T) {
	p := newPlugin(t)
	p.stop()
	p.options.Installation = p.installation()
	p.start()
	s := p.succeed("["+network+"interfaces: [nic0]}]", nil)
	p.stop()
	if err := <-s.started; err != nil {
		t.Fatal(err)
	}
	if err := p.options.Installation.Check(); err != nil {
		t.Fatal(err)
	}
}

// The runtime cannot execute files of a directory that is mounted noexec, and nothing
// can be installed on a read-only file system.
func TestInstallation_mountOptions(t *testing.T) {
	for name, c := range map[string]struct {
		flags uintptr
		want  string
	}{
		"noexec":    {unix.MS_NOEXEC, "is mounted noexec"},
		"read-only": {unix.MS_RDONLY, "read-only file system"},
	} {
		t.Run(name, func(t *testing.T) {
			source, dir := filepath.Join(t.TempDir(), "hook"), t.TempDir()
			if err := os.WriteFile(source, []byte("#!/bin/sh\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := unix.Mount("tmpfs", dir, "tmpfs", c.flags, ""); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
			installation, err := install.New(source, dir, "", nil)
			if err != nil {
				t.Fatal(err)
			}
			_, err = installation.Install()
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "plugin.hookDir") {
				t.Errorf("got %v, want %q and the value to set", err, c.want)
			}
		})
	}
}

// Runtimes that do not run hooks start containers without their share.
func TestStatus_hookNotRun(t *testing.T) {
	p := newPlugin(t)
	p.stop()
	recorder := events.NewFakeRecorder(100)
	p.options.Events = recorder
	p.start()
	c := p.claim("c", "10M", "", "p")
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "p", UID: c.Status.ReservedFor[0].UID}}
	pod.Spec.NodeName, pod.Spec.RuntimeClassName = nodeName, ptr.To("gvisor")
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "nic", ResourceClaimName: ptr.To("c")}}
	pod.Spec.Containers = []corev1.Container{
		{Name: "work", Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "nic"}}}},
	}
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "work", State: running}}
	if _, err := p.client.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p.mustPrepare(c)
	eventually.Eventually(t, timeout, "the status names the cause", func() error {
		return p.condition(c, v1alpha1.ConditionReady, v1alpha1.ReasonHookNotRun)
	})
	wantEvent(t, recorder, `Warning HookNotRun claim c, device nic0: container work of pod default/p runs without its `+
		`share: the runtime of RuntimeClass "gvisor" did not run the hook`)
	p.unprepare(c)
}
