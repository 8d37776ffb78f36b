// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/google/go-cmp/cmp"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/test/kernelcheck"
)

// The kernel runs a program on a frame (BPF_PROG_TEST_RUN) as if a socket of this
// namespace had sent it through the loopback interface.
const (
	testNIC   = 1
	testMajor = 0xd5a
	testClass = testMajor<<16 | 0x10
)

var (
	nicMAC   = net.HardwareAddr{2, 0, 0, 0, 0, 0xfe}
	linkMAC  = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	otherMAC = net.HardwareAddr{2, 0, 0, 0, 0, 2}
	vrrpMAC  = net.HardwareAddr{0, 0, 0x5e, 0, 1, 7}
	wireMAC  = net.HardwareAddr{2, 9, 9, 9, 9, 9}
	// routersMAC belongs to the multicast group of all routers, 224.0.0.2.
	routersMAC = net.HardwareAddr{1, 0, 0x5e, 0, 0, 2}
)

const (
	linkIP    = "10.20.0.1"
	linkIP6   = "fd00:20::1"
	linkLocal = "fe80::ff:fe00:1"    // EUI-64 of linkMAC
	autoconf  = "fd00:99::ff:fe00:1" // the same in the network of a router
	otherIP   = "10.20.0.2"
	otherIP6  = "fd00:20::2"
	freeIP    = "10.20.0.77"
	freeIP6   = "fd00:20::77"
	foreignIP = "192.0.2.1"
	nodeIP    = "10.20.0.253"
	vip       = "10.20.9.9"
)

// identityEnv is a classifier with one NIC and two links of this namespace.
type identityEnv struct {
	t *testing.T
	c *Classifier
}

// acceptTestRuns makes the programs accept the socket that the kernel gives the frames of a test run.
var acceptTestRuns = map[string]any{"dra_shared_sockets_need_routes": uint8(0)}

// openChecks loads the first programs for a key, which check frames, with maps of their
// own.
func openChecks(key Key, constants map[string]any) (*Classifier, error) {
	c := newClassifier(AttachClsact, key, programPairs[key][0])
	c.constants = constants
	return c, c.load("", programPairs[key][0])
}

func newIdentityEnv(t *testing.T, policy Policy, change ...func(*NIC, *Member)) identityEnv {
	t.Helper()
	return newIdentityEnvWith(t, acceptTestRuns, policy, change...)
}

