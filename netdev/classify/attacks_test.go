// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// The tests in this file are the attacks of docs/user/security.md, with real frames.

// enforced is the configuration of a NIC that enforces identity.
func enforced() netdev.NICConfig {
	return netdev.NICConfig{Policy: classify.Policy{
		Identity: classify.IdentityEnforce,
		Subnets:  []netip.Prefix{netip.MustParsePrefix("10.20.0.0/16"), netip.MustParsePrefix("fd00:20::/64")},
	}}
}

func TestAttack_rawFrames(t *testing.T) {
	e := newTestEnv(t, enforced())
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	wire, wireMAC := listen(t, e.wire, "wire"), e.wire.Interface("wire").HardwareAddr
	own, other, node := attacker.attachment.MAC, victim.attachment.MAC, net.HardwareAddr{2, 7, 7, 7, 7, 7}
	to := func(source net.HardwareAddr, protocol uint16, payload ...[]byte) []byte {
		return classify.EtherTo(wireMAC, source, protocol, payload...)
	}
	ports := classify.UDP(5000, 5001)
	hasCookie, foreignMACs := e.node.ClassifierKey().HasCookie(), uint64(3)
	if !hasCookie {
		foreignMACs = 0 // the frames do not count for the attacker
	}
	for i, tc := range []struct {
		name    string
		frame   []byte
		arrives bool
	}{
		{"the pod's own addresses", to(own, 0x0800, classify.IPv4("10.20.0.1", 17, 0, ports)), true},
		{"the pod's own addresses, IPv6", to(own, 0x86dd, classify.IPv6("fd00:20::1", 17, ports)), true},
		{"an ARP request", to(own, 0x0806, classify.ARP(1, own, "10.20.0.1", wireIP)), true},
		{"a sibling's MAC", to(other, 0x0800, classify.IPv4("10.20.0.2", 17, 0, ports)), !hasCookie},
		{"the NIC's MAC", to(e.nic.MAC, 0x0800, classify.IPv4("10.20.0.1", 17, 0, ports)), !hasCookie},
		{"another node's MAC", to(node, 0x0800, classify.IPv4("10.20.0.1", 17, 0, ports)), false},
		{"a sibling's IPv4 address", to(own, 0x0800, classify.IPv4("10.20.0.2", 17, 0, ports)), false},
		{"a sibling's IPv6 address", to(own, 0x86dd, classify.IPv6("fd00:20::2", 17, ports)), false},
		{"a forged ARP reply", to(own, 0x0806, classify.ARP(2, own, wireIP, "10.20.0.2")), false},
		{
			"a forged neighbor advertisement",
			to(own, 0x86dd, classify.IPv6("fd00:20::1", 58, classify.ND(136, "fd00:20::fe"))), false,
		},
		{
			"a router advertisement",
			to(own, 0x86dd, classify.IPv6("fe80::ff:fe00:1", 58, classify.ND(134, ""))), false,
		},
		{"a DHCP offer", to(own, 0x0800, classify.IPv4("10.20.0.1", 17, 0, classify.UDP(67, 68))), false},
		{
			"a fragment with the pod's own address",
			to(own, 0x86dd, classify.IPv6("fd00:20::1", 44, classify.Extension(17, 8), ports)), true,
		},
		{
			"a fragment with a sibling's address",
			to(own, 0x86dd, classify.IPv6("fd00:20::2", 44, classify.Extension(17, 8), ports)), false,
		},
		{"an IPv4 fragment with a sibling's address", to(own, 0x0800, classify.IPv4("10.20.0.2", 17, 0x2001, ports)), false},
		{
			"a router advertisement behind options",
			to(own, 0x86dd, classify.IPv6("fe80::ff:fe00:1", 60, classify.Extension(58, 0), classify.ND(134, ""))), false,
		},
		{
			"a DHCPv6 server's message in a fragment",
			to(own, 0x86dd, classify.IPv6("fd00:20::1", 44, classify.Extension(17, 1), classify.UDP(547, 546))), false,
		},
		{"a DHCPv6 server's message", to(own, 0x86dd, classify.IPv6("fd00:20::1", 17, classify.UDP(547, 546))), false},
		{"a VLAN tag", to(own, 0x8100, []byte{0, 100, 8, 0}, classify.IPv4("10.20.0.1", 17, 0, ports)), false},
		{"a query of IGMP", to(own, 0x0800, classify.IPv4("10.20.0.1", 2, 0, []byte{0x11, 0, 0, 0, 0, 0, 0, 0})), false},
		{
			"a query of MLD",
			to(own, 0x86dd, classify.IPv6("fe80::ff:fe00:1", 0, classify.Extension(58, 0), classify.ND(130, ""))), false,
		},
		{"VRRP", to(own, 0x0800, classify.IPv4("10.20.0.1", 112, 0, ports)), false},
		{"PPPoE", to(own, 0x8863, []byte{0x11, 7, 0, 0, 0, 4, 1, 1}), false},
		{
			"a bridge's message",
			classify.EtherTo(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0}, own, 38, []byte{0x42, 0x42, 3}), false,
		},
	} {
		mark := marker(i)
		sendRaw(attacker.Namespace, "net1", append(tc.frame, mark...))
		patience := 200 * time.Millisecond
		if tc.arrives {
			patience = 5 * time.Second
		}
		if got := wire.saw(mark, patience); got != tc.arrives {
			t.Errorf("%s: arrived at the wire: %t, want %t", tc.name, got, tc.arrives)
		}
	}
	refusals, err := e.node.Refusals(attacker.attachment.Parent, attacker.attachment.Minor)
	if err != nil || refusals.Dropped["ARP"] != 1 || refusals.Dropped["SourceMAC"] != foreignMACs {
		t.Errorf("Refusals returned %+v and error %v, want ARP once and SourceMAC %d times", refusals, err, foreignMACs)
	}
}

