// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"os"
	"strings"
)

// Builders of frames, for the tests with traffic.
var (
	Ether   = ether
	EtherTo = etherTo
	ARP     = arp
	IPv4    = ipv4
	UDP     = udp
	DHCP    = dhcp
	TCP     = tcp
	IPv6    = ipv6
	ND      = nd

	Extension = extension
	Option    = option
)

// InLockdown reports whether the kernel refuses programs that read its memory.
func InLockdown() bool {
	mode, _ := os.ReadFile("/sys/kernel/security/lockdown") // absent on kernels without lockdown
	return strings.Contains(string(mode), "[confidentiality]")
}

// SteerPriority is the priority of the filter that steers frames to queues.
const SteerPriority = steerPriority

// DescribeLoadError adds what the process or the kernel lacks to an error of loading programs.
var DescribeLoadError = describeLoadError
