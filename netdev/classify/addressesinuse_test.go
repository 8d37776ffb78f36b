// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// The kernel gives the frames for the address of a member of a bond, or of a port of a bridge, to the node. A pod can
// give a link this address, too, and receives nothing.
func TestAttack_addressOfMember(t *testing.T) {
	for name, stack := range map[string]func(t *testing.T) (nic string){
		"a port of a bridge": func(t *testing.T) string {
			nstest.Bridge(t, "br0", "nic0", "nic1")
			if err := netlink.LinkSetHardwareAddr(linkOf(t, "br0"), net.HardwareAddr{2, 0, 0, 0, 0x77, 5}); err != nil {
				t.Fatal(err)
			}
			return "br0"
		},
		"a member of a bond": func(t *testing.T) string {
			nstest.Bond(t, "bond0", netlink.BOND_MODE_BALANCE_ALB, "nic0", "nic1")
			return "bond0"
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, first := nstest.NIC(t, "nic0", 1500, wireIP+"/16")
			_, second := nstest.NIC(t, "nic1", 1500, "10.20.0.252/16")
			e := newTestEnvOn(t, nstest.MountBPFFS(t), nstest.FindNIC(t, stack(t)), first, enforced())
			if e.furtherLinkReceives(linkOf(t, "nic1").Attrs().HardwareAddr, second) {
				t.Error("a further link of the pod received a frame for the node")
			}
		})
	}
}

// A share cannot get an address of another link of the NIC, of the node, or of a gateway.
func TestNode_Attach_refusesAddressesInUse(t *testing.T) {
	e := newTestEnv(t, enforced())
	if err := errors.Join(nstest.ConfigureLink("nic0", nodeIP+"/16"), netlink.RouteAdd(&netlink.Route{
		LinkIndex: e.nic.Index, Dst: network("10.99.0.0/16"), Gw: net.ParseIP(wireIP),
	})); err != nil {
		t.Fatal(err)
	}
	addNodeBridge(t, "other0", "10.20.0.240/32")
	e.manage()
	other := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	for _, tc := range []struct{ address, want string }{
		{"10.20.0.240", "belongs to the node, or is a gateway of nic0"},
		{other.ip, "belongs to another link of nic0, with MAC address " + other.attachment.MAC.String()},
		{nodeIP, "belongs to the node, or is a gateway of nic0"},
		{wireIP, "belongs to the node, or is a gateway of nic0"},
	} {
		_, err := e.node.Attach(nstest.New(t).Pod(), netdev.LinkSpec{
			Parent: e.nic.Index, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 9}, Mode: netdev.Private,
			Addresses: []netip.Prefix{netip.MustParsePrefix(tc.address + "/16")},
		})
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("Attach with address %s returned %v, want an error with %q", tc.address, err, tc.want)
		}
	}
}

// addNodeBridge creates a bridge of the node with addresses, until the test ends.
func addNodeBridge(t *testing.T, name string, addresses ...string) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := netlink.LinkAdd(bridge); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netlink.LinkDel(bridge); err != nil {
			t.Error(err)
		}
	})
	if err := nstest.ConfigureLink(name, addresses...); err != nil {
		t.Fatal(err)
	}
}

