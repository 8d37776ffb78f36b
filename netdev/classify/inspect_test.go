// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// A pod that sets its link down and up in a loop must not make the node list the links of all pods, which takes a
// request for each of them.
func TestNode_Inspect_readsOneLinkForAddressOfAttachment(t *testing.T) {
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	p.Do(func() error {
		net1, err := netlink.LinkByName("net1")
		return errors.Join(err, netlink.LinkSetDown(net1))
	})
	if err := e.node.UpdateBlocking(p.attachment); err != nil {
		t.Fatal(err)
	}
	p.hide(t, p.attachment.MAC, e.wireMAC())
	requests := func() uint64 {
		e.skip(time.Minute)
		e.inspect(true) // looks up the addresses of more pods
		e.skip(time.Minute)
		before := e.node.Messages().Sent
		e.inspect(true)
		return e.node.Messages().Sent - before
	}
	few := requests()
	for i := range 5 {
		e.pod(1+i, 2+i, hardCap(100*mega), netdev.Private)
	}
	if many := requests(); many != few {
		t.Errorf("Inspect sent %d requests with 6 pods, and %d with one", many, few)
	}
}

// While the kernel removes the links of a pod that has ended, the NIC accepts their addresses.
func TestNode_Inspect_permitsLinksOfEndedPods(t *testing.T) {
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	p.nest(t, func(nested netlink.NsFd, net1 netlink.Link) error { return netlink.LinkSetNsFd(net1, int(nested)) }).
		Do(func() error { return nstest.ConfigureLink("net1") })
	if err := e.node.Detach(p.attachment); err != nil {
		t.Fatal(err)
	}
	if e.inspect(false) {
		t.Error("the NIC is guarded because of a link that was just detached")
	}
	e.skip(5 * time.Second)
	if !e.inspect(true) {
		t.Error("the NIC is not guarded although a link that was detached still exists")
	}
}

// The NIC accepts the addresses of links on its VLANs, too. The node sees them.
func TestNode_Inspect_permitsLinksOnVLAN(t *testing.T) {
	e := newTestEnv(t, enforced())
	nstest.VLAN(t, "nic0", "nic0.5", 5)
	vlan := nstest.FindNIC(t, "nic0.5")
	other := nstest.New(t)
	cluster := netlink.NewLinkAttrs() // as the link of the cluster network, it gives the namespace an ID
	cluster.Name = "cluster"
	peer := netlink.NsFd(int(other.File.Fd()))
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: cluster, PeerName: "eth0", PeerNamespace: peer}); err != nil {
		t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.Namespace = "other", vlan.Index, peer
	if err := netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}); err != nil {
		t.Fatal(err)
	}
	other.Do(func() error { return nstest.ConfigureLink("other") })
	if e.inspect(false) {
		t.Error("the NIC is guarded because of a link on its VLAN that the node sees")
	}
}
