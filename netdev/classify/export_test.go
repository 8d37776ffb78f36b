// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

// Builders of frames, for the tests with traffic.
var (
	Ether   = ether
	EtherTo = etherTo
	ARP     = arp
	IPv4    = ipv4
	UDP     = udp
	TCP     = tcp
	IPv6    = ipv6
	ND      = nd

	Extension = extension
)