// If its claim did not request an address, a pod must not use the addresses that the node has on links other than the
// NIC, as soon as the node gets them.
func TestAttack_addressesOfNodeOnOtherLinks(t *testing.T) {
	const ofBridge, ofLoopback, ofNetwork = "10.20.1.1", "10.20.1.2", "10.20.1.3"
	config := enforced()
	config.Policy.Addresses = []netip.Prefix{netip.MustParsePrefix(ofNetwork + "/32")}
	e := newTestEnv(t, config)
	attacker, own := nstest.New(t), net.HardwareAddr{2, 0, 0, 0, 0, 1}
	if _, err := e.node.Attach(attacker.Pod(), netdev.LinkSpec{
		Parent: e.nic.Index, MAC: own, Mode: netdev.Private, Name: "net1",
		Minor: shape.FirstMinor, Rates: hardCap(100 * mega),
	}); err != nil {
		t.Fatal(err)
	}
	wire, wireMAC, sent := listen(t, e.wire, "wire"), e.wireMAC(), 0
	expect := func(when, address string, arrives bool) {
		t.Helper()
		patience := 200 * time.Millisecond
		if arrives {
			patience = 5 * time.Second
		}
		for name, frame := range map[string][]byte{
			"ARP": classify.EtherTo(wireMAC, own, 0x0806, classify.ARP(2, own, address, wireIP)),
			"IP":  classify.EtherTo(wireMAC, own, 0x0800, classify.IPv4(address, 17, 0, classify.UDP(1, 2))),
		} {
			mark := marker(sent)
			sent++
			sendRaw(attacker, "net1", append(frame, mark...))
			if got := wire.saw(mark, patience); got != arrives {
				t.Errorf("%s, %s with the address %s arrived at the wire: %t, want %t", when, name, address, got, arrives)
			}
		}
	}
	for _, address := range []string{ofBridge, ofLoopback, ofNetwork} {
		expect("before the node has it", address, true)
	}
	addNodeBridge(t, "other0", ofBridge+"/32", ofNetwork+"/32")
	onLoopback := &netlink.Addr{IPNet: network(ofLoopback + "/32")}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.AddrAdd(lo, onLoopback)
	}
	if err != nil {
		t.Fatal(err)
	}
	e.manage()
	expect("of a bridge", ofBridge, false)
	expect("of the loopback interface", ofLoopback, false)
	expect("in allow.addresses", ofNetwork, true)
	if err := netlink.AddrDel(lo, onLoopback); err != nil {
		t.Fatal(err)
	}
	e.manage()
	expect("after the node has lost it", ofLoopback, true)
}

// A DHCP server, or a pod that forges its answers, must not give a link the address of a gateway. A claim
// that requests such an address gets it: its pod is the gateway.
func TestNode_CheckAddress_refusesGateways(t *testing.T) {
	const ofClaim, ofPool, free = "10.20.0.251", "10.20.0.252", "10.20.0.253"
	e := newTestEnv(t, enforced())
	if err := e.node.SetGateways(e.nic.Index, []netip.Addr{
		netip.MustParseAddr(ofClaim), netip.MustParseAddr(ofPool),
	}); err != nil {
		t.Fatal(err)
	}
	router := nstest.New(t)
	attached, err := e.node.Attach(router.Pod(), netdev.LinkSpec{
		Parent: e.nic.Index, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 8}, Mode: netdev.Private,
		Addresses: []netip.Prefix{netip.MustParsePrefix(ofPool + "/16")},
	})
	if err != nil {
		t.Errorf("Attach with the address of a gateway, which the claim requested: %v", err)
	}
	leases, err := e.node.Attach(nstest.New(t).Pod(), netdev.LinkSpec{
		Parent: e.nic.Index, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 9}, Mode: netdev.Private, Leases: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		attachment    netdev.Attachment
		address, want string
	}{
		{leases, ofClaim, "address " + ofClaim + " is a gateway of claims or AddressPools on nic0: exclude it"},
		{leases, ofPool, "belongs to another link of nic0"},
		{leases, free, ""},
		{attached, ofPool, ""},
	} {
		err := e.node.CheckAddress(tc.attachment, netip.MustParsePrefix(tc.address+"/16"))
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("CheckAddress with %s returned %v, want %q", tc.address, err, tc.want)
		}
	}
	if err := e.node.Detach(attached); err != nil {
		t.Fatal(err)
	}
	if err := e.node.CheckAddress(leases, netip.MustParsePrefix(ofPool+"/16")); err == nil {
		t.Error("after the pod that was the gateway ended, a link may lease the address of the gateway")
	}
}