// A frame that a pod forwards does not have a socket, whatever its addresses are.
func TestAttack_forwardedFrames(t *testing.T) {
	for name, forwarding := range map[string]bool{"refused": false, "allowed": true} {
		t.Run(name, func(t *testing.T) {
			config := enforced()
			config.Policy.Forwarding = forwarding
			e := newTestEnv(t, config)
			router := e.pod(0, 1, hardCap(100*mega), netdev.Private)
			inner, wire, mark := e.namespaceBehind(router), listen(t, e.wire, "wire"), marker(1)
			arrived, refusals := false, classify.Refusals{}
			for range 50 { // until the pod has resolved the receiver's address
				inner.Do(func() error { return sendUDP(wireIP+":9", mark) })
				arrived = wire.saw(mark, 100*time.Millisecond)
				var err error
				if refusals, err = e.node.Refusals(router.attachment.Parent, router.attachment.Minor); err != nil {
					t.Fatal(err)
				}
				if arrived || len(refusals.Dropped) > 0 {
					break
				}
			}
			if arrived != forwarding || (refusals.Dropped["Forwarded"] > 0) == forwarding {
				t.Errorf("a forwarded frame arrived: %t, want %t; refused: %+v", arrived, forwarding, refusals)
			}
		})
	}
}

// Where the network permits forwarding, packets do not have the link's addresses, but a pod still does not speak for
// routers, DHCP servers, or other shares.
func TestAttack_contentOfForwardedFrames(t *testing.T) {
	needRoutes(t)
	config := enforced()
	config.Policy.Forwarding = true
	e := newTestEnv(t, config)
	p, sibling := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	behind, wire, mac := e.bridgedBehind(p), listen(t, e.wire, "wire"), p.attachment.MAC
	p.Do(func() (err error) { // br_netfilter drops packets without checksum
		for _, table := range []string{"iptables", "ip6tables", "arptables"} {
			setErr := nstest.SetSysctl("net/bridge/bridge-nf-call-"+table, "0")
			if !errors.Is(setErr, os.ErrNotExist) { // without br_netfilter
				err = errors.Join(err, setErr)
			}
		}
		return err
	})
	group := net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1} // a bridge copies multicast, and copies do not have a socket
	datagram := func(port uint16) []byte {
		return classify.EtherTo(broadcast, mac, 0x0800, classify.IPv4("10.70.0.2", 17, 0, classify.UDP(port, 2)))
	}
	number := 0
	arrives := func(frame []byte, patience time.Duration) bool {
		number++
		sendRaw(behind, "eth0", append(frame, marker(number)...))
		return wire.saw(marker(number), patience)
	}
	ready := false
	for tries := 0; tries < 50 && !ready; tries++ { // the bridge forwards nothing before its ports are up
		ready = arrives(datagram(1), 100*time.Millisecond)
	}
	if !ready {
		t.Fatal("a forwarded datagram with a foreign address did not arrive")
	}
	arp := func(ip string) []byte {
		return classify.EtherTo(broadcast, mac, 0x0806, classify.ARP(1, mac, ip, wireIP))
	}
	for _, tc := range []struct {
		name   string
		reason classify.Reason
		frame  []byte
	}{
		{"ARP with the address of a host behind the pod", "", arp("10.70.0.2")},
		{"ARP with the address of a sibling", "ARP", arp(sibling.ip)},
		{"a solicitation with the address of a host behind the pod", "", classify.EtherTo(group, mac, 0x86dd,
			classify.IPv6("fd00:70::2", 58, classify.ND(135, "fd00:70::3", classify.Option(1, mac))))},
		{"a solicitation with the address of a sibling", "NeighborDiscovery", classify.EtherTo(group, mac, 0x86dd,
			classify.IPv6("fd00:20::2", 58, classify.ND(135, "fd00:20::3", classify.Option(1, mac))))},
		{"a router advertisement", "RouterAdvertisement", classify.EtherTo(group, mac, 0x86dd,
			classify.IPv6("fe80::1", 58, classify.ND(134, "")))},
		{"a DHCP offer", "DHCPServer", datagram(67)},
		{"a VLAN tag", "VLAN", classify.EtherTo(broadcast, mac, 0x8100, []byte{0, 5, 8, 0}, make([]byte, 40))},
	} {
		if got := arrives(tc.frame, 300*time.Millisecond); got != (tc.reason == "") {
			t.Errorf("%s: arrived: %t, want %t", tc.name, got, tc.reason == "")
		}
		refused, err := e.node.Refusals(e.nic.Index, 0) // copies do not have a route, which would show the share
		if tc.reason != "" && (err != nil || refused.Dropped[tc.reason] == 0) {
			t.Errorf("%s: Refusals returned %+v and error %v, want %s", tc.name, refused, err, tc.reason)
		}
	}
}

