// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// The macvlans of other programs, such as Multus, work next to shares only while frames are
// audited, as docs/user/migration.md states.
func TestIdentity_macvlanOfAnotherProgram(t *testing.T) {
	for name, tc := range map[string]struct {
		identity classify.Identity
		passes   bool
	}{
		"Enforce": {classify.IdentityEnforce, false},
		"Audit":   {classify.IdentityAudit, true},
	} {
		t.Run(name, func(t *testing.T) {
			config := enforced()
			config.Policy.Identity = tc.identity
			e, pod := newTestEnv(t, config), nstest.New(t)
			mac := net.HardwareAddr{2, 0, 0, 0, 0, 77}
			addMacvlan(t, pod, e.nic.Index, mac)
			wireMAC := e.wire.Interface("wire").HardwareAddr
			wire, link := listen(t, e.wire, "wire"), listen(t, pod, "net1")
			ports := classify.UDP(5000, 5001)
			patience := 200 * time.Millisecond
			if tc.passes {
				patience = 5 * time.Second
			}
			sent := append(classify.EtherTo(wireMAC, mac, 0x0800, classify.IPv4("10.20.0.77", 17, 0, ports)), marker(1)...)
			sendRaw(pod, "net1", sent)
			if got := wire.saw(marker(1), patience); got != tc.passes {
				t.Errorf("a frame of the macvlan arrived at the wire: %t, want %t", got, tc.passes)
			}
			received := append(classify.EtherTo(mac, wireMAC, 0x0800, classify.IPv4(wireIP, 17, 0, ports)), marker(2)...)
			sendRaw(e.wire, "wire", received)
			if got := link.saw(marker(2), patience); got != tc.passes {
				t.Errorf("a frame for the macvlan arrived there: %t, want %t", got, tc.passes)
			}
		})
	}
}

// addMacvlan adds a macvlan net1 of a NIC to a pod, as another program does.
func addMacvlan(t *testing.T, pod *nstest.Namespace, nic int, mac net.HardwareAddr) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.HardwareAddr = "net1", nic, mac
	attrs.Namespace = netlink.NsFd(int(pod.File.Fd()))
	if err := netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}); err != nil {
		t.Fatal(err)
	}
	pod.Do(func() error {
		link, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	})
}

// Frames that the kernel of a pod sends on its own pass: TCP, neighbor discovery, replies.
func TestIdentity_ordinaryTrafficPasses(t *testing.T) {
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	v6 := nstest.Flow{From: e.wire, To: p.Namespace, Address: e.address("fd00:20::1")}
	e.measure(e.fromPod(p))
	e.measure(e.toPod(p))
	e.measure(v6)
	refusals, err := e.node.Refusals(p.attachment.Parent, p.attachment.Minor)
	if err != nil || len(refusals.Dropped) > 0 {
		t.Errorf("Refusals returned %+v and error %v, want none", refusals, err)
	}
}

// Changes that a pod may make to its link do not block the link.
func TestBlocking_permitsHarmlessChanges(t *testing.T) {
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	p.Do(func() error {
		link, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		for _, change := range []func() error{
			func() error { return netlink.SetPromiscOn(link) },
			func() error { return netlink.LinkSetMTU(link, 1400) },
			func() error { return netlink.LinkSetDown(link) },
			func() error { return netlink.LinkSetName(link, "data0") },
			func() error { return netlink.LinkSetUp(link) },
		} {
			if err := change(); err != nil {
				return err
			}
		}
		return nil
	})
	if s, err := e.node.ReadAndBlock(p.attachment); err != nil || s.Blocked != "" || s.Name != "data0" {
		t.Errorf("Read returned %+v and error %v, want a link that is not blocked", s, err)
	}
}