func newIdentityEnvWith(
	t *testing.T, constants map[string]any, policy Policy, change ...func(*NIC, *Member),
) identityEnv {
	t.Helper()
	key := KeyCookie
	if features.HaveProgramHelper(ebpf.SchedCLS, asm.FnGetNetnsCookie) != nil {
		key = KeySocketCookie
		if InLockdown() {
			kernelcheck.Skip(t, kernelcheck.NetnsCookieOfSocket,
				"the kernel has no helper for the cookie, and is in lockdown, so that no program reads it from memory")
		}
	}
	c, err := openChecks(key, constants)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	conn, err := rtnl.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	cookie, err := conn.Cookie()
	if err != nil {
		t.Fatal(err)
	}
	policy.NodeAddresses = append(policy.NodeAddresses, netip.MustParseAddr(nodeIP))
	nic := NIC{Index: testNIC, MAC: nicMAC, Major: testMajor, HostCookie: cookie + 2000, Policy: policy}
	link := Member{
		Parent: testNIC, Cookie: cookie, MAC: linkMAC,
		Addresses: []netip.Addr{netip.MustParseAddr(linkIP), netip.MustParseAddr(linkIP6)},
	}
	for _, f := range change {
		f(&nic, &link)
	}
	e := identityEnv{t, c}
	value := bpfNic{Major: testMajor << 16, HostCookie: nic.HostCookie, Forwarded: uint8(nic.Forwarded)}
	copy(value.Mac[:], nic.MAC)
	other := Member{
		Parent: testNIC, Cookie: cookie + 1000, MAC: otherMAC,
		Addresses: []netip.Addr{netip.MustParseAddr(otherIP), netip.MustParseAddr(otherIP6)},
	}
	for _, err := range []error{
		c.startCounts(testNIC), c.SetPolicy(nic), c.maps.DraSharedNics.Put(uint32(testNIC), value),
		c.AddMember(link, testClass), c.AddMember(other, testClass+1),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return e
}

// send returns the reason why the program refuses a frame, and whether it dropped it.
func (e identityEnv) send(frame []byte) (reason Reason, dropped bool) {
	e.t.Helper()
	before := e.refusals()
	verdict, _, err := e.c.egress.Test(frame)
	if err != nil {
		e.t.Fatal(err)
	}
	after := e.refusals()
	for _, r := range reasons {
		if after[r] > before[r] {
			reason = r
		}
	}
	return reason, verdict == 2 // TC_ACT_SHOT
}

func (e identityEnv) refusals() map[Reason]uint64 {
	e.t.Helper()
	sum := map[Reason]uint64{}
	for _, class := range []uint32{testClass, testClass + 1, unidentified(testMajor)} {
		r, err := e.c.Refusals(testNIC, class)
		if err != nil {
			e.t.Fatal(err)
		}
		for _, numbers := range []map[Reason]uint64{r.Dropped, r.Passed} {
			for reason, n := range numbers {
				sum[reason] += n
			}
		}
	}
	return sum
}

// The functions below build frames.

func ether(source net.HardwareAddr, protocol uint16, payload ...[]byte) []byte {
	return etherTo(wireMAC, source, protocol, payload...)
}

func etherTo(destination, source net.HardwareAddr, protocol uint16, payload ...[]byte) []byte {
	frame := append(append([]byte{}, destination...), source...)
	frame = binary.BigEndian.AppendUint16(frame, protocol)
	frame = append(frame, bytes.Join(payload, nil)...)
	return append(frame, make([]byte, max(0, 60-len(frame)))...)
}

func arp(operation uint16, mac net.HardwareAddr, sender, target string) []byte {
	b := append([]byte{0, 1, 8, 0, 6, 4}, byte(operation>>8), byte(operation))
	b = append(append(b, mac...), netip.MustParseAddr(sender).AsSlice()...)
	return append(append(b, make([]byte, 6)...), netip.MustParseAddr(target).AsSlice()...)
}

func ipv4(source string, protocol byte, fragment uint16, payload []byte) []byte {
	b := []byte{0x45, 0, 0, byte(20 + len(payload)), 0, 0, byte(fragment >> 8), byte(fragment), 64, protocol, 0, 0}
	b = append(b, netip.MustParseAddr(source).AsSlice()...)
	return append(append(b, netip.MustParseAddr("10.20.0.254").AsSlice()...), payload...)
}

func udp(source, destination uint16) []byte {
	b := binary.BigEndian.AppendUint16(nil, source)
	b = binary.BigEndian.AppendUint16(b, destination)
	return append(b, 0, 12, 0, 0, 1, 2, 3, 4)
}

// dhcp returns the UDP packet that a DHCP client releases an address with.
func dhcp(mac net.HardwareAddr, address string) []byte {
	message := make([]byte, 240)
	message[0], message[1], message[2] = 1, 1, 6
	copy(message[12:], netip.MustParseAddr(address).AsSlice())
	copy(message[28:], mac)
	return append(append(udp(68, 67)[:8], message...), 53, 1, 7, 255)
}

// relayed returns a DHCP message as a relay forwards it, with its address (giaddr).
func relayed(message []byte) []byte {
	copy(message[8+24:], netip.MustParseAddr(otherIP).AsSlice())
	return message
}

// withoutAddressLength returns a DHCP message without a length (hlen) for the client's address.
func withoutAddressLength(message []byte) []byte {
	message[8+2] = 0
	return message
}

// tcp builds an IPv4 packet with a SYN and valid checksums.
func tcp(source, destination string, from, to uint16) []byte {
	sum := func(b []byte) (n uint32) {
		for i := 0; i < len(b); i += 2 {
			n += uint32(binary.BigEndian.Uint16(b[i:]))
		}
		return n
	}
	fold := func(n uint32) uint16 {
		for n>>16 != 0 {
			n = n>>16 + n&0xffff
		}
		return ^uint16(n)
	}
	addresses := append(netip.MustParseAddr(source).AsSlice(), netip.MustParseAddr(destination).AsSlice()...)
	header := append([]byte{0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0}, addresses...)
	binary.BigEndian.PutUint16(header[10:], fold(sum(header)))
	segment := binary.BigEndian.AppendUint16(nil, from)
	segment = binary.BigEndian.AppendUint16(segment, to)
	segment = append(segment, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0)
	binary.BigEndian.PutUint16(segment[16:], fold(sum(segment)+sum(addresses)+6+uint32(len(segment))))
	return append(header, segment...)
}

func ipv6(source string, next byte, payload ...[]byte) []byte {
	all := bytes.Join(payload, nil)
	b := []byte{0x60, 0, 0, 0, 0, byte(len(all)), next, 255}
	b = append(b, netip.MustParseAddr(source).AsSlice()...)
	return append(append(b, netip.MustParseAddr("fd00:20::fe").AsSlice()...), all...)
}

// nd builds a message of neighbor discovery.
func nd(kind byte, target string, options ...[]byte) []byte {
	b := []byte{kind, 0, 0, 0, 0, 0, 0, 0}
	if target != "" {
		b = append(b, netip.MustParseAddr(target).AsSlice()...)
	}
	return append(b, bytes.Join(options, nil)...)
}

func option(kind byte, mac net.HardwareAddr) []byte { return append([]byte{kind, 1}, mac...) }

// longExtension builds an extension header of 2,048 bytes.
func longExtension(next byte) []byte { return append([]byte{next, 255}, make([]byte, 2046)...) }

// extension builds an extension header of 8 bytes.
func extension(next byte, fragment uint16) []byte {
	return []byte{next, 0, byte(fragment >> 8), byte(fragment), 0, 0, 0, 0}
}

const (
	protoARP  = 0x0806
	protoIPv4 = 0x0800
	protoIPv6 = 0x86dd
	protoVLAN = 0x8100
)

var nonce = []byte{14, 1, 1, 2, 3, 4, 5, 6}

// sentFrame is a frame of a link, and the reason why the programs drop it, or "".
type sentFrame struct {
	frame []byte
	want  Reason
}

// spoofedFrames returns frames that a link may send, and frames that it may not send while identity is enforced.
func spoofedFrames() map[string]sentFrame {
	const allowed = Reason("")
	return map[string]sentFrame{
		"IPv4 of the link": {ether(linkMAC, protoIPv4, ipv4(linkIP, 6, 0, udp(1, 2))), allowed},
		"IPv4 of another link": {
			ether(linkMAC, protoIPv4, ipv4(otherIP, 6, 0, udp(1, 2))), "SourceAddress",
		},
		"IPv4 of the node": {
			ether(linkMAC, protoIPv4, ipv4(nodeIP, 6, 0, udp(1, 2))), "SourceAddress",
		},
		"IPv4 without link": {
			ether(linkMAC, protoIPv4, ipv4(freeIP, 6, 0, udp(1, 2))), "SourceAddress",
		},
		"IPv4 of another network": {
			ether(linkMAC, protoIPv4, ipv4(foreignIP, 6, 0, udp(1, 2))), "SourceAddress",
		},
		"IPv4 multicast as source": {
			ether(linkMAC, protoIPv4, ipv4("224.0.0.1", 6, 0, udp(1, 2))), "SourceAddress",
		},
		"IPv4 without source (DHCP)": {
			ether(linkMAC, protoIPv4, ipv4("0.0.0.0", 17, 0, dhcp(linkMAC, "0.0.0.0"))), allowed,
		},
		"IGMP without source": {ether(linkMAC, protoIPv4, ipv4("0.0.0.0", 2, 0, udp(0, 0))), allowed},
		"a later fragment": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 17, 0x2001, udp(67, 68))), allowed,
		},
		"a truncated header": {ether(linkMAC, protoIPv4, []byte{0x41}), "Protocol"},
		"the MAC of another link": {
			ether(otherMAC, protoIPv4, ipv4(otherIP, 6, 0, udp(1, 2))), "SourceMAC",
		},
		"the MAC of the NIC": {ether(nicMAC, protoIPv4, ipv4(nodeIP, 6, 0, udp(1, 2))), "SourceMAC"},
		"the MAC of no link": {ether(wireMAC, protoIPv4, ipv4(linkIP, 6, 0, udp(1, 2))), "SourceMAC"},
		"DHCP server": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 17, 0, udp(67, 68))), "DHCPServer",
		},
		"DHCP server, another port": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 17, 0, udp(1067, 68))), "DHCPServer",
		},
		"DHCP client, as a relay": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 17, 0, relayed(dhcp(linkMAC, linkIP)))), "DHCPServer",
		},
		"DHCP client with another kind of address": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 17, 0, withoutAddressLength(dhcp(linkMAC, linkIP)))), "DHCPServer",
		},
		"DHCPv6 server": {
			ether(linkMAC, protoIPv6, ipv6(linkIP6, 17, udp(547, 546))), "DHCPServer",
		},
		"DHCPv6 relay": {
			ether(linkMAC, protoIPv6, ipv6(linkIP6, 17, append(udp(547, 547)[:8], 12, 0, 0, 0))), "DHCPServer",
		},
		"DHCPv6 client":   {ether(linkMAC, protoIPv6, ipv6(linkLocal, 17, udp(546, 547))), allowed},
		"ARP of the link": {ether(linkMAC, protoARP, arp(1, linkMAC, linkIP, otherIP)), allowed},
		"ARP probe":       {ether(linkMAC, protoARP, arp(1, linkMAC, "0.0.0.0", linkIP)), allowed},
		"ARP probe for another link": {
			ether(linkMAC, protoARP, arp(1, linkMAC, "0.0.0.0", otherIP)), "ARP",
		},
		"ARP of another link": {ether(linkMAC, protoARP, arp(2, linkMAC, otherIP, linkIP)), "ARP"},
		"ARP of the gateway": {
			ether(linkMAC, protoARP, arp(2, linkMAC, "10.20.0.254", linkIP)), "ARP",
		},
		"ARP with another MAC": {ether(linkMAC, protoARP, arp(2, otherMAC, linkIP, otherIP)), "ARP"},
		"ARP of another kind":  {ether(linkMAC, protoARP, []byte{0, 6, 8, 0, 6, 4}), "ARP"},
		"IPv6 of the link":     {ether(linkMAC, protoIPv6, ipv6(linkIP6, 6, udp(1, 2))), allowed},
		"IPv6 link-local":      {ether(linkMAC, protoIPv6, ipv6(linkLocal, 6, udp(1, 2))), allowed},
		"IPv6 link-local of others": {
			ether(linkMAC, protoIPv6, ipv6("fe80::1", 6, udp(1, 2))), "SourceAddress",
		},
		"IPv6 of another link": {
			ether(linkMAC, protoIPv6, ipv6(otherIP6, 6, udp(1, 2))), "SourceAddress",
		},
		"a fragment of another link": {
			ether(linkMAC, protoIPv6, ipv6(otherIP6, 44, extension(17, 8), udp(1, 2))), "SourceAddress",
		},
		"a fragment of the link": {
			ether(linkMAC, protoIPv6, ipv6(linkIP6, 44, extension(17, 8), udp(547, 546))), allowed,
		},
		"a DHCPv6 server's fragment": {
			ether(linkMAC, protoIPv6, ipv6(linkIP6, 44, extension(17, 1), udp(547, 546))), "DHCPServer",
		},
		"an advertisement's fragment": {
			ether(linkMAC, protoIPv6,
				ipv6(linkLocal, 44, extension(58, 1), nd(134, ""))), "RouterAdvertisement",
		},
		"router advertisement": {
			ether(linkMAC, protoIPv6, ipv6(linkLocal, 58, nd(134, ""))), "RouterAdvertisement",
		},
		"a header behind the bytes that the kernel copies": {
			ether(linkMAC, protoIPv6, ipv6(linkIP6, 60, extension(60, 0), longExtension(17),
				append(udp(5000, 5001), make([]byte, 248-len(udp(5000, 5001)))...))), "Protocol",
		},
		"the same behind options": {
			ether(linkMAC, protoIPv6,
				ipv6(linkLocal, 0, extension(60, 0), extension(58, 0), nd(134, ""))), "RouterAdvertisement",
		},
		"more headers than read": {
			ether(linkMAC, protoIPv6, ipv6(linkLocal, 0, extension(60, 0), extension(60, 0), extension(60, 0),
				extension(60, 0), extension(60, 0), extension(60, 0), extension(58, 0), nd(134, ""))), "Protocol",
		},
		"redirect": {
			ether(linkMAC, protoIPv6, ipv6(linkLocal, 58, nd(137, linkIP6))), "NeighborDiscovery",
		},
		"router solicitation": {
			ether(linkMAC, protoIPv6, ipv6(linkLocal, 58, nd(133, "", option(1, linkMAC)))), allowed,
		},
		"duplicate detection": {ether(linkMAC, protoIPv6, ipv6("::", 58, nd(135, linkIP6, nonce))), allowed},
		"the same, link-local": {
			ether(linkMAC, protoIPv6, ipv6("::", 58, nd(135, linkLocal, nonce))), allowed,
		},
		"detection of others": {
			ether(linkMAC, protoIPv6, ipv6("::", 58, nd(135, otherIP6, nonce))), "NeighborDiscovery",
		},
		"solicitation": {
			ether(linkMAC, protoIPv6, ipv6(linkIP6, 58, nd(135, otherIP6, option(1, linkMAC)))), allowed,
		},
		"the same, another MAC": {
			ether(linkMAC, protoIPv6,
				ipv6(linkIP6, 58, nd(135, otherIP6, option(1, otherMAC)))), "NeighborDiscovery",
		},
		"advertisement": {
			ether(linkMAC, protoIPv6, ipv6(linkIP6, 58, nd(136, linkIP6, option(2, linkMAC)))), allowed,
		},
		"the same, of others": {
			ether(linkMAC, protoIPv6,
				ipv6(linkIP6, 58, nd(136, otherIP6, option(2, linkMAC)))), "NeighborDiscovery",
		},
		"the same, MAC second": {
			ether(linkMAC, protoIPv6,
				ipv6(linkIP6, 58, nd(136, linkIP6, nonce, option(2, otherMAC)))), "NeighborDiscovery",
		},
		"the same, many options": {
			ether(linkMAC, protoIPv6,
				ipv6(linkIP6, 58, nd(136, linkIP6, nonce, nonce, nonce, nonce, nonce, nonce))), "NeighborDiscovery",
		},
		"MLD behind options": {
			ether(linkMAC, protoIPv6, ipv6("::", 0, extension(58, 0), nd(143, ""))), allowed,
		},
		"echo": {ether(linkMAC, protoIPv6, ipv6(linkIP6, 58, nd(128, ""))), allowed},
		"a VLAN tag": {
			ether(linkMAC, protoVLAN, []byte{0, 100, 8, 0}, ipv4(linkIP, 6, 0, udp(1, 2))), "VLAN",
		},
		"a priority tag": {
			ether(linkMAC, protoVLAN, []byte{0xe0, 0, 8, 0}, ipv4(linkIP, 6, 0, udp(1, 2))), "VLAN",
		},
		"a service tag": {ether(linkMAC, 0x88a8, []byte{0, 100, 8, 0}), "VLAN"},
		"a bridge's message": {
			etherTo(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0}, linkMAC, 38, []byte{0x42, 0x42, 3}), "Protocol",
		},
		"a message of multiple VLAN registration": {
			etherTo(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0x21}, linkMAC, 0x88f5, []byte{0}), "Protocol",
		},
		"a message of per-VLAN spanning tree": {
			etherTo(net.HardwareAddr{1, 0, 0x0c, 0xcc, 0xcc, 0xcd}, linkMAC, 50, []byte{0xaa, 0xaa, 3}), "Protocol",
		},
		"a pause frame":            {ether(linkMAC, 0x8808, []byte{0, 1, 0xff, 0xff}), "Protocol"},
		"link aggregation control": {ether(linkMAC, 0x8809, []byte{1}), "Protocol"},
		"link layer discovery":     {ether(linkMAC, 0x88cc, []byte{2, 7}), "Protocol"},
		"an old service tag":       {ether(linkMAC, 0x9100, []byte{0, 100, 8, 0}), "VLAN"},
		"another protocol":         {ether(linkMAC, 0x88b5, []byte("text")), allowed},
		"MPLS":                     {ether(linkMAC, 0x8847, []byte{0, 1, 1, 64}), "Protocol"},
		"MPLS, multicast":          {ether(linkMAC, 0x8848, []byte{0, 1, 1, 64}), "Protocol"},
		"a tag of a bridge port":   {ether(linkMAC, 0x893f, []byte{0, 1, 0, 1}), "Protocol"},
		"a tag of a switch port":   {ether(linkMAC, 0x8926, []byte{0, 1, 0, 1}), "Protocol"},
		"ARP in IEEE 802.3": {
			ether(linkMAC, 36, []byte{0xaa, 0xaa, 3, 0, 0, 0, 8, 6}, arp(1, linkMAC, otherIP, otherIP)), "Protocol",
		},
		"IPv4 in IEEE 802.3": {
			ether(linkMAC, 36, []byte{0xaa, 0xaa, 3, 0, 0, 0xf8, 8, 0}, ipv4(otherIP, 6, 0, udp(1, 2))), "Protocol",
		},
		"a vendor's protocol in IEEE 802.3": {
			ether(linkMAC, 36, []byte{0xaa, 0xaa, 3, 0, 0, 0x0c, 1, 2}, udp(1, 2)), allowed,
		},
		"a routing protocol in IEEE 802.3": {ether(linkMAC, 36, []byte{0xfe, 0xfe, 3, 0x83}), allowed},
		"PPPoE discovery":                  {ether(linkMAC, 0x8863, []byte{0x11, 7}), "Protocol"},
		"PPPoE session":                    {ether(linkMAC, 0x8864, []byte{0x11, 0}), "Protocol"},
		"VRRP":                             {ether(linkMAC, protoIPv4, ipv4(linkIP, 112, 0, udp(1, 2))), "Protocol"},
		"VRRP, IPv6":                       {ether(linkMAC, protoIPv6, ipv6(linkLocal, 112, udp(1, 2))), "Protocol"},
		"a fragment of VRRP":               {ether(linkMAC, protoIPv4, ipv4(linkIP, 112, 0x2001, udp(1, 2))), "Protocol"},
		"a later fragment of VRRP, IPv6": {
			ether(linkMAC, protoIPv6, ipv6(linkIP6, 44, extension(112, 8), udp(1, 2))), "Protocol",
		},
		"OSPF":       {ether(linkMAC, protoIPv4, ipv4(linkIP, 89, 0, udp(1, 2))), "Protocol"},
		"OSPF, IPv6": {ether(linkMAC, protoIPv6, ipv6(linkLocal, 89, udp(1, 2))), "Protocol"},
		"EIGRP":      {ether(linkMAC, protoIPv4, ipv4(linkIP, 88, 0, udp(1, 2))), "Protocol"},
		"RIP": {
			etherTo(routersMAC, linkMAC, protoIPv4, ipv4(linkIP, 17, 0, udp(520, 520))), "Protocol",
		},
		"RIP, IPv6": {
			etherTo(net.HardwareAddr{0x33, 0x33, 0, 0, 0, 9}, linkMAC, protoIPv6, ipv6(linkLocal, 17, udp(521, 521))),
			"Protocol",
		},
		"HSRP": {
			etherTo(routersMAC, linkMAC, protoIPv4, ipv4(linkIP, 17, 0, udp(1985, 1985))), "Protocol",
		},
		"GLBP": {
			etherTo(routersMAC, linkMAC, protoIPv4, ipv4(linkIP, 17, 0, udp(3222, 3222))), "Protocol",
		},
		"a datagram for the port of HSRP": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 17, 0, udp(1985, 1985))), allowed,
		},
		"IPv4 router advertisement": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 1, 0, []byte{9, 0, 0, 0, 1, 2, 0, 30})), "RouterAdvertisement",
		},
		"IPv4 echo": {ether(linkMAC, protoIPv4, ipv4(linkIP, 1, 0, []byte{8, 0, 0, 0})), allowed},
		"IS-IS": {
			etherTo(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0x14}, linkMAC, 40, []byte{0xfe, 0xfe, 3}), "Protocol",
		},
		"connectivity fault management": {
			etherTo(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0x31}, linkMAC, 0x8902, []byte{0}), "Protocol",
		},
		"IGMP report": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 2, 0, []byte{0x22, 0, 0, 0, 0, 0, 0, 0})), allowed,
		},
		"IGMP query": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 2, 0, []byte{0x11, 0, 0, 0, 0, 0, 0, 0})), "MulticastRouter",
		},
		"IGMP query, no source": {
			ether(linkMAC, protoIPv4, ipv4("0.0.0.0", 2, 0, []byte{0x11, 0, 0, 0})), "MulticastRouter",
		},
		"DVMRP": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 2, 0, []byte{0x13, 1, 0, 0})), "MulticastRouter",
		},
		"PIM version 1": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 2, 0, []byte{0x14, 0, 0, 0})), "MulticastRouter",
		},
		"multicast router advert": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 2, 0, []byte{0x30, 20, 0, 0})), "MulticastRouter",
		},
		"PIM": {
			ether(linkMAC, protoIPv4, ipv4(linkIP, 103, 0, []byte{0x20, 0, 0, 0})), "MulticastRouter",
		},
		"PIM, IPv6": {
			ether(linkMAC, protoIPv6, ipv6(linkLocal, 103, []byte{0x20, 0, 0, 0})), "MulticastRouter",
		},
		"IGMP without its type": {
			etherTo(wireMAC, linkMAC, protoIPv4, ipv4(linkIP, 2, 0, nil))[:34], "Protocol",
		},
		"MLD query": {
			ether(linkMAC, protoIPv6, ipv6(linkLocal, 0, extension(58, 0), nd(130, ""))), "MulticastRouter",
		},
		"MLD query, no options": {ether(linkMAC, protoIPv6, ipv6(linkLocal, 58, nd(130, ""))), "MulticastRouter"},
		"MLD query in a fragment": {
			ether(linkMAC, protoIPv6, ipv6(linkLocal, 44, extension(58, 1), nd(130, ""))), "MulticastRouter",
		},
		"MLD report, version 1": {ether(linkMAC, protoIPv6, ipv6(linkLocal, 0, extension(58, 0), nd(131, ""))), allowed},
		"IPv6 multicast router advert": {
			ether(linkMAC, protoIPv6, ipv6(linkLocal, 58, nd(151, ""))), "MulticastRouter",
		},
		"solicitation behind options": {
			ether(linkMAC, protoIPv6,
				ipv6(linkIP6, 0, extension(58, 0), nd(135, otherIP6, option(1, linkMAC)))), "NeighborDiscovery",
		},
		"advertisement of others in a fragment": {
			ether(linkMAC, protoIPv6,
				ipv6(linkIP6, 44, extension(58, 1), nd(136, otherIP6, option(2, linkMAC)))), "NeighborDiscovery",
		},
	}
}

