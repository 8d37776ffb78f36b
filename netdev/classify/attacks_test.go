// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
	"github.com/dra-shared/dra-driver-shared/test/kernelcheck"
)

// The tests in this file are the attacks of docs/user/security.md, with real frames.

// enforced is the configuration of a NIC that enforces identity.
func enforced() netdev.NICConfig {
	return netdev.NICConfig{Policy: classify.Policy{
		Identity: classify.IdentityEnforce,
		Subnets:  []netip.Prefix{netip.MustParsePrefix("10.20.0.0/16"), netip.MustParsePrefix("fd00:20::/64")},
	}}
}

// listener receives the frames of a link.
type listener struct {
	t  *testing.T
	fd int
}

// listen starts to receive what arrives at a link of a namespace.
func listen(t *testing.T, ns *nstest.Namespace, link string) listener {
	t.Helper()
	return listenFor(t, ns, link, unix.ETH_P_ALL)
}

// listenFor starts to receive the frames of a protocol. A socket for all protocols sees a frame before macvlans take
// it.
func listenFor(t *testing.T, ns *nstest.Namespace, link string, protocol uint16) listener {
	t.Helper()
	l := listener{t: t}
	ns.Do(func() error {
		index, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		network := protocol<<8 | protocol>>8 // in the order of the network
		if l.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(network)); err != nil {
			return err
		}
		return unix.Bind(l.fd, &unix.SockaddrLinklayer{Protocol: network, Ifindex: index.Index})
	})
	t.Cleanup(func() { _ = unix.Close(l.fd) })
	return l
}

// marker ends each frame of an attack, so that it is found at the other end.
func marker(number int) []byte { return fmt.Appendf(nil, "attack %08d", number) }

// saw reports whether a frame with a marker arrives within a time.
func (l listener) saw(mark []byte, patience time.Duration) bool {
	return l.receive(mark, patience) != nil
}

// receive returns a frame with a marker that arrives within a time, or nil.
func (l listener) receive(mark []byte, patience time.Duration) []byte {
	l.t.Helper()
	return l.find(patience, func(frame []byte) bool { return bytes.Contains(frame, mark) })
}

// find returns the first frame with a property that arrives within a time, or nil.
func (l listener) find(patience time.Duration, has func(frame []byte) bool) []byte {
	l.t.Helper()
	deadline, buffer := time.Now().Add(patience), make([]byte, 2048)
	for time.Now().Before(deadline) {
		left := unix.NsecToTimeval(max(time.Until(deadline), time.Millisecond).Nanoseconds())
		if err := unix.SetsockoptTimeval(l.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &left); err != nil {
			l.t.Fatal(err)
		}
		n, from, err := unix.Recvfrom(l.fd, buffer, 0)
		if err != nil {
			continue
		}
		if sender, ok := from.(*unix.SockaddrLinklayer); ok && sender.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if has(buffer[:n]) {
			return buffer[:n]
		}
	}
	return nil
}

// sendRaw sends a frame through a link, as a pod with CAP_NET_RAW can.
func sendRaw(ns *nstest.Namespace, link string, frame []byte) {
	ns.Do(func() error {
		index, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		err = unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: index.Index})
		if errors.Is(err, unix.ENOBUFS) { // the program dropped the frame
			return nil
		}
		return err
	})
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

// A frame that a pod forwards has no socket, whatever its addresses are.
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

// Where the network permits forwarding, the addresses of packets are not those of the link, but a pod still
// speaks neither for routers and DHCP servers nor for other shares.
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
	group := net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1} // a bridge copies multicast, and copies have no socket
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
		refused, err := e.node.Refusals(e.nic.Index, 0) // copies have no route, which would show the share
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

