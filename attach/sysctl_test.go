// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import "testing"

func TestSysctlPath(t *testing.T) {
	for _, tc := range []struct{ name, link, want string }{
		{"net.ipv4.conf.IFNAME.arp_ignore", "net1", "/proc/sys/net/ipv4/conf/net1/arp_ignore"},
		{"net.ipv6.neigh.IFNAME.ucast_solicit", "data.7", "/proc/sys/net/ipv6/neigh/data.7/ucast_solicit"},
		{"net.ipv4.ip_forward", "net1", ""},
		{"kernel.IFNAME.x", "net1", ""},
		{"net.ipv4.conf.IFNAME.../../x", "net1", ""},
		{"net..IFNAME.x", "net1", ""},
	} {
		got, err := sysctlPath(tc.name, tc.link)
		if got != tc.want || (err == nil) != (tc.want != "") {
			t.Errorf("sysctlPath(%q, %q): got %q, %v, want %q", tc.name, tc.link, got, err, tc.want)
		}
	}
}