func TestProgram_dropsSpoofedFrames(t *testing.T) {
	const allowed = Reason("")
	subnets := Policy{Subnets: []netip.Prefix{
		netip.MustParsePrefix("10.20.0.0/16"), netip.MustParsePrefix("fd00:20::/64"),
	}}
	envs := map[Identity]identityEnv{}
	for _, identity := range []Identity{IdentityEnforce, IdentityAudit, IdentityOff} {
		subnets.Identity = identity
		envs[identity] = newIdentityEnv(t, subnets)
	}
	for name, tc := range spoofedFrames() {
		for identity, e := range envs {
			e.t = t
			want := tc.want
			if identity == IdentityOff {
				want = allowed
			}
			reason, dropped := e.send(tc.frame)
			if reason != want || dropped != (identity == IdentityEnforce && want != allowed) {
				t.Errorf("%s, identity %d: reason %q, dropped %t; want reason %q", name, identity, reason, dropped, want)
			}
		}
	}
}

func TestProgram_permitsFramesThatNetworkAllows(t *testing.T) {
	withoutAddresses := func(_ *NIC, m *Member) { m.Addresses = nil }
	policy := Policy{
		Identity: IdentityEnforce, VLANs: []uint16{100}, MACs: []net.HardwareAddr{vrrpMAC},
		Addresses: []netip.Prefix{netip.MustParsePrefix(vip + "/32")},
		Subnets:   []netip.Prefix{netip.MustParsePrefix("10.20.0.0/24"), netip.MustParsePrefix("fd00:20::/64")},
	}
	for name, tc := range map[string]struct {
		policy Policy
		change func(*NIC, *Member)
		frame  []byte
		want   Reason
	}{
		"a VLAN": {policy, nil, ether(linkMAC, protoVLAN, []byte{0, 100, 8, 0}), ""},
		"a VLAN in a VLAN": {
			policy, nil, ether(linkMAC, protoVLAN, []byte{0, 100, 0x81, 0, 0, 200, 8, 0}), "VLAN",
		},
		"a service tag of the VLAN": {policy, nil, ether(linkMAC, 0x88a8, []byte{0, 100, 8, 0}), "VLAN"},
		"another VLAN":              {policy, nil, ether(linkMAC, protoVLAN, []byte{0, 101, 8, 0}), "VLAN"},
		"an address":                {policy, nil, ether(linkMAC, protoIPv4, ipv4(vip, 6, 0, udp(1, 2))), ""},
		"ARP for an address":        {policy, nil, ether(linkMAC, protoARP, arp(1, linkMAC, vip, vip)), ""},
		"a MAC":                     {policy, nil, ether(vrrpMAC, protoIPv4, ipv4(vip, 6, 0, udp(1, 2))), ""},
		"ARP with a MAC":            {policy, nil, ether(vrrpMAC, protoARP, arp(1, vrrpMAC, vip, vip)), ""},
		"a MAC, another's IP": {
			policy, nil, ether(vrrpMAC, protoIPv4, ipv4(otherIP, 6, 0, udp(1, 2))), "SourceAddress",
		},
		"a MAC, the link's own IP": {policy, nil, ether(vrrpMAC, protoIPv4, ipv4(linkIP, 6, 0, udp(1, 2))), ""},
		"VRRP":                     {policy, nil, ether(vrrpMAC, protoIPv4, ipv4(vip, 112, 0, udp(1, 2))), ""},
		"HSRP": {
			policy, nil, etherTo(routersMAC, linkMAC, protoIPv4, ipv4(linkIP, 17, 0, udp(1985, 1985))), "",
		},
		"OSPF of a pod that may forward": {Policy{Identity: IdentityEnforce, Forwarding: true}, nil,
			ether(linkMAC, protoIPv4, ipv4(linkIP, 89, 0, udp(1, 2))), ""},
		"VRRP, with allowed addresses only": {
			Policy{Identity: IdentityEnforce, Addresses: policy.Addresses}, nil,
			ether(linkMAC, protoIPv4, ipv4(linkIP, 112, 0, udp(1, 2))), "",
		},
		"no recorded address": {
			policy, withoutAddresses, ether(linkMAC, protoIPv4, ipv4(freeIP, 6, 0, udp(1, 2))), "",
		},
		"the same, IPv6": {
			policy, withoutAddresses, ether(linkMAC, protoIPv6, ipv6(freeIP6, 6, udp(1, 2))), "",
		},
		"the same, another's": {
			policy, withoutAddresses, ether(linkMAC, protoIPv4, ipv4(otherIP, 6, 0, udp(1, 2))), "SourceAddress",
		},
		"the same, the node's": {policy, withoutAddresses,
			ether(linkMAC, protoIPv4, ipv4(nodeIP, 6, 0, udp(1, 2))), "SourceAddress"},
		"the same, outside of the subnets": {policy, withoutAddresses,
			ether(linkMAC, protoIPv4, ipv4(foreignIP, 6, 0, udp(1, 2))), "SourceAddress"},
		"no subnets": {Policy{Identity: IdentityEnforce}, withoutAddresses,
			ether(linkMAC, protoIPv4, ipv4(foreignIP, 6, 0, udp(1, 2))), ""},
		"no subnets, another's": {Policy{Identity: IdentityEnforce}, withoutAddresses,
			ether(linkMAC, protoIPv4, ipv4(otherIP, 6, 0, udp(1, 2))), "SourceAddress"},
		"an address of the subnets before the link has leased one": {
			policy, func(_ *NIC, m *Member) { m.Addresses, m.Assigned = nil, true },
			ether(linkMAC, protoIPv4, ipv4(freeIP, 6, 0, udp(1, 2))), "SourceAddress",
		},
		"no address before the link has leased one": {
			policy, func(_ *NIC, m *Member) { m.Addresses, m.Assigned = nil, true },
			ether(linkMAC, protoIPv4, ipv4("0.0.0.0", 17, 0, udp(1, 2))), "",
		},
		"an address in the network of a router": {Policy{Identity: IdentityEnforce, Autoconf: true}, nil,
			ether(linkMAC, protoIPv6, ipv6(autoconf, 6, udp(1, 2))), ""},
		"an address in the network of a router, outside the subnets": {
			Policy{Identity: IdentityEnforce, Autoconf: true, Subnets: policy.Subnets}, nil,
			ether(linkMAC, protoIPv6, ipv6(autoconf, 6, udp(1, 2))), "",
		},
		"advertisement of an address in the network of a router": {
			Policy{Identity: IdentityEnforce, Autoconf: true}, nil,
			ether(linkMAC, protoIPv6, ipv6(linkLocal, 58, nd(136, autoconf))), "",
		},
		"the same without router advertisements": {Policy{Identity: IdentityEnforce}, nil,
			ether(linkMAC, protoIPv6, ipv6(autoconf, 6, udp(1, 2))), "SourceAddress"},
		"an address of another host in the network of a router": {Policy{Identity: IdentityEnforce, Autoconf: true}, nil,
			ether(linkMAC, protoIPv6, ipv6("fd00:99::ff:fe00:77", 6, udp(1, 2))), "SourceAddress"},
		"no subnets, its link-local address": {Policy{Identity: IdentityEnforce}, withoutAddresses,
			ether(linkMAC, protoIPv6, ipv6(linkLocal, 6, udp(1, 2))), ""},
		"no subnets, the link-local address of a router": {Policy{Identity: IdentityEnforce}, withoutAddresses,
			ether(linkMAC, protoIPv6, ipv6("fe80::1", 6, udp(1, 2))), "SourceAddress"},
		"no subnets, the link-local address of another link": {Policy{Identity: IdentityEnforce}, withoutAddresses,
			ether(linkMAC, protoIPv6, ipv6("fe80::ff:fe00:2", 6, udp(1, 2))), "SourceAddress"},
		"no subnets, advertisement of a router's link-local address": {Policy{Identity: IdentityEnforce}, withoutAddresses,
			ether(linkMAC, protoIPv6, ipv6(linkLocal, 58, nd(136, "fe80::1"))), "NeighborDiscovery"},
		"no subnets, an allowed link-local address": {
			Policy{Identity: IdentityEnforce, Addresses: []netip.Prefix{netip.MustParsePrefix("fe80::1/128")}},
			withoutAddresses, ether(linkMAC, protoIPv6, ipv6("fe80::1", 6, udp(1, 2))), "",
		},
		"a packet socket of the node": {policy, func(n *NIC, m *Member) { n.HostCookie, m.Cookie = m.Cookie, 5 },
			ether(nicMAC, 0x88b5, udp(1, 2)), ""},
		// The kernel makes the frames of a test run as if they were sent through a link of the NIC. Frames of the cluster
		// network, which the node forwards, are in TestForwardedByNode_hasGuaranteeAndBorrows and
		// TestForwardedByNode_permitsRedirectedFrames.
		"the address of the NIC from another namespace, on a NIC that forwards": {
			policy, func(n *NIC, m *Member) { n.Forwarded, m.Cookie = ForwardedByRoute, 5 },
			ether(nicMAC, protoIPv4, ipv4(foreignIP, 6, 0, udp(1, 2))), "SourceMAC",
		},
		"the address of the NIC from a share, on a NIC that forwards": {
			policy, func(n *NIC, _ *Member) { n.Forwarded = ForwardedByRoute },
			ether(nicMAC, protoIPv4, ipv4(foreignIP, 6, 0, udp(1, 2))), "SourceMAC",
		},
	} {
		t.Run(name, func(t *testing.T) {
			change := tc.change
			if change == nil {
				change = func(*NIC, *Member) {}
			}
			reason, dropped := newIdentityEnv(t, tc.policy, change).send(tc.frame)
			if reason != tc.want || dropped != (tc.want != "") {
				t.Errorf("reason %q, dropped %t; want reason %q", reason, dropped, tc.want)
			}
		})
	}
}