// In mode source, a link receives all frames of the senders that the pod lists, also
// those for a sibling or for the node.
func TestAttack_sourceMode(t *testing.T) {
	e := newTestEnvWithoutLists(t)
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	wireMAC := e.wire.Interface("wire").HardwareAddr
	frames, victims := listen(t, attacker.Namespace, "net1"), listen(t, victim.Namespace, "net1")
	number := 0
	read := func(destination net.HardwareAddr) (attacker, victim bool) {
		number++
		frame := classify.EtherTo(destination, wireMAC, 0x0800, classify.IPv4(wireIP, 17, 0, classify.UDP(1, 2)))
		sendRaw(e.wire, "wire", append(frame, marker(number)...))
		return frames.saw(marker(number), 300*time.Millisecond), victims.saw(marker(number), 300*time.Millisecond)
	}
	state := func() string {
		s, err := e.node.ReadAndGuard(attacker.attachment)
		if err != nil {
			t.Fatal(err)
		}
		return s.Blocked
	}
	if blocked := state(); blocked != "" {
		t.Fatalf("an unchanged link is blocked: %s", blocked)
	}
	attacker.Do(func() error { return changeMacvlan("net1", netlink.MACVLAN_MODE_SOURCE, wireMAC) })
	if taken, _ := read(victim.attachment.MAC); !taken {
		t.Fatal("the attack has no effect before it is detected: does the test attack?")
	}
	if blocked := state(); blocked != "the pod changed the mode of net1 from private to source, with which it could "+
		"receive the frames of others" {
		t.Fatalf("Blocked is %q", blocked)
	}
	for to, mac := range map[string]net.HardwareAddr{
		"the node": e.nic.MAC, "its sibling": victim.attachment.MAC, "itself": attacker.attachment.MAC,
	} {
		taken, received := read(mac)
		if taken || received != (to == "its sibling") {
			t.Errorf("a frame to %s: the attacker received it: %t, the sibling: %t", to, taken, received)
		}
	}
	wire := listen(t, e.wire, "wire")
	frame := classify.EtherTo(wireMAC, attacker.attachment.MAC, 0x0800,
		classify.IPv4("10.20.0.1", 17, 0, classify.UDP(1, 2)))
	sendRaw(attacker.Namespace, "net1", append(frame, marker(100)...))
	if wire.saw(marker(100), 200*time.Millisecond) {
		t.Error("a blocked link sent a frame")
	}

	attacker.Do(func() error { return changeMacvlan("net1", netlink.MACVLAN_MODE_PRIVATE, nil) })
	if blocked := state(); blocked != "" {
		t.Fatalf("after the attack was reverted: %s", blocked)
	}
	if received, _ := read(attacker.attachment.MAC); !received {
		t.Error("after the attack was reverted, the link receives nothing")
	}
}

// changeMacvlan changes the mode of a link of the current namespace. With sender, it
// gives the link a list of senders; without, it removes the list.
func changeMacvlan(name string, mode netlink.MacvlanMode, sender net.HardwareAddr) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if sender == nil {
		if err := netlink.MacvlanMACAddrFlush(link); err != nil {
			return err
		}
	}
	if err := netlink.LinkSetMacvlanMode(link, mode); err != nil {
		return err
	}
	if sender == nil {
		return nil
	}
	return netlink.MacvlanMACAddrAdd(link, sender)
}

// A link in mode source receives the frames of listed senders. With the flag nodst, it takes them from all others, and
// the node, also while it is down, in a namespace that the node does not see, where nothing shows it.
func TestAttack_listedSenders(t *testing.T) {
	needLists(t)
	for name, up := range map[string]bool{"a link that is up": true, "a link that is down": false} {
		t.Run(name, func(t *testing.T) {
			e := newTestEnv(t, enforced())
			attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
			nested := attacker.nest(t, func(nested netlink.NsFd, net1 netlink.Link) error {
				return addSourceLink("more", net1.Attrs().Index, int(nested))
			})
			nested.Do(func() error {
				link, err := netlink.LinkByName("more")
				if up {
					err = errors.Join(err, nstest.ConfigureLink("more"))
				}
				return errors.Join(err, netlink.MacvlanMACAddrAdd(link, e.wireMAC()))
			})
			const protocol = 0x88b5
			attackers := listenFor(t, nested, "more", protocol)
			for i, to := range []struct {
				name string
				ns   *nstest.Namespace
				link string
				mac  net.HardwareAddr
			}{
				{"another share", victim.Namespace, "net1", victim.attachment.MAC},
				{"the node", nstest.Current(t), "nic0", e.nic.MAC},
			} {
				receiver := listenFor(t, to.ns, to.link, protocol)
				sendRaw(e.wire, "wire", append(classify.EtherTo(to.mac, e.wireMAC(), protocol), marker(i)...))
				if !receiver.saw(marker(i), time.Second) {
					t.Errorf("a frame to %s did not arrive", to.name)
				}
				if attackers.saw(marker(i), 100*time.Millisecond) {
					t.Errorf("a frame to %s arrived at the link of the attacker", to.name)
				}
			}
		})
	}
}

