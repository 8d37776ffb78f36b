// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// The grant and the identity hold in whatever way a pod passes frames to the kernel.
func TestAttack_allSendPaths(t *testing.T) {
	const grant = 20 * mega
	e := newTestEnv(t, enforced())
	attacker, victim := e.pod(0, 1, hardCap(grant), netdev.Private), e.pod(1, 2, hardCap(grant), netdev.Private)
	wire, wireMAC := listen(t, e.wire, "wire"), e.wireMAC()
	number := 0
	for name, open := range map[string]func() (nstest.Sender, error){
		"SO_MARK and SO_PRIORITY": func() (nstest.Sender, error) {
			return nstest.NewMarkSender(attacker.Namespace, "net1", 1, shape.Major<<16|shape.FirstMinor+1)
		},
		"SO_TXTIME": func() (nstest.Sender, error) { return nstest.NewTimeSender(attacker.Namespace, "net1") },
		"io_uring":  func() (nstest.Sender, error) { return nstest.NewRingSender(attacker.Namespace, "net1") },
		"AF_XDP":    func() (nstest.Sender, error) { return nstest.NewXDPSender(attacker.Namespace, "net1") },
	} {
		t.Run(name, func(t *testing.T) {
			sender, err := open()
			if isUnsupported(err) {
				t.Skipf("this kernel does not let a pod send in this way: %v", err)
			}
			if err != nil {
				t.Fatal(err)
			}
			defer sender.Close()
			for _, source := range []*pod{attacker, victim} {
				number++
				packet := classify.IPv4(source.ip, 17, 0, append(classify.UDP(5000, 5001), marker(number)...))
				got, want := false, source == attacker || !e.node.ClassifierKey().HasCookie()
				for tries := 0; tries < 5 && !got; tries++ { // the kernel may drop a frame for other reasons
					if err := sender.Send(classify.EtherTo(wireMAC, source.attachment.MAC, 0x0800, packet)); err != nil {
						t.Fatal(err)
					}
					got = wire.saw(marker(number), 300*time.Millisecond)
				}
				if got != want {
					t.Errorf("frame with the addresses of pod %s: arrived %t, want %t", source.ip, got, want)
				}
			}
			before := e.sentBytes(1)
			flood := frame(attacker.attachment.MAC, wireMAC)
			copy(flood[14:], classify.IPv4(attacker.ip, 17, 0, append(classify.UDP(5000, 5001), make([]byte, 1400)...)))
			rate := e.arrivalRate(func() error { return sendFor(sender, flood, duration) })
			e.expectAtMost("flood", rate, grant*106/100)
			if rate < atLeast(grant/2) {
				t.Errorf("flood: got %.1f Mbit/s: the test sends too little to reach the grant", rate/mega)
			}
			if sent := e.sentBytes(1) - before; sent > 10_000 {
				t.Errorf("flood: the victim's class sent %d bytes, want at most 10000", sent)
			}
		})
	}
}

// A pod can pass packets to the kernel that the kernel or the NIC divides into segments. When the kernel
// does that before they reach the NIC, only the last segment keeps the socket.
func TestAttack_segments(t *testing.T) {
	const grant, payload = 20 * mega, 6000
	for name, kind := range map[string]byte{"TCP": nstest.SegmentTCP, "UDP": nstest.SegmentUDP} {
		for place, most := range map[string]int{"by the NIC": 1 << 16, "before the NIC": 4000} {
			t.Run(name+" "+place, func(t *testing.T) {
				needRoutes(t)
				e := newTestEnv(t, enforced())
				attacker, victim := e.pod(0, 1, hardCap(grant), netdev.Private), e.pod(1, 2, hardCap(grant), netdev.Private)
				if err := nstest.SetSegmentation("nic0", false); err != nil { // so that the wire counts segments
					t.Fatal(err)
				}
				attacker.Do(func() error {
					link, err := netlink.LinkByName("net1")
					return errors.Join(err, netlink.LinkSetGSOMaxSize(link, most))
				})
				sender, err := nstest.NewSegmentSender(attacker.Namespace, "net1", kind, 100)
				if err != nil {
					t.Fatal(err)
				}
				defer sender.Close()
				packet := func(source *pod, mark []byte) []byte {
					p := classify.TCP(source.ip, "10.20.9.9", 5000, 5001)
					if kind == nstest.SegmentUDP {
						p = classify.IPv4(source.ip, 17, 0, classify.UDP(5000, 5001)[:8])
						binary.BigEndian.PutUint16(p[24:], 8+payload)
					}
					binary.BigEndian.PutUint16(p[2:], uint16(len(p)+payload))
					content := bytes.Repeat(append(mark, make([]byte, 50-len(mark))...), payload/50)
					return classify.EtherTo(net.HardwareAddr{2, 9, 9, 9, 9, 9}, source.attachment.MAC, 0x0800, p, content)
				}
				wire := listen(t, e.wire, "wire")
				err = sender.Send(packet(victim, marker(1)))
				if errors.Is(err, unix.EINVAL) && kind == nstest.SegmentUDP {
					t.Skip("this kernel does not accept packets of UDP to divide (Linux 6.2)")
				}
				if err != nil {
					t.Fatal(err)
				}
				if wire.saw(marker(1), 300*time.Millisecond) {
					t.Error("segments with the addresses of another share arrived")
				}
				before := e.sentBytes(0)
				const flood = 500 * time.Millisecond
				rate := e.arrivalRate(func() error { return sendFor(sender, packet(attacker, marker(2)), flood) })
				e.expectAtMost("flood of segments", rate, grant*11/10) // the first burst counts more in a short time
				if sent := e.sentBytes(0) - before; place == "by the NIC" && sent < 50_000 {
					t.Errorf("the class of the share sent %d bytes: does the test send segments?", sent)
				}
			})
		}
	}
}