// The frames of a test run do not have a route, but have an Internet socket if they are IP.
func TestProgram_needsRouteOfInternetSocket(t *testing.T) {
	enforce := Policy{Identity: IdentityEnforce}
	forwarding := Policy{Identity: IdentityEnforce, Forwarding: true}
	ofNode := func(n *NIC, m *Member) { n.HostCookie, m.Cookie = m.Cookie, 5 }
	for name, tc := range map[string]struct {
		policy Policy
		change func(*NIC, *Member)
		frame  []byte
		want   Reason
	}{
		"of the node": {
			enforce, ofNode, ether(nicMAC, protoIPv4, ipv4(foreignIP, 6, 0, udp(1, 2))), "SourceMAC",
		},
		"of a pod":                  {enforce, nil, ether(linkMAC, protoIPv4, ipv4(linkIP, 6, 0, udp(1, 2))), "SourceMAC"},
		"of a pod, IPv6":            {enforce, nil, ether(linkMAC, protoIPv6, ipv6(linkIP6, 6, udp(1, 2))), "SourceMAC"},
		"of a pod that may forward": {forwarding, nil, ether(linkMAC, protoIPv4, ipv4(linkIP, 6, 0, udp(1, 2))), ""},
		"a packet socket of a pod":  {enforce, nil, ether(linkMAC, 0x88b5, udp(1, 2)), ""},
	} {
		t.Run(name, func(t *testing.T) {
			change := tc.change
			if change == nil {
				change = func(*NIC, *Member) {}
			}
			reason, dropped := newIdentityEnvWith(t, nil, tc.policy, change).send(tc.frame)
			if reason != tc.want || dropped != (tc.want != "") {
				t.Errorf("reason %q, dropped %t; want reason %q", reason, dropped, tc.want)
			}
		})
	}
}

