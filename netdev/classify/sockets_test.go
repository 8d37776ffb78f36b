// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// eth0 connects a pod to another namespace, as the cluster network does on a node that switches frames between its
// pods. The other end is the link "lxc0".
func (p *pod) eth0(t *testing.T, other *nstest.Namespace) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "lxc0"
	other.Do(func() error {
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(p.File.Fd())}
		return errors.Join(netlink.LinkAdd(veth), nstest.ConfigureLink("lxc0", "10.60.0.1/24"))
	})
	t.Cleanup(func() { other.Do(func() error { return netlink.LinkDel(&netlink.Veth{LinkAttrs: attrs}) }) })
	p.Do(func() error { return nstest.ConfigureLink("eth0", "10.60.0.2/24") })
}

// returnFrames makes a pod send the frames that it receives from eth0 through its link of the share.
var returnFrames = map[string]func(t *testing.T, p *pod){
	"a redirect": func(_ *testing.T, p *pod) {
		p.Do(func() error { return redirect(linkIndex("eth0"), linkIndex("net1")) })
	},
	"a bridge": func(t *testing.T, p *pod) {
		p.Do(func() error {
			nstest.Bridge(t, "br0", "eth0", "net1")
			return nil
		})
	},
}

// linkIndex returns the interface index of a link in the namespace of the thread; 0 if there is none.
func linkIndex(name string) int {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return 0
	}
	return link.Index
}

// A frame that a pod receives keeps the socket of its sender when the pod sends it again through its link. It
// must not pass as a frame of the sender: the pod can change what the frame contains.
func TestAttack_foreignSockets(t *testing.T) {
	for how, returnThem := range returnFrames {
		t.Run(how, func(t *testing.T) {
			e := newTestEnv(t, enforced())
			attacker := e.pod(0, 1, hardCap(10*mega), netdev.Private)
			victim := e.pod(1, 2, hardCap(10*mega), netdev.Private)
			wire := listen(t, e.wire, "wire")
			expect := func(number int, sender *nstest.Namespace, source net.HardwareAddr, content string) {
				t.Helper()
				sendRaw(sender, "lxc0", append(classify.EtherTo(e.wireMAC(), source, 0x88b5), marker(number)...))
				if wire.saw(marker(number), 300*time.Millisecond) {
					t.Errorf("%s arrived", content)
				}
			}
			node := nstest.Current(t)
			attacker.eth0(t, node)
			returnThem(t, attacker)
			expect(1, node, e.nic.MAC, "a frame of the node with the address of the NIC")
			expect(2, node, net.HardwareAddr{2, 9, 9, 9, 9, 9}, "a frame of the node with an address of no link")
			expect(3, node, attacker.attachment.MAC, "a frame of the node with the address of the pod")
			other := e.pod(2, 3, hardCap(10*mega), netdev.Private)
			other.eth0(t, victim.Namespace)
			returnThem(t, other)
			expect(4, victim.Namespace, victim.attachment.MAC, "a frame of another share with its address")
			if refused := e.refusals(victim); refused.Dropped["SourceMAC"]+refused.Dropped["Forwarded"] > 1 {
				t.Errorf("the share whose socket was used has the refusals %+v", refused)
			}
		})
	}
}

// The frames that a pod wraps in a tunnel keep the sockets of their senders, too, and have not arrived at a link of the
// pod since. They count for the pod.
func TestAttack_foreignSocketsInTunnel(t *testing.T) {
	needRoutes(t)
	e := newTestEnv(t, enforced())
	const grant = 10 * mega
	attacker := e.pod(0, 1, hardCap(grant), netdev.Private)
	node := nstest.Current(t)
	attacker.eth0(t, node)
	attacker.Do(func() error {
		return errors.Join(attacker.tunnel(t), redirect(linkIndex("eth0"), linkIndex("vxlan0")))
	})
	frame := append(classify.EtherTo(e.wireMAC(), e.nic.MAC, 0x88b5), make([]byte, 1200)...)
	rate := e.arrivalRate(func() error {
		_, err := node.Flood("lxc0", frame, false, duration)
		return err
	})
	e.expectAtMost("frames of the node in a tunnel of the pod", rate, grant*11/10)
	if want := atLeast(0.5 * grant); rate < want {
		t.Errorf("frames in the tunnel arrive at %.1f Mbit/s, want at least %.1f: do they reach the NIC?",
			rate/mega, want/mega)
	}
}

