// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// The kernel of a pod reports the multicast groups that the pod joins through internal sockets. The reports pass.
func TestIdentity_reportsOfMulticastGroupsPass(t *testing.T) {
	for _, tc := range []struct {
		name, network, group string
		protocol             uint16
		isReport             func(packet []byte) bool
	}{
		{"IGMP", "udp4", "239.1.2.3:5001", unix.ETH_P_IP, func(packet []byte) bool {
			return len(packet) >= 20 && packet[9] == 2
		}},
		{"MLD", "udp6", "[ff02::1:2%net1]:5001", unix.ETH_P_IPV6, func(packet []byte) bool { // behind an option
			return len(packet) > 48 && packet[6] == 0 && packet[48] == 143
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newTestEnv(t, enforced())
			p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
			wire := listenFor(t, e.wire, "wire", tc.protocol)
			var listener *net.UDPConn
			nstest.RunIn(t, p.File, func() error {
				link, err := net.InterfaceByName("net1")
				if err != nil {
					return err
				}
				group, err := net.ResolveUDPAddr(tc.network, tc.group)
				if err != nil {
					return err
				}
				listener, err = net.ListenMulticastUDP(tc.network, link, group)
				return err
			})
			defer listener.Close()
			source := p.attachment.MAC
			found := wire.find(5*time.Second, func(frame []byte) bool {
				return bytes.Equal(frame[6:12], source) && tc.isReport(frame[14:])
			})
			if found == nil {
				t.Error("no report of the pod arrived")
			}
			if refused := e.refusals(p); len(refused.Dropped) > 0 {
				t.Errorf("the programs dropped %v", refused.Dropped)
			}
		})
	}
}

// Links of a pod on the link of the share keep the routes of packets, which the programs need.
func TestIdentity_socketsOnStackedLinksPass(t *testing.T) {
	needRoutes(t)
	for name, stack := range map[string]func(net1 netlink.Link) netlink.Link{
		"a VLAN": func(net1 netlink.Link) netlink.Link {
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.ParentIndex = "stacked", net1.Attrs().Index
			return &netlink.Vlan{LinkAttrs: attrs, VlanId: 100, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q}
		},
		"an ipvlan link": func(net1 netlink.Link) netlink.Link {
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.ParentIndex = "stacked", net1.Attrs().Index
			return &netlink.IPVlan{LinkAttrs: attrs, Mode: netlink.IPVLAN_MODE_L3}
		},
	} {
		t.Run(name, func(t *testing.T) {
			config := enforced()
			config.Policy.VLANs = []uint16{100}
			config.Policy.Addresses = []netip.Prefix{netip.MustParsePrefix("10.20.9.0/24")}
			e := newTestEnv(t, config)
			p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
			wire, unsupported := listen(t, e.wire, "wire"), false
			p.Do(func() error {
				net1, err := netlink.LinkByName("net1")
				if err != nil {
					return err
				}
				err = netlink.LinkAdd(stack(net1))
				if unsupported = errors.Is(err, unix.EOPNOTSUPP); unsupported {
					return nil
				}
				return errors.Join(err, nstest.ConfigureLink("stacked", "10.20.9.1/24"),
					netlink.NeighAdd(&netlink.Neigh{
						LinkIndex: linkIndex("stacked"), IP: net.ParseIP("10.20.9.2"), HardwareAddr: e.wireMAC(),
						State: netlink.NUD_PERMANENT,
					}),
					netlink.NeighAdd(&netlink.Neigh{
						LinkIndex: linkIndex("net1"), IP: net.ParseIP("10.20.9.2"), HardwareAddr: e.wireMAC(),
						State: netlink.NUD_PERMANENT,
					}))
			})
			if unsupported {
				t.Skip("the kernel lacks the module of the link")
			}
			p.Do(func() error { return sendUDP("10.20.9.2:9", marker(1)) })
			if !wire.saw(marker(1), time.Second) {
				t.Errorf("the packet did not arrive: the programs dropped %v", e.refusals(p).Dropped)
			}
		})
	}
}

// The kernel of a pod answers pings through an internal socket, which a frame loses while a queue
// of the pod delays it. The answers pass, and do not count as traffic of the node.
func TestIdentity_delayedRepliesPass(t *testing.T) {
	for name, mode := range map[string]netdev.Mode{"private": netdev.Private, "bridge": netdev.Bridge} {
		t.Run(name, func(t *testing.T) {
			e := newTestEnv(t, enforced())
			p := e.pod(0, 1, hardCap(100*mega), mode)
			p.Do(func() error { return delay("net1", 100_000) })
			const pings = 20
			before := e.hostBytes()
			if answers := e.ping(p.ip, pings); answers < pings-1 {
				t.Errorf("the pod answered %d of %d pings", answers, pings)
			}
			if sent := e.hostBytes() - before; sent > pings*98/2 {
				t.Errorf("the class of the node sent %d bytes while only the pod sent", sent)
			}
			if sent := e.sentBytes(0); sent < pings*98*9/10 {
				t.Errorf("the class of the share sent %d bytes on the NIC, want the answers", sent)
			}
		})
	}
}