// A link that an earlier release attached keeps working until its pod is recreated.
func TestProgram_onlyCountsFramesOfEarlierAttachments(t *testing.T) {
	enforce := Policy{Identity: IdentityEnforce}
	forged := ether(linkMAC, protoIPv4, ipv4(foreignIP, 6, 0, udp(1, 2)))
	e := newIdentityEnv(t, enforce, func(_ *NIC, m *Member) { m.Audit = true })
	if reason, dropped := e.send(forged); reason != "SourceAddress" || dropped {
		t.Errorf("attached by an earlier release: reason %q, dropped %t, want it counted", reason, dropped)
	}
	e = newIdentityEnv(t, enforce)
	var value bpfLink
	key := bpfReceiver{Parent: testNIC, Mac: [6]uint8(linkMAC)}
	if err := e.c.maps.DraSharedLinks.LookupAndDelete(key, &value); err != nil {
		t.Fatal(err)
	}
	if reason, dropped := e.send(forged); reason != "" || dropped {
		t.Errorf("not restored yet: reason %q, dropped %t, want it passed", reason, dropped)
	}
}

// The network decides how many requests a link has to answer, so its answers are charged to its
// share and not dropped. Its broadcasts reach all hosts of the network.
func TestProgram_limitsARPOfSender(t *testing.T) {
	const frames = 3000
	broadcast := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	requestOf := func(mac net.HardwareAddr, ip string) []byte {
		return etherTo(broadcast, mac, protoARP, arp(1, mac, ip, otherIP))
	}
	for name, tc := range map[string]struct {
		frame   []byte
		limited bool
	}{
		"requests": {frame: requestOf(linkMAC, linkIP), limited: true},
		"answers":  {frame: ether(linkMAC, protoARP, arp(2, linkMAC, linkIP, otherIP))},
		"solicitations": {
			frame: etherTo(net.HardwareAddr{0x33, 0x33, 0xff, 0, 0, 2}, linkMAC, protoIPv6,
				ipv6(linkIP6, 58, nd(135, otherIP6, option(1, linkMAC)))),
			limited: true,
		},
		"advertisements": {
			frame: ether(linkMAC, protoIPv6, ipv6(linkIP6, 58, nd(136, linkIP6, option(2, linkMAC)))),
		},
		"requests with an allowed address": {frame: requestOf(vrrpMAC, vip), limited: true},
		"answers with an allowed address":  {frame: ether(vrrpMAC, protoARP, arp(2, vrrpMAC, vip, otherIP))},
	} {
		t.Run(name, func(t *testing.T) {
			e := newIdentityEnv(t, Policy{
				Identity: IdentityEnforce, MACs: []net.HardwareAddr{vrrpMAC},
				Addresses: []netip.Prefix{netip.MustParsePrefix(vip + "/32")},
			})
			passed, start := 0, time.Now()
			for range frames {
				if _, dropped := e.send(tc.frame); !dropped {
					passed++
				}
			}
			seconds := time.Since(start).Seconds() // may be more than one; the limit is 1000 per second
			switch {
			case tc.limited && (passed < 1000 || passed > 1000*(2+int(seconds))):
				t.Errorf("%d of %d frames passed in %.1f s, want 1000 in each second", passed, frames, seconds)
			case !tc.limited && passed < frames:
				t.Errorf("%d of %d frames passed, want all", passed, frames)
			}
			// Requests that a link has to answer do not keep it from asking.
			if _, dropped := e.send(requestOf(linkMAC, linkIP)); dropped && !tc.limited {
				t.Error("a request after many answers was dropped")
			}
		})
	}
}

