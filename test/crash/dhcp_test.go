// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/failpointtest"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// leases is the configuration of a server that leases for 10 s, the shortest time that the driver
// accepts.
const leases = `
authoritative;
ping-check off;
default-lease-time 10;
max-lease-time 10;
min-lease-time 10;
option dhcp-renewal-time 3;
option dhcp-rebinding-time 7;
subnet 10.20.0.0 netmask 255.255.0.0 { range 10.20.8.1 10.20.8.100; }
`

// dhcpEnv is a node with links that lease addresses.
type dhcpEnv struct {
	*testEnv
	server *nstest.DHCPServer
	opener string // its socket
}

func newDHCPEnv(t *testing.T) *dhcpEnv {
	t.Helper()
	e := &dhcpEnv{testEnv: newTestEnv(t)}
	e.opener = e.path("opener.sock")
	e.wire.Do(func() error { return nstest.ConfigureLink("wire", "10.20.0.1/16") })
	e.server = nstest.RunDHCPServer(t, e.wire, leases)
	e.must("create the directory of namespaces", os.Mkdir(e.path("netns"), 0o700))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- attach.Opener{Socket: e.opener, Namespaces: e.path("netns"), RunDir: e.path("run")}.Serve(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("opener: %v", err)
		}
	})
	return e
}

// serve starts a plugin that leases addresses.
func (e *dhcpEnv) serve(change func(*pluginConfig)) {
	e.t.Helper()
	e.start(func(c *pluginConfig) {
		c.Opener = e.opener
		if change != nil {
			change(c)
		}
	})
}

// retry is testEnv.retry with a plugin that leases addresses.
func (e *dhcpEnv) retry(condition string, f func(context.Context) error) {
	e.t.Helper()
	e.eventually(condition, func() error {
		if e.plugin == nil || !e.running() {
			e.serve(nil)
		}
		ctx, cancel := context.WithTimeout(e.t.Context(), 15*time.Second)
		defer cancel()
		return f(ctx)
	})
}

// pod creates a sandbox. The opener finds its namespace.
func (e *dhcpEnv) pod(name string) *sandbox {
	e.t.Helper()
	s := e.sandbox(name)
	e.must("publish the namespace", os.Symlink(fmt.Sprintf("/proc/%d/ns/net", s.tid), e.path("netns", name)))
	return s
}

// address returns the IPv4 address of the link, or "" without one.
func (s *sandbox) address() (address string, err error) {
	err = s.do(func() error {
		link, err := net.InterfaceByName("net1")
		if err != nil {
			return err
		}
		addresses, err := link.Addrs()
		for _, a := range addresses {
			if p, ok := a.(*net.IPNet); ok && p.IP.To4() != nil {
				address = p.String()
			}
		}
		return err
	})
	return address, err
}

// renewed returns how often the server has confirmed a lease.
func (e *dhcpEnv) renewed() int { return strings.Count(e.server.Log(), "DHCPACK on ") }

// awaitRenewals waits for more renewals of the lease.
func (e *dhcpEnv) awaitRenewals(n int) {
	e.t.Helper()
	wanted := e.renewed() + n
	e.retry(fmt.Sprintf("the lease is renewed %d times", n), func(context.Context) error {
		if got := e.renewed(); got < wanted {
			return fmt.Errorf("the server has confirmed leases %d times, want %d", got, wanted)
		}
		return nil
	})
}

// hasAddress returns an error unless the link has an address of the server.
func (s *sandbox) hasAddress() error {
	got, err := s.address()
	if err == nil && !strings.HasPrefix(got, "10.20.8.") {
		err = fmt.Errorf("the link has the address %q, want one of 10.20.8.0/24", got)
	}
	return err
}

// hasNoAddress returns an error unless the link exists and does not have an IPv4 address.
func (s *sandbox) hasNoAddress() error {
	got, err := s.address()
	if err == nil && got != "" {
		err = fmt.Errorf("the link has the address %q, want none", got)
	}
	return err
}