// A link in mode source could have a host in its list only while frames of the host wait in the queue of a share: the
// programs look at the list before the queue, and the kernel behind it.
func TestAttack_briefListOfSenders(t *testing.T) {
	needLists(t)
	e := newTestEnv(t, enforced())
	attacker, victim := e.pod(0, 1, hardCap(mega), netdev.Private), e.pod(1, 2, hardCap(mega), netdev.Private)
	nested := attacker.nest(t, func(nested netlink.NsFd, net1 netlink.Link) error {
		return addSourceLink("more", net1.Attrs().Index, int(nested))
	})
	setListed := func(listed bool) {
		nested.Do(func() error {
			link, err := netlink.LinkByName("more")
			switch {
			case err != nil:
				return err
			case listed:
				return netlink.MacvlanMACAddrAdd(link, e.wireMAC())
			default:
				return netlink.MacvlanMACAddrDel(link, e.wireMAC())
			}
		})
	}
	nested.Do(func() error { return nstest.ConfigureLink("more") })
	const protocol = 0x88b5
	attackers, victims := listenFor(t, nested, "more", protocol), listenFor(t, victim.Namespace, "net1", protocol)
	frame := append(classify.EtherTo(victim.attachment.MAC, e.wireMAC(), protocol), make([]byte, 1400)...)
	expect := func(number int) {
		t.Helper()
		if !victims.saw(marker(number), 5*time.Second) {
			t.Errorf("frame %d did not arrive at the share", number)
		}
		if attackers.saw(marker(number), 100*time.Millisecond) {
			t.Errorf("frame %d arrived at the link of the attacker", number)
		}
	}
	setListed(true)
	sendRaw(e.wire, "wire", append(frame, marker(1)...))
	expect(1)
	setListed(false)
	if _, err := e.wire.Flood("wire", frame, false, 20*time.Millisecond); err != nil { // fills the queue
		t.Fatal(err)
	}
	sendRaw(e.wire, "wire", append(frame[:100], marker(2)...))
	setListed(true)
	expect(2)
}

// newTestEnvWithoutLists returns a testEnv whose programs do not read the lists of senders of links in mode source, as
// on kernels that do not let them. The node then has to detect such links.
func newTestEnvWithoutLists(t *testing.T) *testEnv {
	t.Helper()
	nic, wire := nstest.NIC(t, "nic0", 1500, wireIP+"/16", "fd00:20::fe/64")
	options := netdev.Options{BPFFS: nstest.MountBPFFS(t), Failpoints: func(name string, operation func() error) error {
		if name == classify.FailpointLists {
			return errors.ErrUnsupported
		}
		return operation()
	}}
	return newTestEnvWith(t, options, nic, wire, enforced())
}

// needLists skips the test if the programs do not read the lists of senders of links in mode source.
func needLists(t *testing.T) {
	t.Helper()
	c, err := openStrongest(nstest.MountBPFFS(t))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.ListsErr(); err != nil {
		kernelcheck.Skip(t, kernelcheck.SenderLists, err)
	}
}