// A NIC gets to know a number of senders in a second. A host without an address does not use up that number.
func TestProgram_learnsSendersDespiteSenderWithoutAddress(t *testing.T) {
	e := newIdentityEnv(t, Policy{Identity: IdentityEnforce})
	broadcast := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	receive := func(mac net.HardwareAddr) (class uint32) {
		const priority = 8 // index in struct __sk_buff
		var context [48]uint32
		frame := etherTo(broadcast, mac, protoARP, arp(1, mac, otherIP, linkIP))
		if _, err := e.c.ingress.Run(&ebpf.RunOptions{Data: frame, ContextOut: &context}); err != nil {
			t.Fatal(err)
		}
		return context[priority]
	}
	receive(make(net.HardwareAddr, 6))
	const control = 3
	if class := receive(net.HardwareAddr{2, 7, 7, 7, 7, 7}); class != uint32(testMajor)<<16|control {
		t.Errorf("a request of a host after one without address has class %#x, want that of control frames", class)
	}
}

func TestClassifier_SetBlocked(t *testing.T) {
	e := newIdentityEnv(t, Policy{Identity: IdentityEnforce})
	m := Member{Parent: testNIC, MAC: linkMAC}
	frame := ether(linkMAC, protoIPv4, ipv4(linkIP, 6, 0, udp(1, 2)))
	for _, blocked := range []bool{true, false} {
		if changed, err := e.c.SetBlocked(m, blocked); err != nil || !changed {
			t.Fatalf("SetBlocked(%t) returned %t and error %v", blocked, changed, err)
		}
		if changed, err := e.c.SetBlocked(m, blocked); err != nil || changed {
			t.Fatalf("SetBlocked(%t) again returned %t and error %v", blocked, changed, err)
		}
		if reason, dropped := e.send(frame); dropped != blocked || blocked != (reason == "Blocked") {
			t.Errorf("blocked %t: reason %q, dropped %t", blocked, reason, dropped)
		}
	}
}