// Plugins renew a lease that another plugin obtained. Without the server, the link loses the
// address at the end of the lease, with or without a plugin. It gets an address when the server
// runs again. The end of the pod releases the address.
func TestPlugin_renewsLeases(t *testing.T) {
	e := newDHCPEnv(t)
	e.serve(nil)
	claim, pod := e.claim("lease"), e.pod("leasing")
	e.must("prepare the claim", e.prepare(t.Context(), claim))
	e.must("attach the claim", pod.hook(t.Context(), e.dir, claim, timeout))
	e.must("address of the link", pod.hasAddress())
	first, _ := pod.address()
	e.awaitReason(claim, v1alpha1.ReasonAttached)
	e.awaitAddress(claim, first)

	e.kill()
	e.serve(nil)
	e.awaitRenewals(4) // more than a lease is long
	if now, err := pod.address(); err != nil || now != first {
		t.Errorf("after renewals the link has the address %q (error %v), want %s", now, err, first)
	}

	e.server.Stop()
	e.awaitReason(claim, v1alpha1.ReasonLeaseExpired)
	e.eventually("the link has no address", pod.hasNoAddress)
	pod.mustLink(t)
	e.server.Start()
	e.awaitReason(claim, v1alpha1.ReasonAttached)
	e.must("address of the link", pod.hasAddress())

	e.server.Stop()
	e.kill()
	e.eventually("the kernel removes the address while no plugin runs", pod.hasNoAddress)
	pod.mustLink(t)
	e.server.Start()
	e.serve(nil)
	e.eventually("another plugin leases an address", pod.hasAddress)

	last, _ := pod.address()
	id := e.recordedNamespace()
	pod.end()
	e.server.AwaitLog("DHCPRELEASE of " + strings.TrimSuffix(last, "/16"))
	if exists, err := nstest.NamespaceExists(id); err != nil || exists {
		t.Errorf("the namespace of the ended pod exists: %t, error %v", exists, err)
	}
	e.must("unprepare the claim", e.unprepare(t.Context(), claim))
}

// A NIC that is no longer configured, or that cannot be shared, keeps the leases of its links.
func TestPlugin_renewsLeasesOfNICThatIsNotShared(t *testing.T) {
	e := newDHCPEnv(t)
	e.serve(nil)
	claim, pod := e.claim("lease"), e.pod("leasing")
	e.must("prepare the claim", e.prepare(t.Context(), claim))
	e.must("attach the claim", pod.hook(t.Context(), e.dir, claim, timeout))
	first, err := pod.address()
	e.must("address of the link", err)
	e.kill()
	e.serve(func(c *pluginConfig) { c.Interfaces = "absent0" })
	e.awaitReason(claim, v1alpha1.ReasonDeviceGone)
	e.awaitRenewals(4) // more than a lease is long
	if now, err := pod.address(); err != nil || now != first {
		t.Errorf("after renewals the link has the address %q (error %v), want %s", now, err, first)
	}
	pod.end()
	e.server.AwaitLog("DHCPRELEASE of " + strings.TrimSuffix(first, "/16"))
	e.must("unprepare the claim", e.unprepare(t.Context(), claim))
}

// recordedNamespace returns the ID of the namespace of the only attachment.
func (e *testEnv) recordedNamespace() int {
	e.t.Helper()
	records, err := attach.OpenRecords(e.path("run"), attach.AnyBoot, nil).List()
	if err != nil || len(records) != 1 {
		e.t.Fatalf("got %d attachment records and error %v, want one", len(records), err)
	}
	return records[0].Namespace.NSID
}