// Frames that a pod bridges with the address of another link do not count for the share of that link.
func TestAttack_bridgedFramesWithAddressOfSibling(t *testing.T) {
	needRoutes(t)
	e := newTestEnv(t, enforced())
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	router, inner := e.bridgedNamespaces(attacker) // the frames lose their socket in the router
	router.Do(func() error {
		out, err := netlink.LinkByName("out")
		return errors.Join(err, netlink.LinkSetHardwareAddr(out, victim.attachment.MAC))
	})
	wire, counted := listen(t, e.wire, "wire"), uint64(0)
	for tries := 0; tries < 50 && counted == 0; tries++ { // the bridge forwards nothing before its ports are up
		inner.Do(func() error { return sendUDP(wireIP+":9", marker(tries)) })
		if wire.saw(marker(tries), 50*time.Millisecond) {
			t.Fatal("a bridged frame with the address of another share arrived")
		}
		refused, err := e.node.Refusals(e.nic.Index, 0)
		if err != nil {
			t.Fatal(err)
		}
		counted = refused.Dropped["Forwarded"]
	}
	refused, err := e.node.Refusals(victim.attachment.Parent, victim.attachment.Minor)
	if err != nil || len(refused.Dropped) > 0 || counted == 0 {
		t.Errorf("Refusals of the victim returned %+v and error %v, want none; of no share %d, want some",
			refused, err, counted)
	}
}