// addSourceLink creates a link in mode source with the flag nodst, which is down, in a namespace.
func addSourceLink(name string, parent, namespace int) error {
	const flags, nodst = 2, 2 // IFLA_MACVLAN_FLAGS, MACVLAN_FLAG_NODST
	request := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	request.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	request.AddData(nl.NewRtAttr(unix.IFLA_LINK, nl.Uint32Attr(uint32(parent))))
	request.AddData(nl.NewRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(namespace))))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("macvlan"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	data.AddRtAttr(nl.IFLA_MACVLAN_MODE, nl.Uint32Attr(uint32(nl.MACVLAN_MODE_SOURCE)))
	data.AddRtAttr(flags, nl.Uint16Attr(nodst))
	request.AddData(info)
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// A link whose address the node has lost neither sends nor receives, and stays blocked
// when a plugin starts that does not know yet which addresses are lost.
func TestBlocking(t *testing.T) {
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	wireMAC, wire := e.wire.Interface("wire").HardwareAddr, listen(t, e.wire, "wire")
	for i, c := range []struct {
		blocking netdev.Blocking
		sends    bool
	}{
		{netdev.BlockIfChanged, true},
		{netdev.BlockAsBefore, true},
		{netdev.BlockAlways, false},
		{netdev.BlockAsBefore, false},
		{netdev.BlockIfChanged, true},
	} {
		a := p.attachment
		a.Blocking = c.blocking
		if err := e.node.Restore(a, hardCap(100*mega)); err != nil { // leaves a blocked link blocked
			t.Fatal(err)
		}
		if s, err := e.node.ReadAndGuard(a); err != nil || s.Blocked != "" {
			t.Fatalf("step %d: Read returned %+v and error %v, want a link that its pod did not change", i, s, err)
		}
		frame := classify.EtherTo(wireMAC, a.MAC, 0x0800, classify.IPv4("10.20.0.1", 17, 0, classify.UDP(1, 2)))
		sendRaw(p.Namespace, "net1", append(frame, marker(i)...))
		if sent := wire.saw(marker(i), 300*time.Millisecond); sent != c.sends {
			t.Errorf("step %d: the link sent a frame: %t, want %t", i, sent, c.sends)
		}
	}
}

// Changes that a pod may make to its link do not block the link.
func TestGuard_permitsHarmlessChanges(t *testing.T) {
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
	if s, err := e.node.ReadAndGuard(p.attachment); err != nil || s.Blocked != "" || s.Name != "data0" {
		t.Errorf("Read returned %+v and error %v, want a link that is not blocked", s, err)
	}
}

// A further link on the NIC receives no unicast. Without identity Enforce, it does.
func TestAttack_furtherLink(t *testing.T) {
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

// A pod whose claim requested no address must not use the addresses that the node has on other links than the NIC,
// from the time at which the node gets them.
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

// A pod whose claim requested no address must not answer for the routers of others.
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

// nest returns a namespace in which the pod has created or moved a link by f, which gets a
// descriptor of the namespace and the pod's link. The node cannot see the namespace.
func (p *pod) nest(t *testing.T, f func(nested netlink.NsFd, net1 netlink.Link) error) *nstest.Namespace {
	t.Helper()
	nested := nstest.New(t)
	p.Do(func() error {
		net1, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		return f(netlink.NsFd(nested.File.Fd()), net1)
	})
	return nested
}

// hide creates the link "more" in mode source on the NIC, in a namespace that the node cannot see.
// The link gets an address, unless it is nil, and takes the frames of a sender.
func (p *pod) hide(t *testing.T, mac, sender net.HardwareAddr) *nstest.Namespace {
	t.Helper()
	nested := p.nest(t, func(nested netlink.NsFd, net1 netlink.Link) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex, attrs.Namespace, attrs.HardwareAddr = "more", net1.Attrs().Index, nested, mac
		return netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_SOURCE})
	})
	nested.Do(func() error {
		return errors.Join(nstest.ConfigureLink("more"), changeMacvlan("more", netlink.MACVLAN_MODE_SOURCE, sender))
	})
	return nested
}

// A pod cannot send with the address of the NIC, neither from a network namespace that it creates,
// nor through a bridge.
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

