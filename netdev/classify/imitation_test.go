// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/kernelcheck"
)

var broadcast = net.HardwareAddr{255, 255, 255, 255, 255, 255}

// A macvlan that has the address of a host takes the broadcasts of the host from the node and from other shares: the
// kernel mistakes them for frames of that macvlan.
func TestAttack_broadcastsOfHost(t *testing.T) {
	for name, attack := range map[string]func(*testEnv) error{
		"a further link": func(e *testEnv) error {
			net1, err := netlink.LinkByName("net1")
			if err != nil {
				return err
			}
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.ParentIndex, attrs.HardwareAddr = "more", net1.Attrs().Index, e.wireMAC()
			more := &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE}
			return errors.Join(netlink.LinkAdd(more), netlink.LinkSetUp(more))
		},
		"the link itself": func(e *testEnv) error {
			net1, err := netlink.LinkByName("net1")
			return errors.Join(err, netlink.LinkSetHardwareAddr(net1, e.wireMAC()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			expectBroadcastsOfHost(t, attack, func(e *testEnv, _ *pod, arrives func() bool) {
				if arrives() {
					t.Fatal("the attack has no effect before it is detected: does the test attack?")
				}
				e.inspect(false)
			})
		})
		t.Run(name+", and thousands of further addresses", func(t *testing.T) {
			expectBroadcastsOfHost(t, attack, func(e *testEnv, attacker *pod, _ func() bool) {
				e.inspect(false)
				e.addAndRemoveAddresses(attacker)
			})
		})
	}
}

// expectBroadcastsOfHost tests that broadcasts of a host arrive at a share and at the node after an attack in the
// pod of another share. detect lets the node detect the attack.
func expectBroadcastsOfHost(
	t *testing.T, attack func(*testEnv) error, detect func(e *testEnv, attacker *pod, arrives func() bool),
) {
	t.Helper()
	e := newTestEnv(t, enforced())
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	if err := nstest.ConfigureLink("nic0", nodeIP+"/16"); err != nil {
		t.Fatal(err)
	}
	share, number := listen(t, victim.Namespace, "net1"), 0
	arrives := func() bool {
		number++
		request := classify.ARP(1, e.wireMAC(), wireIP, victim.ip)
		sendRaw(e.wire, "wire", append(classify.EtherTo(broadcast, e.wireMAC(), 0x0806, request), marker(number)...))
		return share.saw(marker(number), 500*time.Millisecond)
	}
	if !arrives() {
		t.Fatal("a request of the host does not reach the share before the attack")
	}
	e.expectResolution(e.wire, "wire", nstest.Current(t), nodeIP)
	attacker.Do(func() error { return attack(e) })
	detect(e, attacker, arrives)
	if !arrives() {
		t.Error("a request of the host for another share does not reach that share")
	}
	e.expectResolution(e.wire, "wire", nstest.Current(t), nodeIP)
}

// bridgeWith makes the link net1 a port of a bridge of the namespace that has an address, as a pod with CAP_NET_ADMIN
// can. Frames of the bridge's own network stack do not have an ingress interface.
func bridgeWith(mac net.HardwareAddr, port string, addresses ...string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = "br0", mac
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := netlink.LinkAdd(bridge); err != nil {
		return err
	}
	net1, err := netlink.LinkByName(port)
	if err != nil {
		return err
	}
	if err := errors.Join(netlink.LinkSetMaster(net1, bridge), netlink.LinkSetHardwareAddr(bridge, mac)); err != nil {
		return err
	}
	return nstest.ConfigureLink("br0", addresses...)
}

// imitateNode returns a namespace of a pod with another link, which is a port of a bridge with the node's MAC and IP
// addresses.
func (e *testEnv) imitateNode(p *pod) *nstest.Namespace {
	e.t.Helper()
	nested := p.nest(e.t, func(nested netlink.NsFd, net1 netlink.Link) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex, attrs.Namespace = "more", net1.Attrs().Index, nested
		return netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE})
	})
	nested.Do(func() error {
		if err := errors.Join(nstest.ConfigureLink("more"), bridgeWith(e.nic.MAC, "more", nodeIP+"/16")); err != nil {
			return err
		}
		br, err := netlink.LinkByName("br0")
		if err != nil {
			return err
		}
		return netlink.NeighAdd(&netlink.Neigh{
			LinkIndex: br.Attrs().Index, IP: net.ParseIP(wireIP), HardwareAddr: e.wireMAC(), State: netlink.NUD_PERMANENT,
		})
	})
	return nested
}

