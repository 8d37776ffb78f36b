// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// unusedNSID is an ID that no namespace has.
const unusedNSID = 1 << 20

func TestDetach_oneOfTwoPods(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	share := p.mustPrepare(c)[0]
	first, second := p.sandbox("first"), p.sandbox("second")
	for _, s := range []*sandbox{first, second} {
		if err := s.hook(c, share); err != nil {
			t.Fatal(err)
		}
	}
	p.awaitAttached(2)
	first.kill()
	p.awaitAttached(1)
	if got := second.links(); !slices.Contains(got, "net1") {
		t.Errorf("the pod that stayed has %v", got)
	}
	p.unprepare(c)
	p.wantNothingLeft()
}

// The kernel reports the end of an earlier namespace with the same ID while a pod is attached. The record that
// the driver has read before it gets the claim's lock has addresses, but no link yet.
func TestDetach_recordOfUnfinishedAttach(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	pod := p.sandbox("pod")
	if err := pod.hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	reserved := p.onlyRecord()
	reserved.Payload = []byte(`{"parent": 1, "mac": "02:00:00:00:00:01", "addresses": ["10.20.0.5/16"]}`)
	p.DetachEnded(t.Context(), reserved)
	if err := p.attached(1); err != nil {
		t.Errorf("the attachment of a running pod: %v", err)
	}
	if got := pod.links(); !slices.Contains(got, "net1") {
		t.Errorf("the pod has the links %v", got)
	}
}

// A namespace ends before the driver detaches the share. Meanwhile, the status must not say that the link is gone.
func TestRead_namespaceHasEnded(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	pod := p.sandbox("pod")
	if err := pod.hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	ended := p.onlyRecord()
	ended.Namespace.NSID = unusedNSID
	if diff := cmp.Diff(driver.State{Pending: true}, p.read(ended)); diff != "" {
		t.Errorf("state (-want +got):\n%s", diff)
	}
}

// While a link is being created, its record has addresses and no index. The link may exist until its namespace has
// ended: a plugin that was killed may have created it.
func TestRead_linkIsBeingCreated(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	pod := p.sandbox("pod")
	if err := pod.hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	created := p.onlyRecord()
	created.Payload = []byte(`{"parent": 1, "mac": "02:00:00:00:00:01", "network": "storage", ` +
		`"addresses": ["10.20.0.5/16"]}`)
	if diff := cmp.Diff(driver.State{Exists: true, Pending: true}, p.read(created)); diff != "" {
		t.Errorf("state in a namespace that exists (-want +got):\n%s", diff)
	}
	created.Namespace.NSID = unusedNSID
	if diff := cmp.Diff(driver.State{Pending: true}, p.read(created)); diff != "" {
		t.Errorf("state in a namespace that has ended (-want +got):\n%s", diff)
	}
}

func TestHook_withoutPlugin(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	share := p.mustPrepare(c)[0]
	running, fresh := p.sandbox("running"), p.sandbox("fresh")
	if err := running.hook(c, share); err != nil {
		t.Fatal(err)
	}
	p.stop()
	if err := running.hook(c, share); err != nil {
		t.Errorf("a container that starts again: %v", err)
	}
	if err := fresh.hookWithin(300*time.Millisecond, c, share); err == nil ||
		!strings.Contains(err.Error(), "no dra-shared-plugin answered for 300ms: is its pod running on this node?") {
		t.Errorf("a new pod: %v", err)
	}
	p.start()
	if err := fresh.hook(c, share); err != nil {
		t.Errorf("once the plugin is back: %v", err)
	}
	p.awaitAttached(2)
}

// A sandbox ended while no plugin was watching, and the kernel gave its namespace ID to another pod's namespace.
func TestAttach_detachesShareFromFormerNamespaceWithSameID(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"addresses": ["10.20.0.5/16"]`)
	ended := p.sandbox("ended")
	if err := ended.hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	old := p.onlyRecord()
	other, next := p.claim("other", "100M", ""), p.sandbox("next")
	p.stop()
	ended.kill()
	old.Namespace.NSID = next.namespaceID()
	if err := attach.OpenRecords(p.options.RunDir, old.BootID, nil).Write(old); err != nil {
		t.Fatal(err)
	}
	p.start()
	if err := next.hook(other, p.mustPrepare(other)[0]); err != nil {
		t.Fatal(err)
	}
	p.awaitAttached(1)
	restarted := p.sandbox("ended")
	if err := restarted.hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Errorf("the pod does not start again: %v", err)
	}
}

// A pod gets a new sandbox while the kernel has not removed the namespace of its former one.
func TestAttach_replacesLinkInFormerSandboxOfPod(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"addresses": ["10.20.0.5/16"]`)
	share, former, current := p.mustPrepare(c)[0], p.sandbox("pod"), p.sandbox("pod")
	current.uid = former.uid
	for _, s := range []*sandbox{former, current} {
		if err := s.hook(c, share); err != nil {
			t.Fatal(err)
		}
	}
	if got := former.links(); slices.Contains(got, "net1") {
		t.Errorf("the former sandbox has %v", got)
	}
	p.awaitAttached(1)
}