// An ipvlan link makes multicast that a pod has received look like a frame that has not arrived, and keeps the socket
// of the sender.
func TestAttack_foreignSocketsThroughIPVLAN(t *testing.T) {
	needRoutes(t)
	e := newTestEnv(t, enforced())
	attacker := e.pod(0, 1, hardCap(10*mega), netdev.Private)
	victim := e.pod(1, 2, hardCap(10*mega), netdev.Private)
	attacker.eth0(t, victim.Namespace)
	wire := listen(t, e.wire, "wire")
	victim.Do(func() error { // so that the pod need not rewrite the frames
		lxc0, err := netlink.LinkByName("lxc0")
		if err != nil {
			return err
		}
		return netlink.LinkSetHardwareAddr(lxc0, victim.attachment.MAC)
	})
	unsupported := false
	attacker.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex = "ipvl0", linkIndex("net1")
		err := netlink.LinkAdd(&netlink.IPVlan{LinkAttrs: attrs, Mode: netlink.IPVLAN_MODE_L2})
		if unsupported = errors.Is(err, unix.EOPNOTSUPP); unsupported {
			return nil
		}
		return errors.Join(err, nstest.ConfigureLink("ipvl0"), redirect(linkIndex("eth0"), linkIndex("ipvl0")))
	})
	if unsupported {
		t.Skip("the kernel lacks the module ipvlan")
	}
	victim.Do(func() error { return sendBroadcast(victim.ip, "lxc0", marker(1)) })
	if wire.saw(marker(1), time.Second) {
		t.Error("a datagram of another share arrived through the link of the pod")
	}
	if refused := e.refusals(victim); refused.Dropped["SourceMAC"] > 0 {
		t.Errorf("the share whose socket was used has the refusals %+v", refused)
	}
	refused, err := e.node.Refusals(e.nic.Index, shape.UnidentifiedMinor)
	if err != nil {
		t.Fatal(err)
	}
	if refused.Dropped["SourceMAC"] == 0 {
		t.Error("no frame was refused: did the datagram reach the NIC?")
	}
}

// sendBroadcast sends a datagram to all hosts on a link, from an address of another one.
func sendBroadcast(from, link string, payload []byte) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1),
		unix.BindToDevice(fd, link),
		unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte(net.ParseIP(from).To4()), Port: 5000}),
		unix.Sendto(fd, payload, 0, &unix.SockaddrInet4{Addr: [4]byte{255, 255, 255, 255}, Port: 5001}),
	)
}

// tunnel creates the link "vxlan0" of a pod, with the neighbor 10.90.0.2. The caller is in the pod's namespace.
func (p *pod) tunnel(t *testing.T) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "vxlan0"
	tunnel := &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: 1, Port: 4789, SrcAddr: net.ParseIP(p.ip), Group: net.ParseIP(wireIP),
		VtepDevIndex: linkIndex("net1"),
	}
	if err := netlink.LinkAdd(tunnel); errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("the kernel lacks the module vxlan")
	} else if err != nil {
		return err
	}
	return errors.Join(nstest.ConfigureLink("vxlan0", "10.90.0.1/24"), netlink.NeighAdd(&netlink.Neigh{
		LinkIndex: linkIndex("vxlan0"), IP: net.ParseIP("10.90.0.2"),
		HardwareAddr: net.HardwareAddr{2, 9, 9, 9, 9, 2}, State: netlink.NUD_PERMANENT,
	}))
}