// sendAsNode sends a datagram of a DHCP server with the address of the node through a raw socket of a namespace.
func sendAsNode(ns *nstest.Namespace, mark []byte) {
	ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_HDRINCL, 1); err != nil {
			return err
		}
		packet := append(classify.IPv4(nodeIP, 17, 0, classify.UDP(67, 68)), mark...)
		packet[0], packet[16], packet[17], packet[18], packet[19] = 0x45, 10, 20, 0, 254
		err = unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: [4]byte{10, 20, 0, 254}})
		if errors.Is(err, unix.ENOBUFS) {
			return nil
		}
		return err
	})
}

// A pod cannot send with the NIC's address through a socket of a type that the kernel replies with.
func TestAttack_rawIPSocketWithAddressOfNIC(t *testing.T) {
	needRoutes(t)
	e := newTestEnv(t, enforced())
	nested := e.imitateNode(e.pod(0, 1, hardCap(100*mega), netdev.Private))
	wire := listen(t, e.wire, "wire")
	for try := range 10 {
		sendAsNode(nested, marker(try))
		if wire.saw(marker(try), 200*time.Millisecond) {
			t.Fatal("a datagram with the addresses of the node arrived at the wire")
		}
	}
}

// When a pod deletes a route while frames wait in a queue, the kernel replaces the link of their route by one of the
// initial namespace. Where this is the namespace of the node, as in the guests of test/lab, the node seems to have
// routed the frames.
func TestAttack_deletedRouteWithAddressOfNIC(t *testing.T) {
	needRoutes(t)
	e := newTestEnv(t, enforced())
	nested := e.imitateNode(e.pod(0, 1, hardCap(100*mega), netdev.Private))
	wire := listen(t, e.wire, "wire")
	nested.Do(func() error { return delay("more", 5_000) })
	for range 20 { // more than the queue sends in one burst
		nested.Do(func() error { return sendUDP(wireIP+":9", marker(1)) })
	}
	nested.Do(func() error {
		br, err := netlink.LinkByName("br0")
		if err != nil {
			return err
		}
		return netlink.RouteDel(&netlink.Route{
			LinkIndex: br.Attrs().Index, Dst: network("10.20.0.0/16"), Scope: netlink.SCOPE_LINK,
		})
	})
	if wire.saw(marker(1), 3*time.Second) {
		t.Error("a datagram with the addresses of the node arrived at the wire")
	}
}

// A pod that guesses the mark of the hairpin must not get past the identity checks.
func TestAttack_markOfHairpin(t *testing.T) {
	e := newTestEnv(t, enforced())
	e.needCookie()
	attacker := e.pod(0, 1, hardCap(100*mega), netdev.Bridge)
	victim := e.pod(1, 2, hardCap(100*mega), netdev.Bridge)
	hairpins, err := ebpf.LoadPinnedMap(filepath.Join(e.bpffs, "dra-shared", "v1", "dra_shared_hairpins"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer hairpins.Close()
	var value struct{ Peer, Inner, Mark uint32 }
	if err := hairpins.Lookup(uint32(e.nic.Index), &value); err != nil {
		t.Fatal(err)
	}
	inner := int(value.Inner)
	attacker.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "br0"
		bridge := &netlink.Bridge{LinkAttrs: attrs}
		if err := netlink.LinkAdd(bridge); err != nil {
			return err
		}
		net1, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		attrs.Name, attrs.Index, attrs.MasterIndex = "port", inner, bridge.Index
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "gen"}
		return errors.Join(netlink.LinkAdd(veth), netlink.LinkSetMaster(net1, bridge), nstest.ConfigureLink("br0"),
			nstest.ConfigureLink("port"), nstest.ConfigureLink("gen"))
	})
	wire := listen(t, e.wire, "wire")
	frame := classify.EtherTo(e.wireMAC(), victim.attachment.MAC, 0x88b5) // of IP, br_netfilter drops what is not valid
	send := func(fd int, index int, mark uint32, frame []byte) error {
		oob := make([]byte, unix.CmsgSpace(4))
		h := (*unix.Cmsghdr)(unsafe.Pointer(&oob[0]))
		h.Level, h.Type = unix.SOL_SOCKET, unix.SO_MARK
		h.SetLen(unix.CmsgLen(4))
		binary.NativeEndian.PutUint32(oob[unix.CmsgSpace(0):], mark)
		return unix.Sendmsg(fd, frame, oob, &unix.SockaddrLinklayer{Ifindex: index}, 0)
	}
	attacker.Do(func() error {
		gen, err := netlink.LinkByName("gen")
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for number := range 20 { // the bridge forwards nothing before its ports are up
			if err := send(fd, gen.Attrs().Index, value.Mark, append(frame, marker(number)...)); err != nil {
				return err
			}
			if wire.saw(marker(number), 200*time.Millisecond) {
				t.Error("a frame with the MAC address of a sibling arrived at the wire")
				break
			}
		}
		return nil
	})
}

