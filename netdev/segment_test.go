// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"testing"

	"github.com/vishvananda/netlink"
)

func TestSegmentBytes(t *testing.T) {
	for name, test := range map[string]struct {
		wanted int
		link   netlink.LinkAttrs
		want   int
	}{
		"the link keeps what it has":        {0, netlink.LinkAttrs{TSOMaxSize: 65536, GSOMaxSize: 65536}, 0},
		"a slow share":                      {6000, netlink.LinkAttrs{TSOMaxSize: 524280, GSOMaxSize: 65536}, 6000},
		"a NIC with small segments (r8169)": {65536, netlink.LinkAttrs{TSOMaxSize: 64000, GSOMaxSize: 64000}, 64000},
		"the link has less than the NIC":    {65536, netlink.LinkAttrs{TSOMaxSize: 65536, GSOMaxSize: 32768}, 32768},
		"a kernel that reports no limit":    {65536, netlink.LinkAttrs{}, 65536},
	} {
		t.Run(name, func(t *testing.T) {
			if got := segmentBytes(test.wanted, &test.link); got != test.want {
				t.Errorf("segmentBytes(%d): got %d, want %d", test.wanted, got, test.want)
			}
		})
	}
}