// A pod can delay a reply of its kernel until the reply's socket is in the initial namespace again, and give the
// reply the address of the NIC. Where the initial namespace is the node's, as in the guests of test/lab, the
// socket is then one of the node.
func TestIdentity_delayedRepliesWithAddressOfNIC(t *testing.T) {
	needRoutes(t)
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	p.Do(func() error {
		if err := errors.Join(bridgeWith(e.nic.MAC, "net1", nodeIP+"/16"), delay("net1", 5_000),
			netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "in0"}, PeerName: "in1"}),
			nstest.ConfigureLink("in0"), nstest.ConfigureLink("in1"),
			nstest.SetSysctl("net/ipv4/conf/all/rp_filter", "0"),
			nstest.SetSysctl("net/ipv4/conf/in0/rp_filter", "0")); err != nil {
			return err
		}
		br, err := netlink.LinkByName("br0")
		if err != nil {
			return err
		}
		// The other route to the network is through net1 itself.
		route := netlink.Route{LinkIndex: p.attachment.Index, Dst: network("10.20.0.0/16"), Scope: netlink.SCOPE_LINK}
		return errors.Join(netlink.RouteDel(&route),
			netlink.NeighAdd(&netlink.Neigh{
				LinkIndex: br.Attrs().Index, IP: net.ParseIP(wireIP), HardwareAddr: e.wireMAC(),
				State: netlink.NUD_PERMANENT,
			}))
	})
	wire := listen(t, e.wire, "wire")
	message := append([]byte{8, 0, 0, 0, 0, 1, 0, 1, 0}, marker(1)...) // an echo request (RFC 792)
	binary.BigEndian.PutUint16(message[2:], checksum(message))
	packet := classify.IPv4(wireIP, 1, 0, message)
	copy(packet[16:20], net.ParseIP(nodeIP).To4())
	binary.BigEndian.PutUint16(packet[10:], checksum(packet[:20]))
	request := classify.EtherTo(p.Interface("in0").HardwareAddr, p.Interface("in1").HardwareAddr, 0x0800, packet)
	for range 20 { // more than the queue sends in one burst
		sendRaw(p.Namespace, "in1", request)
	}
	if wire.saw(marker(1), 3*time.Second) {
		t.Error("a reply with the addresses of the node arrived at the wire")
	}
	refused, err := e.node.Refusals(e.nic.Index, 0) // a reply that was delayed does not show the share
	if err != nil || refused.Dropped["SourceMAC"] == 0 {
		t.Errorf("Refusals returned %+v and error %v, want SourceMAC: does the kernel of the pod reply?", refused, err)
	}
}

// delay limits the send rate of a link of the current namespace, in bit/s, and frames wait.
func delay(name string, rate uint64) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	rate /= 8 // bytes per second
	return netlink.QdiscAdd(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT,
		},
		Rate: rate, Buffer: netlink.Xmittime(rate, 200), Limit: 1 << 20,
	})
}

// ping sends echo requests (RFC 792) from the wire, and returns how many were answered.
func (e *testEnv) ping(ip string, count int) (answers int) {
	e.t.Helper()
	e.wire.Do(func() error {
		conn, err := net.DialIP("ip4:icmp", nil, &net.IPAddr{IP: net.ParseIP(ip)})
		if err != nil {
			return err
		}
		defer conn.Close()
		for i := range count {
			request := make([]byte, 64)
			request[0] = 8 // echo request
			binary.BigEndian.PutUint16(request[6:], uint16(i))
			binary.BigEndian.PutUint16(request[2:], checksum(request))
			if _, err := conn.Write(request); err != nil {
				return err
			}
		}
		reply := make([]byte, 1500)
		for answers < count {
			if err := conn.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
				return err
			}
			n, _, err := conn.ReadFromIP(reply)
			if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() {
				return nil
			}
			if err != nil {
				return err
			}
			if n > 0 && reply[0] == 0 { // echo reply
				answers++
			}
		}
		return nil
	})
	return answers
}

// checksum returns the checksum of RFC 1071 of a message without one.
func checksum(message []byte) uint16 {
	var sum uint32
	for i := 0; i < len(message); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(message[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// hostBytes returns the bytes that the class for the node's own traffic has sent.
func (e *testEnv) hostBytes() uint64 {
	e.t.Helper()
	conn, err := rtnl.Open()
	if err != nil {
		e.t.Fatal(err)
	}
	defer conn.Close()
	const minor = 2 // CLASS_HOST of nic.h
	state, err := shape.New(conn, nil).ReadClass(e.nic.Index, e.trees().Class(minor))
	if err != nil || state == nil {
		e.t.Fatalf("ReadClass returned %v and error %v", state, err)
	}
	return state.SentBytes
}

// With SYN cookies, which the kernel uses while a listener is flooded, its answers do not have a socket of the
// listener.
func TestIdentity_synCookiesPass(t *testing.T) {
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	p.Do(func() error { return nstest.SetSysctl("net/ipv4/tcp_syncookies", "2") }) // for all connections
	e.measure(e.toPod(p))
	refusals, err := e.node.Refusals(p.attachment.Parent, p.attachment.Minor)
	if err != nil || len(refusals.Dropped) > 0 {
		t.Errorf("Refusals returned %+v and error %v, want none", refusals, err)
	}
}