// The kernel divides a packet while all other frames of the NIC wait, and counts its segments in 16 bits: of 65,537
// segments, a class of the queues would count one.
func TestAttack_manySegments(t *testing.T) {
	const grant = 200 * mega
	e := newTestEnv(t, enforced())
	attacker := e.pod(0, 1, hardCap(grant), netdev.Private)
	if err := nstest.SetSegmentation("nic0", false); err != nil { // so that the wire counts segments
		t.Fatal(err)
	}
	attacker.Do(func() error {
		link, err := netlink.LinkByName("net1")
		return errors.Join(err, netlink.LinkSetGSOMaxSize(link, 1<<17), netlink.LinkSetGSOIPv4MaxSize(link, 1<<17))
	})
	for _, tc := range []struct {
		payload int
		size    uint16
		arrives bool
	}{
		{60_000, 10, false},
		{65_537, 1, false},
		{60_000, 100, true},
	} {
		sender, err := nstest.NewSegmentSender(attacker.Namespace, "net1", nstest.SegmentTCP, tc.size)
		if err != nil {
			t.Fatal(err)
		}
		p := classify.TCP(attacker.ip, "10.20.9.9", 5000, 5001)
		binary.BigEndian.PutUint16(p[2:], uint16(len(p)+tc.payload)) // 0 means a larger packet
		if len(p)+tc.payload > 0xffff {
			binary.BigEndian.PutUint16(p[2:], 0)
		}
		frame := classify.EtherTo(
			net.HardwareAddr{2, 9, 9, 9, 9, 9}, attacker.attachment.MAC, 0x0800, p, make([]byte, tc.payload))
		before := e.wireBytes()
		if err := errors.Join(sendFor(sender, frame, 300*time.Millisecond), sender.Close()); err != nil {
			t.Fatal(err)
		}
		bytes := e.wireBytes() - before
		if arrived := bytes > 10_000; arrived != tc.arrives {
			t.Errorf("%d segments: %d bytes arrived, want them to arrive: %t", (tc.payload-1)/int(tc.size)+1, bytes, tc.arrives)
		}
	}
}