// If its claim did not request an address, a pod must not answer for the routers of others.
func TestAttack_gatewayAddresses(t *testing.T) {
	const ofClaim, ofPool, free = "10.20.0.251", "10.20.0.252", "10.20.0.253"
	config := enforced()
	config.Policy.Subnets = nil
	e := newTestEnv(t, config)
	attach := func(n byte, spec netdev.LinkSpec) (*nstest.Namespace, net.HardwareAddr) {
		pod := nstest.New(t)
		spec.Parent, spec.MAC, spec.Mode = e.nic.Index, net.HardwareAddr{2, 0, 0, 0, 0, n}, netdev.Private
		spec.Name, spec.Minor, spec.Rates = "net1", shape.FirstMinor+uint16(n), hardCap(100*mega)
		if _, err := e.node.Attach(pod.Pod(), spec); err != nil {
			t.Fatal(err)
		}
		return pod, spec.MAC
	}
	attach(1, netdev.LinkSpec{
		Addresses: []netip.Prefix{netip.MustParsePrefix("10.20.0.1/16")},
		Routes:    []netdev.Route{{Destination: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr(ofClaim)}},
	})
	if err := e.node.SetGateways(e.nic.Index, []netip.Addr{
		netip.MustParseAddr(ofClaim), netip.MustParseAddr(ofPool),
	}); err != nil {
		t.Fatal(err)
	}
	attacker, own := attach(2, netdev.LinkSpec{})
	wire, wireMAC := listen(t, e.wire, "wire"), e.wire.Interface("wire").HardwareAddr
	for i, tc := range []struct {
		name    string
		frame   []byte
		arrives bool
	}{
		{"an ARP reply for the gateway of a claim", classify.ARP(2, own, ofClaim, wireIP), false},
		{"an ARP reply for the gateway of a pool", classify.ARP(2, own, ofPool, wireIP), false},
		{"an ARP reply for a free address", classify.ARP(2, own, free, wireIP), true},
	} {
		mark := marker(i)
		frame := append(classify.EtherTo(wireMAC, own, 0x0806, tc.frame), mark...)
		sendRaw(attacker, "net1", frame)
		patience := 200 * time.Millisecond
		if tc.arrives {
			patience = 5 * time.Second
		}
		if got := wire.saw(mark, patience); got != tc.arrives {
			t.Errorf("%s: arrived at the wire: %t, want %t", tc.name, got, tc.arrives)
		}
	}
	mark := marker(9)
	sendRaw(attacker, "net1", append(classify.EtherTo(wireMAC, own, 0x86dd,
		classify.IPv6("fe80::ff:fe00:2", 58, classify.ND(136, "fe80::1"))), mark...))
	if wire.saw(mark, 200*time.Millisecond) {
		t.Error("an advertisement of the link-local address of a router arrived at the wire")
	}
}

// A pod cannot send with the address of the NIC, either from a network namespace that it creates or through a bridge.
func TestAttack_addressOfNIC(t *testing.T) {
	for name, tc := range map[string]struct {
		from func(*testEnv, *pod) (*nstest.Namespace, string)
	}{
		"a further link in a nested namespace": {func(e *testEnv, p *pod) (*nstest.Namespace, string) {
			nested := p.nest(e.t, func(nested netlink.NsFd, net1 netlink.Link) error {
				attrs := netlink.NewLinkAttrs()
				attrs.Name, attrs.ParentIndex, attrs.Namespace = "more", net1.Attrs().Index, nested
				return netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE})
			})
			nested.Do(func() error { return nstest.ConfigureLink("more") })
			return nested, "more"
		}},
		"a namespace behind a bridge": {func(e *testEnv, p *pod) (*nstest.Namespace, string) {
			return e.bridgedBehind(p), "eth0"
		}},
	} {
		for identity, arrives := range map[classify.Identity]bool{
			classify.IdentityEnforce: false, classify.IdentityAudit: true,
		} {
			t.Run(fmt.Sprintf("%s, identity %d", name, identity), func(t *testing.T) {
				needRoutes(t)
				config := enforced()
				config.Policy.Identity = identity
				e := newTestEnv(t, config)
				ns, link := tc.from(e, e.pod(0, 1, hardCap(100*mega), netdev.Private))
				wire, mark := listen(t, e.wire, "wire"), marker(1)
				frame := append(classify.EtherTo(e.wireMAC(), e.nic.MAC, 0x88b5), mark...)
				got := false
				for tries := 0; tries < 5 && !got; tries++ { // the bridge forwards nothing before its ports are up
					sendRaw(ns, link, frame)
					got = wire.saw(mark, 300*time.Millisecond)
				}
				if got != arrives {
					t.Errorf("a frame with the address of the NIC arrived: %t, want %t", got, arrives)
				}
				refused, err := e.node.Refusals(e.nic.Index, 0)
				if err != nil || refused.Dropped["SourceMAC"]+refused.Passed["SourceMAC"] == 0 {
					t.Errorf("Refusals returned %+v and error %v, want SourceMAC", refused, err)
				}
			})
		}
	}
}