// A pod cannot release the lease of another host of a DHCP server, or request addresses for others.
func TestAttack_messagesOfDHCPClient(t *testing.T) {
	e := newTestEnv(t, enforced())
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	wire := listen(t, e.wire, "wire")
	own, other := attacker.attachment.MAC, victim.attachment.MAC
	for i, tc := range []struct {
		name, source, ciaddr string
		chaddr               net.HardwareAddr
		arrives              bool
	}{
		{"its own lease", "10.20.0.1", "10.20.0.1", own, true},
		{"a request without address", "0.0.0.0", "0.0.0.0", own, true},
		{"the lease of a sibling", "10.20.0.1", "10.20.0.2", other, false},
		{"a request for another MAC address", "0.0.0.0", "0.0.0.0", net.HardwareAddr{2, 9, 9, 9, 9, 9}, false},
		{"the address of a sibling", "10.20.0.1", "10.20.0.2", own, false},
	} {
		frame := classify.EtherTo(e.wireMAC(), own, 0x0800,
			classify.IPv4(tc.source, 17, 0, classify.DHCP(tc.chaddr, tc.ciaddr)))
		sendRaw(attacker.Namespace, "net1", append(frame, marker(i)...))
		if got := wire.saw(marker(i), 300*time.Millisecond); got != tc.arrives {
			t.Errorf("%s: arrived: %t, want %t", tc.name, got, tc.arrives)
		}
	}
}

// The kernel divides a packet of UDP into datagrams after the programs have seen it. They check the first one only.
func TestAttack_messagesOfDHCPClientInSegments(t *testing.T) {
	e := newTestEnv(t, enforced())
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	message := func(mac net.HardwareAddr, number int) []byte {
		const header, sname = 8, 44 // the message follows the UDP header
		m := classify.DHCP(mac, "0.0.0.0")[header:]
		copy(m[sname:], marker(number))
		return m
	}
	own, other := message(attacker.attachment.MAC, 1), message(victim.attachment.MAC, 2)
	wire := listen(t, e.wire, "wire")
	var client *net.UDPConn
	nstest.RunIn(t, attacker.File, func() (err error) {
		client, err = net.DialUDP("udp4", &net.UDPAddr{IP: net.ParseIP(attacker.ip), Port: 68},
			&net.UDPAddr{IP: net.ParseIP(wireIP), Port: 67})
		return err
	})
	defer client.Close()
	if _, err := client.Write(own); err != nil || !wire.saw(marker(1), time.Second) {
		t.Fatalf("the pod's own message did not arrive, error %v", err)
	}
	if err := setSegmentSize(client, len(own)); err != nil {
		t.Fatal(err)
	}
	for _, attempt := range []string{"that reports an ICMP error of the first message", "that sends"} {
		_, err := client.Write(append(own, other...))
		if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatalf("write %s: %v", attempt, err)
		}
	}
	if wire.saw(marker(2), 300*time.Millisecond) {
		t.Error("a message with the MAC address of another link arrived behind one of the pod's own")
	}
}

// The kernel of a pod cannot assign the address of another share to the node.
func TestAttack_addressOfSiblingWithAddressOfNIC(t *testing.T) {
	e := newTestEnv(t, enforced())
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	if e.sendsKernelARP(attacker, e.nic.MAC, victim.ip) {
		t.Error("an ARP request with the address of the NIC and of another share arrived at the wire")
	}
}

// The kernel of a pod sends ARP without a socket and without a route.
func TestAttack_kernelARPWithForeignAddress(t *testing.T) {
	for name, identity := range map[string]func(e *testEnv, victim *pod) (net.HardwareAddr, string){
		"of a host, with the NIC's MAC address": func(e *testEnv, _ *pod) (net.HardwareAddr, string) {
			return e.nic.MAC, wireIP
		},
		"of a sibling, with its MAC address": func(_ *testEnv, victim *pod) (net.HardwareAddr, string) {
			return victim.attachment.MAC, victim.ip
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := newTestEnv(t, enforced())
			e.requireARPSender()
			restarted := *e
			restarted.node = newNode(t, netdev.Options{BPFFS: e.bpffs}) // as when the plugin starts again
			restarted.manage()
			e = &restarted
			attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
			mac, ip := identity(e, victim)
			if e.sendsKernelARP(attacker, mac, ip) {
				t.Errorf("an ARP request from %s with the address %s arrived at the wire", mac, ip)
			}
			if dropped := e.refusals(attacker).Dropped["SourceMAC"]; dropped == 0 {
				t.Error("no frame was counted as dropped for the share that sent it")
			}
			if dropped := e.refusals(victim).Dropped["SourceMAC"]; dropped != 0 {
				t.Errorf("frames counted as dropped for the other share: got %d, want 0", dropped)
			}
		})
	}
}