// A pod can leave a checksum to the kernel or to the NIC, which write it after the programs have checked the frame.
// It chooses where, and with two bytes of padding which number.
func TestAttack_checksumOverCheckedField(t *testing.T) {
	needRoutes(t)
	e := newTestEnv(t, enforced())
	attacker := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	wire, mac, to := listen(t, e.wire, "wire"), attacker.attachment.MAC, e.wireMAC()
	datagram := classify.EtherTo(to, mac, 0x0800, classify.IPv4(attacker.ip, 17, 0, classify.UDP(5000, 5001)))
	client := classify.EtherTo(to, mac, 0x0800, classify.IPv4(attacker.ip, 17, 0, classify.DHCP(mac, attacker.ip)))
	echo := classify.EtherTo(to, mac, 0x86dd, classify.IPv6("fd00:20::1", 58, classify.ND(128, "")))
	for i, tc := range []struct {
		name          string
		frame         []byte
		start, offset uint16
		arrives       bool
	}{
		{"UDP", datagram, 34, 6, true},
		{"in the payload, as in a tunnel", datagram, 34, 8, true},
		{"the source port", datagram, 34, 0, false},
		{"the source address", datagram, 20, 8, false},
		{"UDP of a DHCP client", client, 34, 6, true},
		{"the MAC address in a message of a DHCP client", client, 34, 8 + 28, false},
		{"the sender of ARP", classify.EtherTo(broadcast, mac, 0x0806, classify.ARP(2, mac, attacker.ip, wireIP)),
			20, 10, false},
		{"ICMPv6", echo, 54, 2, true},
		{"the type of ICMPv6", echo, 54, 0, false},
		{"another protocol", classify.EtherTo(to, mac, 0x88b5, make([]byte, 60)), 20, 10, true},
	} {
		sender, err := nstest.NewChecksumSender(attacker.Namespace, "net1", tc.start, tc.offset)
		if err != nil {
			t.Fatal(err)
		}
		if err := sender.Send(append(tc.frame, marker(i)...)); err != nil {
			t.Fatal(err)
		}
		if got := wire.saw(marker(i), 300*time.Millisecond); got != tc.arrives {
			t.Errorf("%s: arrived: %t, want %t", tc.name, got, tc.arrives)
		}
		if err := sender.Close(); err != nil {
			t.Error(err)
		}
	}
}

// NICs pad frames that are too short, so a frame that ends in its header is valid on the network.
func TestAttack_frameThatEndsInHeader(t *testing.T) {
	e := newTestEnv(t, enforced())
	attacker := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	sender, err := nstest.NewXDPSender(attacker.Namespace, "net1")
	if isUnsupported(err) {
		t.Skipf("this kernel does not let a pod send such frames: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	unidentified := func() uint64 {
		shaper := shape.New(nstest.Current(t).Socket, nil)
		class, err := shaper.ReadClass(e.nic.Index, e.trees().Class(shape.UnidentifiedMinor))
		if err != nil || class == nil {
			t.Fatalf("read the class of unidentified frames: %v, %v", class, err)
		}
		return class.SentBytes
	}
	wire, before := listen(t, e.wire, "wire"), unidentified()
	for range 10 {
		if err := sender.Send(append(e.wireMAC(), 2, 9, 9, 9, 9, 9)[:12]); err != nil {
			t.Fatal(err)
		}
	}
	valid := classify.EtherTo(e.wireMAC(), attacker.attachment.MAC, 0x0800,
		classify.IPv4(attacker.ip, 17, 0, append(classify.UDP(5000, 5001), marker(1)...)))
	if err := sender.Send(valid); err != nil {
		t.Fatal(err)
	}
	if !wire.saw(marker(1), time.Second) {
		t.Error("a valid frame that followed did not arrive")
	}
	if after := unidentified(); after != before {
		t.Errorf("the class of unidentified frames sent %d bytes", after-before)
	}
}

// isUnsupported reports whether an error means that the kernel lacks a way to send, or refuses it.
func isUnsupported(err error) bool {
	for _, missing := range []error{
		unix.ENOSYS, unix.EPERM, unix.EOPNOTSUPP, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT, unix.ENOPROTOOPT,
	} {
		if errors.Is(err, missing) {
			return true
		}
	}
	return false
}

func sendFor(sender nstest.Sender, frame []byte, duration time.Duration) error {
	for end := time.Now().Add(duration); time.Now().Before(end); {
		if err := sender.Send(frame); err != nil {
			return err
		}
	}
	return nil
}

// Broadcasts to the network count toward the grant of the share.
func TestAttack_broadcastsToNetwork(t *testing.T) {
	const grant = 10 * mega
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(grant), netdev.Private)
	datagram := append(classify.EtherTo(broadcast, p.attachment.MAC, 0x0800,
		classify.IPv4(p.ip, 17, 0, classify.UDP(5000, 5001))), make([]byte, 1200)...)
	rate := e.arrivalRate(func() error {
		_, err := p.Flood("net1", datagram, false, duration)
		return err
	})
	e.expectAtMost("broadcasts", rate, grant*11/10)
	if want := atLeast(0.8 * grant); rate < want {
		t.Errorf("broadcasts arrive at %.1f Mbit/s, want at least %.1f: do they reach the NIC?", rate/mega, want/mega)
	}
}