// A link that a plugin with another configuration or an earlier release attached has other entries than it should: then
// it does not have a class, and the driver restores them.
func TestClassifier_Lookup_comparesAllEntries(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Classifier, *Member) error
		want   bool // whether the link has its class
	}{
		"unchanged":      {func(*Classifier, *Member) error { return nil }, true},
		"a blocked link": {func(c *Classifier, m *Member) error { _, err := c.SetBlocked(*m, true); return err }, true},
		"the network trusts addresses now": {func(_ *Classifier, m *Member) error {
			m.TrustMAC = true
			return nil
		}, false},
		"an earlier release wrote no identity": {func(c *Classifier, m *Member) error {
			return c.maps.DraSharedLinks.Delete(receiver(*m))
		}, false},
		"the link may reach others now": {func(_ *Classifier, m *Member) error {
			m.Bridge = true
			return nil
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			e := newIdentityEnv(t, Policy{Identity: IdentityEnforce})
			m := Member{Parent: testNIC, Cookie: 77, MAC: net.HardwareAddr{2, 0, 0, 0, 7, 7}}
			const class = testMajor<<16 | 0x77
			if err := e.c.AddMember(m, class); err != nil {
				t.Fatal(err)
			}
			if err := tc.change(e.c, &m); err != nil {
				t.Fatal(err)
			}
			send, _, err := e.c.Lookup(m)
			if err != nil || send == class != tc.want {
				t.Errorf("Lookup returned %x and error %v, want the class: %t", send, err, tc.want)
			}
			if err := e.c.AddMember(m, class); err != nil {
				t.Fatal(err)
			}
			if send, receive, err := e.c.Lookup(m); err != nil || send != class || receive != class {
				t.Errorf("Lookup after AddMember returned %x, %x, and error %v, want the class", send, receive, err)
			}
		})
	}
}

// If a node's NIC gets another MAC address and another IP address at the same time, the node does not hold the former
// IP address, which a link can then have.
func TestClassifier_SetPolicy_releasesAddressesOfFormerMAC(t *testing.T) {
	e := newIdentityEnv(t, Policy{Identity: IdentityEnforce})
	former, next := netip.MustParseAddr(nodeIP), netip.MustParseAddr(freeIP)
	if owner, err := e.c.OwnerOf(testNIC, former); err != nil || !bytes.Equal(owner, nicMAC) {
		t.Fatalf("the owner of %s is %s (error %v), want %s", former, owner, err, nicMAC)
	}
	mac := net.HardwareAddr{2, 0, 0, 0, 0x77, 3}
	nic := NIC{Index: testNIC, MAC: mac, Major: testMajor, Policy: Policy{NodeAddresses: []netip.Addr{next}}}
	if err := e.c.SetPolicy(nic); err != nil {
		t.Fatal(err)
	}
	if owner, err := e.c.OwnerOf(testNIC, former); err != nil || owner != nil {
		t.Errorf("the owner of %s is %s (error %v), want none", former, owner, err)
	}
	if owner, err := e.c.OwnerOf(testNIC, next); err != nil || !bytes.Equal(owner, mac) {
		t.Errorf("the owner of %s is %s (error %v), want %s", next, owner, err, mac)
	}
}