// A pod that may forward can also bridge ARP with the address of another share. It must not use up the number of
// broadcasts that the other share may send.
func TestAttack_bridgedARPOfSibling(t *testing.T) {
	needRoutes(t)
	config := enforced()
	config.Policy.Forwarding = true
	e := newTestEnv(t, config)
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	behind, mac := e.bridgedBehind(attacker), victim.attachment.MAC
	request := classify.EtherTo(broadcast, mac, 0x0806, classify.ARP(1, mac, victim.ip, wireIP))
	e.awaitFirst(behind, "eth0", request)
	sender, err := nstest.NewMarkSender(behind, "eth0", 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	for range 3000 {
		if err := sender.Send(request); err != nil {
			t.Fatal(err)
		}
	}
	wire := listen(t, e.wire, "wire") // what waits behind the flood would not fit into an earlier one
	sendRaw(victim.Namespace, "net1", append(request, marker(1)...))
	if !wire.saw(marker(1), time.Second) {
		t.Error("a request of the other share did not arrive")
	}
}

func sendUDP(to string, payload []byte) error {
	conn, err := net.Dial("udp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.Write(payload)
	return err
}

// Another link on the NIC does not receive unicast. Without identity Enforce, it does.
func TestAttack_additionalLink(t *testing.T) {
	for identity, receives := range map[classify.Identity]bool{
		classify.IdentityEnforce: false, classify.IdentityAudit: true,
	} {
		t.Run(fmt.Sprint(identity), func(t *testing.T) {
			config := enforced()
			config.Policy.Identity = identity
			e := newTestEnv(t, config)
			if got := e.furtherLinkReceives(nil, e.wire); got != receives {
				t.Errorf("a further link of the pod received a unicast frame: %t, want %t", got, receives)
			}
		})
	}
}

// furtherLinkReceives reports whether a link that a pod creates next to its own receives a unicast frame. mac is the
// address of the link; nil means any.
func (e *testEnv) furtherLinkReceives(mac net.HardwareAddr, wire *nstest.Namespace) bool {
	t := e.t
	t.Helper()
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	p.Do(func() error {
		link, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex, attrs.HardwareAddr = "more", link.Attrs().Index, mac
		further := &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}
		if err := netlink.LinkAdd(further); err != nil {
			return err
		}
		return netlink.LinkSetUp(further)
	})
	more := p.Interface("more")
	frames := listen(t, p.Namespace, "more")
	frame := classify.EtherTo(more.HardwareAddr, wire.Interface("wire").HardwareAddr, 0x0800,
		classify.IPv4(wireIP, 17, 0, classify.UDP(1, 2)))
	sendRaw(wire, "wire", append(frame, marker(1)...))
	return frames.saw(marker(1), 300*time.Millisecond)
}

// A router advertisement from the wire reaches the node, and no share.
func TestAttack_routerAdvertisementFromWire(t *testing.T) {
	for name, allowed := range map[string]bool{"by default": false, "if the network allows it": true} {
		t.Run(name, func(t *testing.T) {
			config := enforced()
			config.Policy.Autoconf = allowed
			e := newTestEnv(t, config)
			p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
			share, node := listen(t, p.Namespace, "net1"), listen(t, nstest.Current(t), e.nic.Name)
			advertisement := classify.IPv6("fe80::1", 58, classify.ND(134, ""))
			hidden := [][]byte{} // Linux accepts seven headers of the smallest size
			for range 6 {
				hidden = append(hidden, classify.Extension(60, 0))
			}
			hidden = append(hidden, classify.Extension(58, 0), classify.ND(134, ""))
			group := net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}
			for i, frame := range [][]byte{
				classify.EtherTo(group, e.wireMAC(), 0x86dd, advertisement),
				classify.EtherTo(group, e.wireMAC(), 0x86dd, classify.IPv6("fe80::1", 60, hidden...)),
				// The kernel removes both tags, because their VLAN is 0.
				classify.EtherTo(group, e.wireMAC(), 0x8100, []byte{0, 0, 0x81, 0, 0, 0, 0x86, 0xdd}, advertisement),
			} {
				sendRaw(e.wire, "wire", append(frame, marker(i)...))
				if got := share.saw(marker(i), time.Second); got != allowed {
					t.Errorf("packet %d: the share received the advertisement: %t, want %t", i, got, allowed)
				}
				if !node.saw(marker(i), time.Second) {
					t.Errorf("packet %d: the node did not receive the advertisement", i)
				}
			}
		})
	}
}