// A pod may listen to the multicast and broadcast of the network. All shares of the NIC together
// receive a limited rate of it, next to their grants.
func TestAttack_multicastListener(t *testing.T) {
	const limit = reserve / 8 // the default
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(20*mega), netdev.Private)
	for name, to := range map[string]net.HardwareAddr{
		"broadcast": {0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, "multicast": {1, 0, 0x5e, 0, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			before, start := p.receivedBytes(), time.Now()
			// The queue of the NIC also slows the sender down, because its frames wait there.
			if _, err := e.wire.Flood("wire", frame(e.wireMAC(), to), false, duration); err != nil {
				t.Fatal(err)
			}
			elapsed := time.Since(start).Seconds()
			got := float64(p.receivedBytes()-before) * 8 / elapsed
			e.expectAtMost(name, got, limit*13/10) // the queue is full at the end of the flood
			if got < atLeast(limit/2) {
				t.Errorf("%s: the pod receives %.1f Mbit/s, want up to %d Mbit/s", name, got/mega, limit/mega)
			}
		})
	}
}

// One sender of multicast on the network does not keep the multicast of another from the shares.
func TestAttack_multicastFlood(t *testing.T) {
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(20*mega), netdev.Private)
	group := net.HardwareAddr{1, 0, 0x5e, 0, 0, 1}
	// The numbers of the addresses lead to different classes.
	attacker, other := net.HardwareAddr{2, 5, 5, 5, 5, 5}, net.HardwareAddr{2, 6, 6, 6, 6, 6}
	var floods sync.WaitGroup
	for range 4 { // the buffer of one socket is smaller than the queue
		floods.Go(func() {
			if _, err := e.wire.Flood("wire", frame(attacker, group), false, 2*duration); err != nil {
				t.Error(err)
			}
		})
	}
	defer floods.Wait()
	pod := listen(t, p.Namespace, "net1")
	const frames = 20
	seen := 0
	for i := range frames {
		mark := marker(i)
		sendRaw(e.wire, "wire", append(classify.EtherTo(group, other, 0x88b5), mark...))
		if pod.saw(mark, 100*time.Millisecond) {
			seen++
		}
	}
	if seen < frames-1 {
		t.Errorf("of %d frames next to a flood, %d reached the pod; want all", frames, seen)
	}
	if _, dropped, err := e.node.ShareTraffic(e.nic.Index); err != nil || dropped == 0 {
		t.Errorf("ShareTraffic returned %d dropped frames of multicast and error %v, want those of the flood", dropped, err)
	}
}

// A flood of ARP or neighbor discovery, by a share or from the network, does not keep other shares
// and the node from resolving addresses.
func TestAttack_neighborFlood(t *testing.T) {
	broadcast := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	solicited := net.HardwareAddr{0x33, 0x33, 0xff, 0, 0, 0xfe} // the group of fd00:20::fe
	behind := net.HardwareAddr{2, 8, 8, 8, 8, 8}                // of a namespace behind the pod
	solicitation := func(source net.HardwareAddr, ip string) []byte {
		message := classify.ND(135, "fd00:20::fe", classify.Option(1, source))
		return classify.EtherTo(solicited, source, 0x86dd, classify.IPv6(ip, unix.IPPROTO_ICMPV6, message))
	}
	request := func(source net.HardwareAddr, ip string, padding int) []byte {
		return append(classify.EtherTo(broadcast, source, 0x0806, classify.ARP(1, source, ip, "10.20.9.9")),
			make([]byte, padding)...)
	}
	for name, tc := range map[string]struct {
		flood func(*testEnv, *pod) (from *nstest.Namespace, link string, frame []byte)
	}{
		"of a share": {func(_ *testEnv, p *pod) (*nstest.Namespace, string, []byte) {
			return p.Namespace, "net1", request(p.attachment.MAC, p.ip, 0)
		}},
		"of a share, IPv6": {func(_ *testEnv, p *pod) (*nstest.Namespace, string, []byte) {
			return p.Namespace, "net1", solicitation(p.attachment.MAC, "fd00:20::1")
		}},
		"that a share bridges": {func(e *testEnv, p *pod) (*nstest.Namespace, string, []byte) {
			return e.bridgedBehind(p), "eth0", request(behind, "10.20.9.7", 0)
		}},
		"from the network": {func(e *testEnv, _ *pod) (*nstest.Namespace, string, []byte) {
			return e.wire, "wire", request(behind, "10.20.9.8", 0)
		}},
		"from the network, IPv6": {func(e *testEnv, _ *pod) (*nstest.Namespace, string, []byte) {
			return e.wire, "wire", solicitation(behind, "fd00:20::98")
		}},
		"from the network, padded": {func(e *testEnv, _ *pod) (*nstest.Namespace, string, []byte) {
			return e.wire, "wire", request(behind, "10.20.9.8", 1400)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			config := enforced()
			config.Policy.Forwarding, config.Policy.MACs = true, []net.HardwareAddr{behind}
			config.Policy.Addresses = []netip.Prefix{netip.MustParsePrefix("10.20.9.7/32")}
			e := newTestEnv(t, config)
			e.config.Rates.Reserve = 10 * mega // the default for 1 Gbit/s: ARP gets at most 2.5 Mbit/s
			e.manage()
			if err := nstest.ConfigureLink("nic0", nodeIP+"/16", "fd00:20::ff/64"); err != nil {
				t.Fatal(err)
			}
			node := nstest.Current(t)
			attacker, other := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
			from, link, frame := tc.flood(e, attacker)
			if from != e.wire {
				e.awaitFirst(from, link, frame)
			}
			stop := startFloods(t, from, link, frame)
			for range 5 {
				e.expectFastResolution(other)
				e.expectResolution(other.Namespace, "net1", e.wire, "fd00:20::fe")
				e.expectResolution(node, "nic0", e.wire, wireIP)
				e.expectResolution(node, "nic0", e.wire, "fd00:20::fe")
			}
			stop()
		})
	}
}