func TestHook_refusesNamespaceOfAnotherPodOrNode(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	share := p.mustPrepare(c)[0]
	hostNetwork := p.process("hostnetwork", 0)
	other := p.sandbox("other")
	other.writeBundle(fmt.Sprintf("/proc/%d/ns/net", hostNetwork.pid))
	unnamed := p.sandbox("unnamed")
	unnamed.writeBundle("")
	for _, tc := range []struct {
		s    *sandbox
		want string
	}{
		{hostNetwork, "the pod uses the node's network (hostNetwork)"},
		{other, "the container is not in the network namespace that its config.json names"},
		{unnamed, "the container's config.json does not contain the path of a network namespace"},
	} {
		if err := tc.s.hook(c, share); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %s", tc.s.name, err, tc.want)
		}
	}
	if err := p.sandbox("p").hook(c, "another-share"); err == nil ||
		!strings.Contains(err.Error(), "has no share another-share") {
		t.Errorf("a share that is not prepared: %v", err)
	}
	p.unprepare(c)
	if err := p.sandbox("p").hook(c, share); err == nil || !strings.Contains(err.Error(), "is not prepared on this node") {
		t.Errorf("a claim that is not prepared: %v", err)
	}
}

func TestAttach_staticAddressServesOnePod(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"addresses": ["10.20.0.5/16"]`, "first", "second")
	if _, err := p.prepare(c); err == nil ||
		!strings.Contains(err.Error(), "reserved for 2 pods: addresses [10.20.0.5/16] belong to pod default/first") {
		t.Errorf("reserved for two pods: %v", err)
	}
	p.wantNothingLeft()

	c = p.claim("d", "100M", `"addresses": ["10.20.0.5/16"]`, "first")
	share := p.mustPrepare(c)[0]
	first, second := p.sandbox("first"), p.sandbox("second")
	if err := first.hook(c, share); err != nil {
		t.Fatal(err)
	}
	if err := second.hook(c, share); err == nil ||
		!strings.Contains(err.Error(), "belong to pod default/first, which uses the same claim") {
		t.Errorf("the second pod: %v", err)
	}
	p.awaitReason(c, v1alpha1.ReasonAttachFailed)
	// The second pod ends before it was attached.
	p.reserve(c, func(pods []resourceapi.ResourceClaimConsumerReference) []resourceapi.ResourceClaimConsumerReference {
		return slices.DeleteFunc(pods, second.is)
	})
	first.do(func() error { // changes the link, so the plugin reports the claim again
		link, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(link, 1400)
	})
	p.awaitReason(c, v1alpha1.ReasonAttached)
	first.kill()
	eventually.Eventually(t, timeout, "the hook attaches the second pod", func() error { return second.hook(c, share) })
	p.awaitReason(c, v1alpha1.ReasonAttached)
}

// Another host on the network has the address of the claim.
func TestAttach_duplicateAddress(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"addresses": ["10.20.0.5/16"]`)
	share := p.mustPrepare(c)[0]
	p.wire.Do(func() error { return nstest.ConfigureLink("wire", "10.20.0.5/16") })
	if err := p.sandbox("p").hook(c, share); err != nil {
		t.Fatalf("with detection Report, which is the default: %v", err)
	}
	p.awaitReason(c, v1alpha1.ReasonDuplicateAddress)
	p.unprepare(c)

	p.stop()
	p.startWith(strings.Replace(oneNetwork, "bandwidth", "duplicateAddressDetection: Refuse\n  bandwidth", 1))
	c = p.claim("d", "100M", `"addresses": ["10.20.0.5/16"]`)
	share = p.mustPrepare(c)[0]
	second := p.sandbox("p")
	want := "addresses: another host on the network has the address: 10.20.0.5 (MAC address " +
		p.wire.Interface("wire").HardwareAddr.String() + ") on network storage"
	if err := second.hook(c, share); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("with detection Refuse: got error %v, want one that contains %q", err, want)
	}
	p.wire.Do(func() error {
		link, err := netlink.LinkByName("wire")
		if err != nil {
			return err
		}
		address, err := netlink.ParseAddr("10.20.0.5/16")
		return errors.Join(err, netlink.AddrDel(link, address))
	})
	if err := second.hook(c, share); err != nil {
		t.Errorf("after the other host has lost the address: %v", err)
	}
	p.awaitReason(c, v1alpha1.ReasonAttached)
}

func TestAttach_reportsFailureAndSucceedsLater(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"interfaceName": "wanted"`)
	share := p.mustPrepare(c)[0]
	s := p.sandbox("p")
	blocker := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "wanted"}}
	s.do(func() error { return netlink.LinkAdd(blocker) })
	if err := s.hook(c, share); err == nil ||
		!strings.Contains(err.Error(), "the pod already has an interface wanted: choose another interfaceName") {
		t.Errorf("got %v", err)
	}
	p.awaitReason(c, v1alpha1.ReasonAttachFailed)
	s.do(func() error { return netlink.LinkDel(blocker) })
	if err := s.hook(c, share); err != nil {
		t.Error(err)
	}
	p.awaitReason(c, v1alpha1.ReasonAttached)
}