// awaitAddress waits until the status of the claim has an address.
func (e *testEnv) awaitAddress(claim *resourceapi.ResourceClaim, address string) {
	e.t.Helper()
	e.eventually("the claim has the address "+address, func() error {
		c, err := e.api.Client.ResourceV1().ResourceClaims(namespace).Get(e.t.Context(), claim.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, d := range c.Status.Devices {
			if d.NetworkData != nil && slices.Contains(d.NetworkData.IPs, address) {
				return nil
			}
		}
		return fmt.Errorf("it has the devices %+v", c.Status.Devices)
	})
}

// A server that gives a renewed client another address, or refuses to renew, leads to a changed
// address.
func TestPlugin_changesRefusedAddress(t *testing.T) {
	e := newDHCPEnv(t)
	e.serve(nil)
	claim, pod := e.claim("changed"), e.pod("changing")
	e.must("prepare the claim", e.prepare(t.Context(), claim))
	e.must("attach the claim", pod.hook(t.Context(), e.dir, claim, timeout))
	first, err := pod.address()
	e.must("address of the link", err)
	e.server.Stop()
	e.server.Configure(strings.ReplaceAll(leases, "10.20.8.1 10.20.8.100", "10.20.9.1 10.20.9.100"))
	e.server.Start()
	e.eventually("the link has an address of the new range", func() error {
		now, err := pod.address()
		if err == nil && !strings.HasPrefix(now, "10.20.9.") {
			err = fmt.Errorf("it has %q, and had %q before", now, first)
		}
		return err
	})
	now, _ := pod.address()
	e.awaitAddress(claim, now)
	e.must("unprepare the claim", e.unprepare(t.Context(), claim))
	e.server.AwaitLog("DHCPRELEASE of " + strings.TrimSuffix(now, "/16"))
	e.retry("the node has no state of claims", func(context.Context) error { return e.nothingLeft() })
}

// A server of another network leases an address that the network does not allow.
func TestPlugin_releasesRefusedAddress(t *testing.T) {
	e := newDHCPEnv(t)
	e.server.Stop()
	e.wire.Do(func() error { return nstest.ConfigureLink("wire", "192.168.5.1/24") })
	e.server.Configure(strings.NewReplacer("10.20.0.0", "192.168.5.0", "255.255.0.0", "255.255.255.0",
		"10.20.8.1 10.20.8.100", "192.168.5.10 192.168.5.19").Replace(leases))
	e.server.Start()
	e.serve(nil)
	claim, pod := e.claim("refused"), e.pod("refused")
	e.must("prepare the claim", e.prepare(t.Context(), claim))
	e.mustFail("attach the claim", "allows addresses in", pod.hook(t.Context(), e.dir, claim, timeout))
	e.server.AwaitLog("DHCPRELEASE of 192.168.5.")
}

// A plugin that is killed at any operation that concerns a lease does not lose the lease or the link's address, and
// does not leave anything behind.
func TestPlugin_killedWhileLeasing(t *testing.T) {
	e := newDHCPEnv(t)
	// The lease must not end while a plugin is replaced that was killed: an ended lease is not released.
	e.server.Stop()
	e.server.Configure(strings.ReplaceAll(leases, "lease-time 10", "lease-time 60"))
	e.server.Start()
	e.runLease(nil)
	file := e.path("failpoints")
	e.runLease(func(c *pluginConfig) { c.Record = file })
	seen := map[string]bool{}
	var kill failpointtest.Point
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the plugin was last to be killed %s", kill)
		}
	})
	for _, point := range e.readPoints(file) {
		if seen[point.Name] || !concernsLease(point) {
			continue
		}
		seen[point.Name] = true
		for _, after := range []bool{false, true} {
			point.After = after
			kill = point
			if !e.runLease(func(c *pluginConfig) { c.Kill = kill }) {
				t.Errorf("the plugin did not reach failpoint %s again", point.Name)
			}
			if t.Failed() {
				t.FailNow()
			}
		}
	}
	for _, name := range []string{
		"lease address", "set leased address", "renew lease", "release lease", "remove addresses from map",
	} {
		if !seen[name] {
			t.Errorf("no plugin was killed at %q", name)
		}
	}
}

func concernsLease(p failpointtest.Point) bool {
	return strings.Contains(p.Name, "lease") || strings.Contains(p.Name, "addresses from map") ||
		strings.Contains(p.Name, "attachment record")
}

// runLease takes a claim through attach, a renewal, and detach, and reports whether the plugin was
// killed on the way.
func (e *dhcpEnv) runLease(change func(*pluginConfig)) (killed bool) {
	e.t.Helper()
	e.kill()
	e.serve(change)
	first := e.plugin
	name := fmt.Sprintf("lease-%d", e.instance)
	claim, pod := e.claim(name), e.pod(name)
	e.retry("prepare the claim", func(ctx context.Context) error { return e.prepare(ctx, claim) })
	e.retry("attach the claim", func(ctx context.Context) error {
		return pod.hook(ctx, e.dir, claim, 200*time.Millisecond)
	})
	e.must("address of the link", pod.hasAddress())
	before, _ := pod.address()
	e.awaitRenewals(1)
	e.retry("the link has the renewed address", func(context.Context) error {
		if now, err := pod.address(); err != nil || now != before {
			return errors.Join(err, fmt.Errorf("it has %q, want %q", now, before))
		}
		return nil
	})
	pod.end()
	e.retry("no pod is attached", func(context.Context) error { return e.attachedPods(0) })
	e.server.AwaitLog("DHCPRELEASE of " + strings.TrimSuffix(before, "/16"))
	e.retry("unprepare the claim", func(ctx context.Context) error { return e.unprepare(ctx, claim) })
	e.retry("the node has no state of claims", func(context.Context) error { return e.nothingLeft() })
	e.deleteClaim(claim.Name)
	return e.plugin != first
}