// The network can make a share send any amount of ARP. That does not keep the share, or others, from
// resolving addresses.
func TestAttack_forcedARP(t *testing.T) {
	for name, frame := range map[string]func(e *testEnv, victim *pod, number int) []byte{
		"requests with forged senders": func(e *testEnv, victim *pod, number int) []byte {
			mac, ip := net.HardwareAddr{2, 4, 4, 4, 4, byte(number)}, fmt.Sprintf("10.20.7.%d", number%200)
			return classify.EtherTo(victim.attachment.MAC, mac, 0x0806, classify.ARP(1, mac, ip, victim.ip))
		},
		"TCP segments with forged senders": func(e *testEnv, victim *pod, number int) []byte {
			packet := classify.TCP(fmt.Sprintf("10.20.7.%d", number%200), victim.ip, 5000, 1)
			return classify.EtherTo(victim.attachment.MAC, e.wireMAC(), 0x0800, packet)
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := newTestEnv(t, enforced())
			e.config.Rates.Reserve = 10 * mega
			e.manage()
			victim, other := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
			sender, err := nstest.NewMarkSender(e.wire, "wire", 0, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer sender.Close()
			stop := make(chan struct{})
			var flood sync.WaitGroup
			flood.Go(func() {
				for number := 0; ; number++ {
					select {
					case <-stop:
						return
					default:
					}
					if err := sender.Send(frame(e, victim, number)); err != nil {
						t.Error(err)
						return
					}
				}
			})
			defer flood.Wait()
			defer close(stop)
			for range 3 {
				e.expectFastResolution(victim)
				e.expectFastResolution(other)
			}
			refused, err := e.node.Refusals(victim.attachment.Parent, victim.attachment.Minor)
			if err != nil || len(refused.Dropped) > 0 {
				t.Errorf("Refusals returned %+v and error %v, want none: the victim has done nothing", refused, err)
			}
		})
	}
}

// Datagrams that fill the queue of a share do not keep the share from resolving addresses: the answers have another
// class.
func TestAttack_floodOfShareDropsNoAnswers(t *testing.T) {
	e := newTestEnv(t, enforced())
	victim := e.pod(0, 1, hardCap(mega), netdev.Private)
	flood := classify.EtherTo(victim.attachment.MAC, e.wireMAC(), 0x0800, // as small as ARP
		classify.IPv4("10.20.9.1", 17, 0, classify.UDP(1, 2)))
	defer startFloods(t, e.wire, "wire", flood)()
	eventually.Eventually(t, 10*time.Second, "the queue of the share is full", func() error {
		if received := victim.receivedBytes(); received < 100_000 {
			return fmt.Errorf("the share has received %d bytes", received)
		}
		return nil
	})
	for range 5 {
		start := time.Now()
		victim.Do(func() error { return resolve("net1", wireIP) })
		if took := time.Since(start); took > 600*time.Millisecond { // the kernel repeats its request after a second
			t.Errorf("resolving an address took %s, want at most 600 ms", took)
		}
	}
}