// A pod may have its addresses on a bridge.
func TestIdentity_kernelARPOfBridge(t *testing.T) {
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	if !e.sendsKernelARP(p, p.attachment.MAC, p.ip) {
		t.Error("no ARP request of a bridge with the addresses of the link arrived at the wire")
	}
}

// The node can send ARP even after another program has removed the pin of the program that traces it.
func TestIdentity_nodeARPWithoutPin(t *testing.T) {
	e := newTestEnv(t, enforced())
	e.requireARPSender()
	if err := nstest.ConfigureLink("nic0", nodeIP+"/16"); err != nil {
		t.Fatal(err)
	}
	e.manage()
	pin := filepath.Join(e.bpffs, "dra-shared", "links", "arp-senders")
	for range 2 {
		if err := os.Remove(pin); err != nil {
			t.Fatal(err)
		}
		e.expectResolution(nstest.Current(t), "nic0", e.wire, wireIP)
		e.manage()
		if _, err := os.Stat(pin); err != nil {
			t.Fatalf("the pin after Manage: %v", err)
		}
	}
}

// Check does not keep maps open: Manage uses the maps that are pinned when it is called, and not maps that the other
// process has unpinned since Check.
func TestNode_Check_keepsNoMaps(t *testing.T) {
	e := newTestEnv(t, enforced())
	next := newNode(t, netdev.Options{BPFFS: e.bpffs})
	if err := next.Check(e.config); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(e.bpffs, "dra-shared")); err != nil {
		t.Fatal(err)
	}
	if _, err := next.Manage(e.config); err != nil {
		t.Fatal(err)
	}
	pins, err := filepath.Glob(filepath.Join(e.bpffs, "dra-shared", "*", "dra_shared_links"))
	if err != nil || len(pins) == 0 {
		t.Errorf("the map of links is not pinned after Manage (error %v)", err)
	}
}

// refusals returns the numbers of refused frames of a pod's share.
func (e *testEnv) refusals(p *pod) classify.Refusals {
	e.t.Helper()
	refusals, err := e.node.Refusals(p.attachment.Parent, p.attachment.Minor)
	if err != nil {
		e.t.Fatal(err)
	}
	return refusals
}

// requireARPSender skips the test if the classifier does not know the sender of ARP on this kernel; see package
// kernelcheck.
func (e *testEnv) requireARPSender() {
	e.t.Helper()
	for _, r := range e.node.Trials() {
		if r.Key == e.node.ClassifierKey() && r.ARP != nil {
			kernelcheck.Skip(e.t, kernelcheck.ARPSender, r.ARP)
		}
	}
}

// sendsKernelARP reports whether ARP of a bridge in a pod with a MAC address and an IP address arrives at the wire.
func (e *testEnv) sendsKernelARP(p *pod, mac net.HardwareAddr, ip string) bool {
	e.t.Helper()
	wire := listen(e.t, e.wire, "wire")
	p.Do(func() error {
		net1, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		own, err := netlink.ParseAddr(p.ip + "/16")
		return errors.Join(err, netlink.AddrDel(net1, own), bridgeWith(mac, "net1", ip+"/16"))
	})
	for range 20 { // the bridge forwards nothing before its ports are up
		p.Do(func() error { return ignoreUnreachable(sendUDP("10.20.9.9:9", []byte("x"))) })
		if wire.saw(classify.ARP(1, mac, ip, "10.20.9.9")[:18], 200*time.Millisecond) {
			return true
		}
	}
	return false
}

// A first fragment does not have ports if its headers go on in the next one, although bytes follow in the frame.
func TestAttack_headersAfterEndOfPacket(t *testing.T) {
	e := newTestEnv(t, enforced())
	attacker := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	wire := listen(t, e.wire, "wire")
	options := []byte{17, 1, 1, 4, 0, 0, 0, 0} // the first half of destination options, then UDP
	packet := classify.IPv6("fd00:20::1", 44, classify.Extension(60, 1), options)
	packet[4], packet[5] = 0, 16                                               // the payload ends here
	packet = append(packet, append(make([]byte, 8), classify.UDP(5, 6)...)...) // behind the packet
	frame := classify.EtherTo(e.wireMAC(), attacker.attachment.MAC, 0x86dd, packet)
	sendRaw(attacker.Namespace, "net1", append(frame, marker(1)...))
	if wire.saw(marker(1), 500*time.Millisecond) {
		t.Error("a fragment that hides its ports arrived")
	}
}