// The kernel divides a packet in a tunnel behind the queues, and HTB does not count the headers in the tunnel before
// Linux 6.17. A pod chooses the length of the segments.
func TestAttack_segmentsInTunnel(t *testing.T) {
	needRoutes(t)
	e := newTestEnv(t, enforced())
	const grant = 10 * mega
	attacker := e.pod(0, 1, hardCap(grant), netdev.Private)
	if err := nstest.SetSegmentation("nic0", false); err != nil { // so that the wire counts segments
		t.Fatal(err)
	}
	attacker.Do(func() error { return attacker.tunnel(t) })
	for name, tc := range map[string]struct {
		segment int
		passes  bool
	}{"segments of one byte": {1, false}, "usual segments": {1200, true}} {
		rate := e.arrivalRate(func() (err error) {
			attacker.Do(func() error {
				err = sendSegments(tc.segment)
				return nil
			})
			return err
		})
		e.expectAtMost(name, rate, grant*125/100)
		if want := atLeast(0.8 * grant); tc.passes && rate < want {
			t.Errorf("%s arrive at %.1f Mbit/s, want at least %.1f", name, rate/mega, want/mega)
		}
	}
}

// sendSegments sends packets that the kernel divides into segments of so many bytes to a neighbor in the tunnel.
func sendSegments(size int) error {
	c, err := net.DialUDP("udp", nil, &net.UDPAddr{IP: net.IPv4(10, 90, 0, 2), Port: 5001})
	if err != nil {
		return err
	}
	defer c.Close()
	if err := setSegmentSize(c, size); err != nil {
		return err
	}
	packet := make([]byte, 40*size)
	for end := time.Now().Add(duration); time.Now().Before(end); {
		if _, err := c.Write(packet); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return err
		}
	}
	return nil
}

// setSegmentSize makes the kernel divide what is written to a socket into datagrams of a size.
func setSegmentSize(c *net.UDPConn, size int) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	const udpSegment = 103 // UDP_SEGMENT
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.SOL_UDP, udpSegment, size)
	})
	return errors.Join(err, failed)
}

// A pod can copy what its kernel sends to its link. The copies do not have a socket, but have a route of the pod.
// Neighbor discovery that is longer than necessary counts for the share, so a few pods cannot fill the class of
// neighbor discovery.
func TestAttack_longSolicitations(t *testing.T) {
	needRoutes(t)
	e := newTestEnv(t, enforced())
	attacker := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	const frames, length = 50, 1200
	attacker.Do(func() error { return copyFrames(attacker.attachment.MAC, e.wireMAC()) })
	before := e.sentBytes(0)
	attacker.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		source := &unix.SockaddrInet6{Addr: [16]byte(net.ParseIP("fd00:20::1"))}
		if err := errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 255),
			unix.Bind(fd, source)); err != nil {
			return err
		}
		solicitation := classify.ND(135, "fd00:20::99", append([]byte{200, length / 8}, make([]byte, length-2)...))
		for range frames {
			err := unix.Sendto(fd, solicitation, 0, &unix.SockaddrInet6{Addr: [16]byte(net.ParseIP("fd00:21::2"))})
			if err != nil {
				return err
			}
		}
		return nil
	})
	eventually.Eventually(t, 5*time.Second, "the frames count for the share", func() error {
		if got := e.sentBytes(0) - before; got < frames*length {
			return fmt.Errorf("the class of the share sent %d bytes, want at least %d", got, frames*length)
		}
		return nil
	})
}

// copyFrames creates the link "copied", and a neighbor fd00:21::2 there. A program copies the link's frames to net1.
func copyFrames(source, destination net.HardwareAddr) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = "copied", source
	err := errors.Join(netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "unused"}),
		nstest.ConfigureLink("copied", "fd00:21::1/64"), nstest.ConfigureLink("unused"))
	if err != nil {
		return err
	}
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R2, int32(linkIndex("net1"))), asm.Mov.Imm(asm.R3, 0), asm.FnCloneRedirect.Call(),
			asm.Mov.Imm(asm.R0, int32(netlink.TC_ACT_OK)), asm.Return(),
		},
	})
	if err != nil {
		return err
	}
	defer program.Close()
	copied := linkIndex("copied")
	return errors.Join(nstest.AddClsact(copied),
		netlink.FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: copied, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL,
			},
			Fd: program.FD(), Name: "copy", DirectAction: true,
		}),
		netlink.NeighAdd(&netlink.Neigh{
			LinkIndex: copied, IP: net.ParseIP("fd00:21::2"), HardwareAddr: destination, State: netlink.NUD_PERMANENT,
		}))
}
