// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dad

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// family is the protocol that probes addresses of an IP family.
type family struct {
	is4       bool
	etherType uint16
	// group is the multicast MAC address that hosts answer to, if any.
	group net.HardwareAddr
	// probe returns a frame that probes an address.
	probe func(mac net.HardwareAddr, address netip.Addr) []byte
	// parse returns the address that the sender of a frame claims, and the sender's MAC
	// address.
	parse func(frame []byte) (netip.Addr, net.HardwareAddr, bool)
}

var (
	ipv4 = family{is4: true, etherType: unix.ETH_P_ARP, probe: arpProbe, parse: parseARP}
	ipv6 = family{
		etherType: unix.ETH_P_IPV6, group: net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1},
		probe: neighborSolicitation, parse: parseNeighborDiscovery,
	}
)

// Sizes and offsets in bytes.
const (
	ethernetSize = 14
	arpSize      = 28 // for Ethernet and IPv4
	ipv6Size     = 40
	ndSize       = 24  // of a neighbor solicitation or advertisement, without options
	maxFrame     = 256 // what the parsers read is at the beginning
)

// Types of ICMPv6 messages (RFC 4861).
const (
	icmpv6Solicitation  = 135
	icmpv6Advertisement = 136
)

// ethernet returns the header of a frame, with room for the payload.
func ethernet(to, from net.HardwareAddr, etherType uint16, payload int) []byte {
	frame := make([]byte, 0, ethernetSize+payload)
	frame = append(append(frame, to[:6]...), from[:6]...)
	return binary.BigEndian.AppendUint16(frame, etherType)
}

// arpProbe returns an ARP probe (RFC 5227, section 2.1.1): a request without the sender's
// IP address.
func arpProbe(mac net.HardwareAddr, address netip.Addr) []byte {
	broadcast := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	frame := ethernet(broadcast, mac, unix.ETH_P_ARP, arpSize)
	frame = append(frame, 0, 1, 8, 0, 6, 4, 0, 1) // Ethernet, IPv4, sizes of the addresses, request
	frame = append(append(frame, mac[:6]...), 0, 0, 0, 0)
	frame = append(frame, make([]byte, 6)...)
	ip := address.As4()
	return append(frame, ip[:]...)
}

// parseARP parses an ARP packet. The sender of a probe claims the address that it asks
// for.
func parseARP(frame []byte) (address netip.Addr, mac net.HardwareAddr, ok bool) {
	if len(frame) < ethernetSize+arpSize {
		return address, nil, false
	}
	packet := frame[ethernetSize:]
	if !bytes.Equal(packet[:6], []byte{0, 1, 8, 0, 6, 4}) {
		return address, nil, false
	}
	mac = bytes.Clone(packet[8:14])
	address = netip.AddrFrom4([4]byte(packet[14:18]))
	if address.IsUnspecified() {
		address = netip.AddrFrom4([4]byte(packet[24:28]))
	}
	return address, mac, true
}

// neighborSolicitation returns the message that a host detects duplicates with (RFC 4862, section 5.4.2): it does not
// have a source address.
func neighborSolicitation(mac net.HardwareAddr, address netip.Addr) []byte {
	target := address.As16()
	group := [16]byte{0xff, 0x02, 11: 1, 12: 0xff, 13: target[13], 14: target[14], 15: target[15]}
	to := net.HardwareAddr{0x33, 0x33, 0xff, target[13], target[14], target[15]}
	frame := ethernet(to, mac, unix.ETH_P_IPV6, ipv6Size+ndSize)
	frame = append(frame, 0x60, 0, 0, 0, 0, ndSize, unix.IPPROTO_ICMPV6, 255)
	frame = append(frame, make([]byte, 16)...)
	frame = append(frame, group[:]...)
	message := append([]byte{icmpv6Solicitation, 0, 0, 0, 0, 0, 0, 0}, target[:]...)
	binary.BigEndian.PutUint16(message[2:], checksum(group, message))
	return append(frame, message...)
}

// checksum returns the checksum of an ICMPv6 message of even length without a source
// address (RFC 8200, section 8.1).
func checksum(to [16]byte, message []byte) uint16 {
	sum := uint32(len(message)) + unix.IPPROTO_ICMPV6
	for _, part := range [][]byte{to[:], message} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// parseNeighborDiscovery parses a neighbor advertisement, and a neighbor solicitation without a source address: its
// sender claims the address that it asks for.
func parseNeighborDiscovery(frame []byte) (address netip.Addr, mac net.HardwareAddr, ok bool) {
	if len(frame) < ethernetSize+ipv6Size+ndSize {
		return address, nil, false
	}
	packet := frame[ethernetSize:]
	message := packet[ipv6Size:]
	if packet[0]>>4 != 6 || packet[6] != unix.IPPROTO_ICMPV6 || packet[7] != 255 {
		return address, nil, false
	}
	source := netip.AddrFrom16([16]byte(packet[8:24]))
	claims := message[0] == icmpv6Advertisement || message[0] == icmpv6Solicitation && source.IsUnspecified()
	return netip.AddrFrom16([16]byte(message[8:24])), bytes.Clone(frame[6:12]), claims
}