// startFloods sends a frame from two goroutines without a pause, until the caller calls stop.
func startFloods(t *testing.T, from *nstest.Namespace, link string, frame []byte) (stop func()) {
	t.Helper()
	stopped := make(chan struct{})
	var floods sync.WaitGroup
	for range 2 {
		floods.Go(func() {
			for {
				select {
				case <-stopped:
					return
				default:
				}
				if _, err := from.Flood(link, frame, false, 50*time.Millisecond); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	return func() {
		close(stopped)
		floods.Wait()
	}
}

// resolve lets the kernel of the current namespace resolve an IPv4 address that it may have resolved before.
func resolve(name, ip string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	index := link.Attrs().Index
	err = netlink.NeighDel(&netlink.Neigh{LinkIndex: index, IP: net.ParseIP(ip)})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	if err := sendUDP(ip+":9", []byte("x")); err != nil {
		return err
	}
	return eventually.Poll(context.Background(), 5*time.Second, func() error {
		neighbors, err := netlink.NeighList(index, unix.AF_INET)
		if err != nil {
			return err
		}
		for _, n := range neighbors {
			if n.IP.String() == ip && n.State&(netlink.NUD_REACHABLE|netlink.NUD_STALE|netlink.NUD_DELAY) != 0 {
				return nil
			}
		}
		return fmt.Errorf("%s is not resolved: %v", ip, neighbors)
	})
}

// A host on the network that uses another MAC address in each frame does not keep a host that the NIC
// knows from finding a share.
func TestAttack_neighborFloodOfManySenders(t *testing.T) {
	broadcast := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	e := newTestEnv(t, enforced())
	e.config.Rates.Reserve = 10 * mega
	e.manage()
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	e.measure(nstest.Flow{From: e.wire, To: p.Namespace, Address: e.address(p.ip), Duration: 50 * time.Millisecond})
	var senders []nstest.Sender
	for range 24 { // the buffer of one socket is smaller than the queue
		sender, err := nstest.NewMarkSender(e.wire, "wire", 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer sender.Close()
		senders = append(senders, sender)
	}
	stop := make(chan struct{})
	var floods sync.WaitGroup
	for thread := range 2 {
		floods.Go(func() {
			for number := 0; ; number++ {
				select {
				case <-stop:
					return
				default:
				}
				mac := net.HardwareAddr{2, byte(thread), 5, byte(number >> 16), byte(number >> 8), byte(number)}
				request := classify.EtherTo(broadcast, mac, 0x0806, classify.ARP(1, mac, "10.20.9.8", "10.20.9.9"))
				if err := senders[number%len(senders)].Send(request); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	defer floods.Wait()
	defer close(stop)
	for range 5 {
		e.expectResolution(e.wire, "wire", p.Namespace, p.ip)
	}
}

// awaitFirst sends a frame until one arrives at the wire, as a bridge forwards nothing before its
// ports are up.
func (e *testEnv) awaitFirst(from *nstest.Namespace, link string, frame []byte) {
	e.t.Helper()
	wire := listen(e.t, e.wire, "wire")
	for range 50 {
		sendRaw(from, link, append(bytes.Clone(frame), marker(0)...))
		if wire.saw(marker(0), 100*time.Millisecond) {
			return
		}
	}
	e.t.Fatal("no frame of the flood arrives")
}

// expectFastResolution makes a pod resolve the address of the wire, and fails the test if that
// takes long: the kernel repeats a request after one second.
func (e *testEnv) expectFastResolution(p *pod) {
	e.t.Helper()
	e.expectResolution(p.Namespace, "net1", e.wire, wireIP)
}

// expectResolution is expectFastResolution for an address of another namespace.
func (e *testEnv) expectResolution(from *nstest.Namespace, link string, to *nstest.Namespace, ip string) {
	e.t.Helper()
	from.Do(func() error {
		link, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		err = netlink.NeighDel(&netlink.Neigh{LinkIndex: link.Attrs().Index, IP: net.ParseIP(ip)})
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	})
	start := time.Now()
	e.measure(nstest.Flow{From: from, To: to, Address: e.address(ip), Duration: 50 * time.Millisecond})
	if took := time.Since(start); took > 600*time.Millisecond {
		e.t.Errorf("the first flow to %s took %s, want at most 600 ms", ip, took)
	}
}

// receivedBytes returns how many bytes the pod's link has received.
func (p *pod) receivedBytes() (n uint64) {
	p.Do(func() error {
		link, err := netlink.LinkByName("net1")
		if err == nil {
			n = link.Attrs().Statistics.RxBytes
		}
		return err
	})
	return n
}