// A pod can hide a link that takes the frames of others in a network namespace that it creates,
// which the node cannot look into.
func TestAttack_sourceModeInNestedNamespace(t *testing.T) {
	for name, attack := range map[string]func(*testing.T, *pod, net.HardwareAddr) (*nstest.Namespace, string){
		"the link itself": func(t *testing.T, p *pod, sender net.HardwareAddr) (*nstest.Namespace, string) {
			nested := p.nest(t, func(nested netlink.NsFd, net1 netlink.Link) error {
				return netlink.LinkSetNsFd(net1, int(nested))
			})
			nested.Do(func() error {
				return errors.Join(nstest.ConfigureLink("net1"), changeMacvlan("net1", netlink.MACVLAN_MODE_SOURCE, sender))
			})
			return nested, "net1"
		},
		"a further link": func(t *testing.T, p *pod, sender net.HardwareAddr) (*nstest.Namespace, string) {
			return p.hide(t, nil, sender), "more"
		},
		"a further link in a namespace that the node sees": func(
			t *testing.T, p *pod, sender net.HardwareAddr,
		) (*nstest.Namespace, string) {
			nested := p.hide(t, nil, sender)
			// The kernel gives the namespace an ID when the node lists a veth link between it and the pod.
			if _, err := nstest.Current(t).Socket.NamespaceID(nested.File); err != nil {
				t.Fatal(err)
			}
			return nested, "more"
		},
		"a further link with the address of the link": func(
			t *testing.T, p *pod, sender net.HardwareAddr,
		) (*nstest.Namespace, string) {
			p.Do(func() error {
				net1, err := netlink.LinkByName("net1")
				return errors.Join(err, netlink.LinkSetDown(net1))
			})
			return p.hide(t, p.attachment.MAC, sender), "more"
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := newTestEnvWithoutLists(t)
			attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
			nested, link := attack(t, attacker, e.wireMAC())
			frames, victims := listen(t, nested, link), listen(t, victim.Namespace, "net1")
			number := 0
			read := func(destination net.HardwareAddr) (attacker, victim bool) {
				number++
				frame := classify.EtherTo(destination, e.wireMAC(), 0x0800, classify.IPv4(wireIP, 17, 0, classify.UDP(1, 2)))
				sendRaw(e.wire, "wire", append(frame, marker(number)...))
				return frames.saw(marker(number), 300*time.Millisecond), victims.saw(marker(number), 300*time.Millisecond)
			}
			if taken, _ := read(victim.attachment.MAC); !taken {
				t.Fatal("the attack has no effect before it is detected: does the test attack?")
			}
			if _, err := e.node.ReadAndGuard(attacker.attachment); err != nil {
				t.Fatal(err)
			}
			e.inspect(true)
			for to, mac := range map[string]net.HardwareAddr{"the node": e.nic.MAC, "its sibling": victim.attachment.MAC} {
				taken, received := read(mac)
				if taken || received != (to == "its sibling") {
					t.Errorf("a frame to %s: the attacker received it: %t, the sibling: %t", to, taken, received)
				}
			}
			// The sources that a pod sees are of no use to it.
			nested.Do(func() error { return changeMacvlan(link, netlink.MACVLAN_MODE_SOURCE, e.lastSource(victim)) })
			if taken, _ := read(victim.attachment.MAC); taken {
				t.Error("the attacker received a frame after it had listed a source address that pods see")
			}
			nested.Do(func() error { return deleteLink(link) })
			if _, err := e.node.ReadAndGuard(attacker.attachment); err != nil {
				t.Fatal(err)
			}
			e.inspect(false)
			e.skip(10 * time.Second) // the shortest time for which the NIC stays guarded
			e.inspect(false)
			frame := classify.EtherTo(victim.attachment.MAC, e.wireMAC(), 0x0800,
				classify.IPv4(wireIP, 17, 0, classify.UDP(1, 2)))
			sendRaw(e.wire, "wire", frame)
			if source := frame[6:14]; !victims.saw(source, 300*time.Millisecond) {
				t.Error("the sender of frames is hidden after the attack has ended")
			}
		})
	}
}