// A link that gets another address may not use the former one, which another link can get.
func TestClassifier_SetAddresses_releasesFormerAddresses(t *testing.T) {
	e := newIdentityEnv(t, Policy{Identity: IdentityEnforce})
	m := Member{Parent: testNIC, Cookie: 1, MAC: linkMAC, Assigned: true}
	before, after := netip.MustParseAddr(linkIP), netip.MustParseAddr(freeIP)
	for _, tc := range []struct {
		addresses []netip.Addr
		owned     netip.Addr
		free      []netip.Addr
	}{
		{[]netip.Addr{after}, after, []netip.Addr{before, netip.MustParseAddr(linkIP6)}},
		{nil, netip.Addr{}, []netip.Addr{before, after}},
		{[]netip.Addr{before}, before, []netip.Addr{after}},
	} {
		m.Addresses = tc.addresses
		if err := e.c.SetAddresses(m); err != nil {
			t.Fatal(err)
		}
		if tc.owned.IsValid() {
			if owner, err := e.c.OwnerOf(testNIC, tc.owned); err != nil || !bytes.Equal(owner, linkMAC) {
				t.Errorf("%v: the owner of %s is %s (error %v), want %s", tc.addresses, tc.owned, owner, err, linkMAC)
			}
		}
		for _, address := range tc.free {
			if owner, err := e.c.OwnerOf(testNIC, address); err != nil || owner != nil {
				t.Errorf("%v: the owner of %s is %s (error %v), want none", tc.addresses, address, owner, err)
			}
		}
	}
	m.Addresses = []netip.Addr{netip.MustParseAddr(otherIP)}
	if err := e.c.SetAddresses(m); !errors.Is(err, errAddressTaken) {
		t.Errorf("SetAddresses with the address of another link returned %v, want %v", err, errAddressTaken)
	}
	m.MAC, m.Addresses = net.HardwareAddr{2, 9, 9, 9, 9, 9}, nil // not attached
	if err := e.c.SetAddresses(m); err != nil {
		t.Errorf("SetAddresses of a link without an identity returned %v", err)
	}
}

func TestClassifier_RemoveMember_removesIdentity(t *testing.T) {
	for name, known := range map[string][]netip.Addr{
		"addresses known":   {netip.MustParseAddr(linkIP), netip.MustParseAddr(linkIP6)},
		"addresses unknown": nil,
	} {
		t.Run(name, func(t *testing.T) {
			e := newIdentityEnv(t, Policy{Identity: IdentityEnforce})
			members, err := e.c.Members()
			if err != nil || len(members) != 2 {
				t.Fatalf("Members returned %v and error %v, want 2", members, err)
			}
			for _, m := range members {
				if bytes.Equal(m.MAC, linkMAC) {
					m.Addresses = known
				}
				if err := e.c.RemoveMember(m); err != nil {
					t.Fatal(err)
				}
			}
			if err := e.c.RemoveNIC(testNIC); err != nil {
				t.Fatal(err)
			}
			left := map[string]int{}
			count := func(name string, n int, err error) {
				if err != nil {
					t.Fatal(err)
				}
				if n > 0 {
					left[name] = n
				}
			}
			links, err := entries[bpfReceiver, bpfLink](e.c.maps.DraSharedLinks)
			count("links", len(links), err)
			addresses, err := entries[bpfAddress, uint64](e.c.maps.DraSharedAddresses)
			count("addresses", len(addresses), err)
			tenants, err := entries[bpfTenant, uint32](e.c.maps.DraSharedTenants)
			count("tenants", len(tenants), err)
			refusals, err := entries[bpfCharged, bpfRefusals](e.c.maps.DraSharedRefused)
			count("refusals", len(refusals), err)
			senders, err := entries[bpfSender, uint32](e.c.maps.DraSharedTx)
			count("senders", len(senders), err)
			if diff := cmp.Diff(map[string]int{}, left); diff != "" {
				t.Errorf("entries that are left (-want +got):\n%s", diff)
			}
		})
	}
}

// A plugin that may read cookies added a link, and one that may not removes it.
func TestClassifier_RemoveMember_memberOfAnotherKey(t *testing.T) {
	e := newIdentityEnv(t, Policy{Identity: IdentityEnforce})
	members, err := e.c.Members()
	if err != nil || len(members) != 2 {
		t.Fatalf("Members returned %v and error %v, want 2", members, err)
	}
	key := e.c.key
	for _, e.c.key = range []Key{KeyMAC, key} {
		for _, m := range members {
			if err := e.c.RemoveMember(m); err != nil {
				t.Fatal(err)
			}
		}
		if left, err := e.c.Members(); err != nil || len(left) > 0 {
			t.Fatalf("with key %v: Members returned %v and error %v, want none", e.c.key, left, err)
		}
	}
}

func TestProgram_gatewayAddresses(t *testing.T) {
	const gateway = "10.20.0.250"
	addresses := []netip.Addr{netip.MustParseAddr(gateway)}
	frame := ether(linkMAC, protoARP, arp(2, linkMAC, gateway, otherIP))
	var link Member
	e := newIdentityEnv(t, Policy{Identity: IdentityEnforce}, func(_ *NIC, m *Member) { m.Addresses, link = nil, *m })
	expect := func(when string, want Reason) {
		t.Helper()
		if reason, _ := e.send(frame); reason != want {
			t.Errorf("ARP for the address, %s: reason %q, want %q", when, reason, want)
		}
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	expect("which no claim has as gateway", "")
	check(e.c.AddGateways(testNIC, addresses))
	expect("which is a gateway", "ARP")
	check(e.c.RemoveGatewaysExcept(testNIC, addresses))
	expect("which still is a gateway", "ARP")
	check(e.c.RemoveGatewaysExcept(testNIC, nil))
	expect("which is no longer a gateway", "")

	check(e.c.AddGateways(testNIC, addresses))
	link.Addresses = addresses
	check(e.c.AddMember(link, testClass))
	expect("of the link that is the gateway", "")
	check(e.c.AddGateways(testNIC, addresses))
	expect("of the link that is the gateway, held again", "")
	if owner, err := e.c.OwnerOf(testNIC, addresses[0]); err != nil || owner.String() != linkMAC.String() {
		t.Errorf("owner of the address: %s, %v; want %s", owner, err, linkMAC)
	}
}
