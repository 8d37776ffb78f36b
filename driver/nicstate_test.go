// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/tools/events"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/internal/probe"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// Many drivers report no speed without a carrier.
const speedOfLink = "[{name: storage, interfaces: [nic0], enforcement: None, linkDown: NoExecute}]"

// newPluginOfLink starts a plugin that shares nic0 at the speed of its link. disconnect takes the carrier and the speed
// away.
func newPluginOfLink(t *testing.T) (p *plugin, disconnect func()) {
	t.Helper()
	p = newPlugin(t)
	p.stop()
	p.sysfs = t.TempDir()
	speed := filepath.Join(p.sysfs, "class/net/nic0/speed")
	err := os.MkdirAll(filepath.Dir(speed), 0o700)
	if err == nil {
		err = os.WriteFile(speed, []byte("10000\n"), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	p.startWith(speedOfLink)
	eventually.Eventually(t, timeout, "nic0 is shared, and has a carrier", func() error { return p.tainted("") })
	return p, func() {
		if err := os.WriteFile(speed, []byte("-1\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		p.wire.Do(func() error {
			wire, err := netlink.LinkByName("wire")
			if err != nil {
				return err
			}
			return netlink.LinkSetDown(wire)
		})
	}
}

// tainted returns an error unless the plugin has nic0, and no other device, with the taint and no other; "" means none.
func (p *plugin) tainted(taint string) error {
	devices := p.options.Kinds[0].Devices()
	has := func(d resourceapi.Device) bool {
		if taint == "" {
			return len(d.Taints) == 0
		}
		return len(d.Taints) == 1 && d.Taints[0].Key == taint
	}
	if len(devices) != 1 || devices[0].Name != "nic0" || !has(devices[0]) {
		return fmt.Errorf("the plugin has the devices %+v, want nic0 with the taint %q", devices, taint)
	}
	return nil
}

func TestDriver_restartsWhileNICHasNoCarrier(t *testing.T) {
	p, disconnect := newPluginOfLink(t)
	c := p.claim("c", "10M", "")
	if err := p.sandbox("p").hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	p.awaitReason(c, v1alpha1.ReasonAttached)
	disconnect()
	eventually.Eventually(t, timeout, "nic0 is tainted", func() error { return p.tainted(v1alpha1.TaintLinkDown) })
	p.stop()
	p.startWith(speedOfLink)
	if err := p.tainted(v1alpha1.TaintLinkDown); err != nil {
		t.Error(err)
	}
	p.awaitReason(c, v1alpha1.ReasonLinkDown)
	p.mustPrepare(p.claim("other", "10M", ""))
}

func TestTakeover_whileNICHasNoCarrier(t *testing.T) {
	p, disconnect := newPluginOfLink(t)
	disconnect()
	eventually.Eventually(t, timeout, "nic0 is tainted", func() error { return p.tainted(v1alpha1.TaintLinkDown) })
	s := p.succeed(speedOfLink, nil)
	if err := <-s.started; err != nil {
		t.Fatal(err)
	}
	if err := s.tainted(v1alpha1.TaintLinkDown); err != nil {
		t.Error(err)
	}
}

const pattern = "[" + network + `interfaces: ["nic*"]}]`

// The default route is missing for a moment while one plugin replaces the other.
func TestTakeover_keepsUplink(t *testing.T) {
	p := newPlugin(t)
	p.stop()
	removeRoute := nstest.DefaultRoute(t, "nic0")
	p.startWith(pattern)
	if devices := p.options.Kinds[0].Devices(); len(devices) > 0 {
		t.Fatalf("a pattern shares the uplink: %+v", devices)
	}
	removeRoute()
	s := p.succeed(pattern, nil)
	if err := <-s.started; err != nil {
		t.Fatal(err)
	}
	if devices := s.options.Kinds[0].Devices(); len(devices) > 0 {
		t.Errorf("after the uplink has lost its route, the next plugin shares it: %+v", devices)
	}
}

// The first plugin after a boot starts before the node has its default route. It is not ready before it knows whether
// it can share the NIC: `helm install --wait` would succeed.
func TestDriver_startsBeforeDefaultRoute(t *testing.T) {
	p := newPlugin(t)
	p.stop()
	nstest.NIC(t, "mgmt", 1500)
	recorder := events.NewFakeRecorder(100)
	p.options.Events = recorder
	p.startWith(pattern)
	p.register()
	wantEvent(t, recorder, "Warning DeviceUnusable cannot share nic0: the node has no default route yet")
	if devices := p.options.Kinds[0].Devices(); len(devices) > 0 {
		t.Errorf("the plugin shares a NIC that may become an uplink: %+v", devices)
	}
	eventually.Eventually(t, timeout, "the plugin is not ready", func() error {
		return wantFailure(p.healthy(probe.Ready), "NIC nic0 cannot be shared: the node has no default route yet")
	})
	nstest.DefaultRoute(t, "mgmt")
	eventually.Eventually(t, timeout, "nic0 is shared", func() error { return p.tainted("") })
	eventually.Eventually(t, timeout, "the plugin is ready", func() error { return p.healthy(probe.Ready) })
}

// A plugin that stops without claims leaves nothing, and one with claims leaves what the next one needs.
func TestDriver_removesNICStateFileWithLastClaim(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "10M", "")
	p.mustPrepare(c)
	p.stop()
	if _, err := os.Stat(p.nicMemory()); err != nil {
		t.Error(err)
	}
	p.start()
	p.unprepare(c)
	p.stop()
	left, err := filepath.Glob(p.nicMemory() + "*")
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, error %v", left, err)
	}
}

// At rest, the plugin does not write.
func TestDriver_writesNICStateFileOnlyAfterChange(t *testing.T) {
	o := &operations{counts: map[string]int{}}
	p := newPlugin(t)
	p.stop()
	p.options.Failpoints = o.count
	p.start()
	kind := p.options.Kinds[0]
	refresh := func() {
		if _, err := kind.Refresh(t.Context(), nil); err != nil {
			t.Error(err)
		}
	}
	if got := o.during(func() { refresh(); refresh() }); got["write NIC state file"] > 0 {
		t.Errorf("operations at rest: %v", got)
	}
	got := o.during(func() {
		nstest.DefaultRoute(t, "nic0")
		refresh()
		refresh()
	})
	if got["write NIC state file"] != 1 {
		t.Errorf("operations after nic0 has become an uplink: %v, want one write", got)
	}
}