// A pod that brings its link up before the node has recorded it, or that keeps its link when the claim is unprepared,
// cannot send or receive.
func TestAttack_unrecordedLink(t *testing.T) {
	bpffs := nstest.MountBPFFS(t)
	nic, wire := nstest.NIC(t, "nic0", 1500, wireIP+"/16", "fd00:20::fe/64")
	pod, early := nstest.New(t), 0
	var e *testEnv
	number := 0
	// passes reports whether a frame from a link of a pod, and one to it, arrives.
	passes := func(ns *nstest.Namespace, link string, mac net.HardwareAddr) (sent, received bool) {
		number += 2
		atWire, atLink := listen(t, e.wire, "wire"), listen(t, ns, link)
		payload := classify.IPv4("10.20.0.1", 17, 0, classify.UDP(1, 2))
		sendRaw(ns, link, append(classify.EtherTo(e.wireMAC(), mac, 0x0800, payload), marker(number)...))
		payload = classify.IPv4(wireIP, 17, 0, classify.UDP(1, 2))
		sendRaw(e.wire, "wire", append(classify.EtherTo(mac, e.wireMAC(), 0x0800, payload), marker(number+1)...))
		return atWire.saw(marker(number), 200*time.Millisecond), atLink.saw(marker(number+1), 200*time.Millisecond)
	}
	mac := func(n byte) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, n} }
	e = newTestEnvWith(t, netdev.Options{BPFFS: bpffs, Failpoints: func(name string, operation func() error) error {
		if name == "put identity in maps" {
			early++
			pod.Do(func() error {
				link, err := netlink.LinkByName("net1")
				return errors.Join(err, netlink.LinkSetUp(link))
			})
			if sent, received := passes(pod, "net1", mac(1)); sent || received {
				t.Errorf("a link without record sent: %t, received: %t", sent, received)
			}
		}
		return operation()
	}}, nic, wire, enforced())
	attach := func(ns *nstest.Namespace, mac net.HardwareAddr) netdev.Attachment {
		a, err := e.node.Attach(ns.Pod(), netdev.LinkSpec{
			Parent: e.nic.Index, Name: "net1", MAC: mac, Mode: netdev.Private, Minor: shape.FirstMinor,
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.20.0.1/16")}, Rates: hardCap(100 * mega),
		})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	attached := attach(pod, mac(1))
	if sent, received := passes(pod, "net1", mac(1)); !sent || !received || early == 0 {
		t.Fatalf("an attached link sent: %t, received: %t; %d early attempts", sent, received, early)
	}

	nested := nstest.New(t)
	pod.Do(func() error {
		link, err := netlink.LinkByName("net1")
		return errors.Join(err, netlink.LinkSetNsFd(link, int(nested.File.Fd())))
	})
	nested.Do(func() error { return nstest.ConfigureLink("net1", "10.20.0.1/16") })
	if err := e.node.Detach(attached); err != nil {
		t.Fatal(err)
	}
	pod = nstest.New(t) // gets the address
	attach(pod, mac(2))
	if sent, received := passes(nested, "net1", mac(1)); sent || received {
		t.Errorf("a link of a claim that was unprepared sent: %t, received: %t", sent, received)
	}
	if sent, received := passes(pod, "net1", mac(2)); !sent || !received {
		t.Errorf("the next link with the address sent: %t, received: %t", sent, received)
	}
}

// deleteLink deletes a link of the current namespace.
func deleteLink(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.LinkDel(link)
}

// A pod cannot reach shares that are isolated from it by changing the mode of its link, or
// divert frames that a share sends to the network by a link with the address of their
// receiver.
func TestAttack_modeBridge(t *testing.T) {
	e := newTestEnv(t, enforced())
	attacker := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	victim := e.pod(1, 2, hardCap(100*mega), netdev.Bridge)
	frames := listen(t, victim.Namespace, "net1")
	for i, mode := range []netlink.MacvlanMode{netlink.MACVLAN_MODE_BRIDGE, netlink.MACVLAN_MODE_VEPA} {
		attacker.Do(func() error {
			link, err := netlink.LinkByName("net1")
			if err != nil {
				return err
			}
			return netlink.LinkSetMacvlanMode(link, mode)
		})
		frame := classify.EtherTo(victim.attachment.MAC, attacker.attachment.MAC, 0x0800,
			classify.IPv4(attacker.ip, 17, 0, classify.UDP(1, 2)))
		sendRaw(attacker.Namespace, "net1", append(frame, marker(i)...))
		if frames.saw(marker(i), 300*time.Millisecond) {
			t.Errorf("a private share reached another share after it set the mode %d", mode)
		}
		s, err := e.node.ReadAndBlock(attacker.attachment)
		if err != nil || s.Blocked == "" {
			t.Errorf("Read returned %q and error %v, want a link that is blocked for mode %d", s.Blocked, err, mode)
		}
	}
	attacker.Do(func() error {
		link, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex, attrs.HardwareAddr = "more", link.Attrs().Index, e.wireMAC()
		further := &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}
		return errors.Join(netlink.LinkAdd(further), netlink.LinkSetUp(further))
	})
	e.expectRate("to the network, past a link with the address of its host", e.measure(e.fromPod(victim))[0], 100*mega)
}