// lastSource returns the source address of a frame that a pod receives from the wire.
func (e *testEnv) lastSource(p *pod) net.HardwareAddr {
	e.t.Helper()
	mark := []byte("last source")
	l := listen(e.t, p.Namespace, "net1")
	sendRaw(e.wire, "wire", append(classify.EtherTo(p.attachment.MAC, e.wireMAC(), 0x88b5), mark...))
	frame := l.receive(mark, time.Second)
	if frame == nil {
		e.t.Fatal("the pod did not receive a frame from the wire")
	}
	return net.HardwareAddr(frame[6:12])
}

// inspect checks whether the node finds a link that a pod hides, and returns whether the NIC is guarded.
func (e *testEnv) inspect(want bool) (guarded bool) {
	e.t.Helper()
	unknown, guarded, err := e.node.Inspect(e.nic.Index)
	if err != nil || len(unknown) > 0 != want {
		e.t.Fatalf("Inspect returned %v and error %v, want an address: %t", unknown, err, want)
	}
	return guarded
}

// A pod that hides a link again and again receives the frames of others until the link is detected, and
// nothing for a time that doubles.
func TestAttack_repeatedHiddenLinks(t *testing.T) {
	e := newTestEnvWithoutLists(t)
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	number := 0
	takes := func(link listener) bool {
		number++
		frame := classify.EtherTo(victim.attachment.MAC, e.wireMAC(), 0x0800,
			classify.IPv4(wireIP, 17, 0, classify.UDP(1, 2)))
		sendRaw(e.wire, "wire", append(frame, marker(number)...))
		return link.saw(marker(number), 100*time.Millisecond)
	}
	for round, hold := range []time.Duration{10 * time.Second, 20 * time.Second, 40 * time.Second} {
		nested := attacker.hide(t, nil, e.wireMAC())
		link := listen(t, nested, "more")
		if !takes(link) {
			t.Fatalf("round %d: the attack has no effect before it is detected: does the test attack?", round)
		}
		if !e.inspect(true) || takes(link) {
			t.Errorf("round %d: the NIC is not guarded after the link was detected", round)
		}
		remove := func() { nested.Do(func() error { return deleteLink("more") }) }
		remove()
		if !e.inspect(false) {
			t.Errorf("round %d: the NIC is no longer guarded when the link is gone", round)
		}
		e.skip(hold - 2*time.Second)
		e.inspect(false)
		nested = attacker.hide(t, nil, e.wireMAC())
		if link = listen(t, nested, "more"); takes(link) {
			t.Errorf("round %d: the attacker received a frame %s after its link was detected", round, hold-2*time.Second)
		}
		remove()
		e.skip(2 * time.Second)
		if e.inspect(false) {
			t.Errorf("round %d: the NIC is still guarded after %s", round, hold)
		}
	}
}

// The link of an address that all pods may use can be hidden as well. One that the node sees is not.
func TestAttack_hiddenLinkWithAllowedAddress(t *testing.T) {
	config, mac := enforced(), net.HardwareAddr{0, 0, 0x5e, 0, 1, 7}
	config.Policy.MACs = []net.HardwareAddr{mac}
	e := newTestEnv(t, config)
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	p.Do(func() error {
		net1, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex, attrs.HardwareAddr = "vrrp", net1.Attrs().Index, mac
		vrrp := &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE}
		return errors.Join(netlink.LinkAdd(vrrp), netlink.LinkSetUp(vrrp))
	})
	if e.inspect(false) {
		t.Error("the NIC is guarded because of a link of the pod that the node sees")
	}
	p.Do(func() error { return deleteLink("vrrp") })
	e.inspect(false)
	p.hide(t, mac, e.wireMAC())
	if !e.inspect(true) {
		t.Error("the NIC is not guarded although a link is hidden")
	}
}

// addDecoy creates a bridge in the pod with the interface index of the NIC.
func (p *pod) addDecoy(t *testing.T, index int) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "decoy", index
	p.Do(func() error {
		decoy := &netlink.Bridge{LinkAttrs: attrs}
		return errors.Join(netlink.LinkAdd(decoy), netlink.LinkSetUp(decoy))
	})
}

// addToDecoy creates a macvlan on the link decoy in the pod. index 0 lets the kernel choose one.
func (p *pod) addToDecoy(t *testing.T, name string, index int, mac net.HardwareAddr, mode netlink.MacvlanMode) {
	t.Helper()
	p.Do(func() error {
		decoy, err := netlink.LinkByName("decoy")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Index, attrs.ParentIndex, attrs.HardwareAddr = name, index, decoy.Attrs().Index, mac
		link := &netlink.Macvlan{LinkAttrs: attrs, Mode: mode}
		return errors.Join(netlink.LinkAdd(link), netlink.LinkSetUp(link))
	})
}

// A pod cannot cover the address of a hidden link by a link on a decoy that has the index of the NIC.
func TestAttack_decoyWithIndexOfNIC(t *testing.T) {
	t.Run("for a further link", func(t *testing.T) {
		e := newTestEnv(t, enforced())
		p, mac := e.pod(0, 1, hardCap(100*mega), netdev.Private), net.HardwareAddr{2, 0, 0, 0, 6, 1}
		p.hide(t, mac, e.wireMAC())
		p.addDecoy(t, e.nic.Index)
		p.addToDecoy(t, "shown", 0, mac, netlink.MACVLAN_MODE_BRIDGE)
		if !e.inspect(true) {
			t.Error("the NIC is not guarded although a link is hidden")
		}
	})
	t.Run("for the link", func(t *testing.T) {
		e := newTestEnv(t, enforced())
		p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
		p.Do(func() error {
			net1, err := netlink.LinkByName("net1")
			return errors.Join(err, netlink.LinkSetDown(net1))
		})
		p.hide(t, p.attachment.MAC, e.wireMAC())
		p.Do(func() error { return deleteLink("net1") })
		p.addDecoy(t, e.nic.Index)
		p.addToDecoy(t, "net1", p.attachment.Index, p.attachment.MAC, netlink.MACVLAN_MODE_PRIVATE)
		if state, err := e.node.ReadAndGuard(p.attachment); err != nil || state.Exists {
			t.Errorf("Read returned %+v and error %v, want no link", state, err)
		}
		if presence, err := e.node.Presence(p.attachment); err != nil || presence != netdev.LinkMissing {
			t.Errorf("Presence returned %v and error %v, want LinkMissing", presence, err)
		}
		if !e.inspect(true) {
			t.Error("the NIC is not guarded although a link is hidden")
		}
	})
	t.Run("a harmless link", func(t *testing.T) {
		e := newTestEnv(t, enforced())
		p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
		p.addDecoy(t, e.nic.Index)
		p.addToDecoy(t, "other", 0, nil, netlink.MACVLAN_MODE_SOURCE)
		if state, err := e.node.ReadAndGuard(p.attachment); err != nil || state.Blocked != "" {
			t.Errorf("Read returned %+v and error %v, want a link that is not blocked", state, err)
		}
	})
}

// A pod that sets its link down and up in a loop must not make the node list the links of all pods, which takes a
// request for each of them.
func TestNode_Inspect_readsOneLinkForAddressOfAttachment(t *testing.T) {
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	p.Do(func() error {
		net1, err := netlink.LinkByName("net1")
		return errors.Join(err, netlink.LinkSetDown(net1))
	})
	if err := e.node.Guard(p.attachment); err != nil {
		t.Fatal(err)
	}
	p.hide(t, p.attachment.MAC, e.wireMAC())
	requests := func() uint64 {
		e.skip(time.Minute)
		e.inspect(true) // looks up the addresses of further pods
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

// A pod that brings its link up before the node has recorded it, or that keeps its link when the claim is
// unprepared, neither sends nor receives.
func TestAttack_withoutRecord(t *testing.T) {
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
		s, err := e.node.ReadAndGuard(attacker.attachment)
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
