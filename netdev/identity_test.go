// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

func TestIsHeldOnAllNICs(t *testing.T) {
	policy := classify.Policy{Addresses: []netip.Prefix{netip.MustParsePrefix("10.20.0.9/32")}}
	for address, want := range map[string]bool{
		"10.0.0.1": true, "192.0.2.1": true, "fd00::1": true, "2001:db8::1": true,
		"127.0.0.1": false, "::1": false, "169.254.20.10": false, "fe80::1": false,
		"10.20.0.9": false, // allow.addresses
	} {
		if got := isHeldOnAllNICs(netip.MustParseAddr(address), policy); got != want {
			t.Errorf("%s: got %t, want %t", address, got, want)
		}
	}
}

func TestAreAddressesHeld(t *testing.T) {
	vrrp := net.HardwareAddr{0, 0, 0x5e, 0, 1, 51}
	policy := classify.Policy{MACs: []net.HardwareAddr{vrrp}}
	for name, tc := range map[string]struct {
		link netlink.Link
		want bool
	}{
		"the loopback interface": {&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo", Flags: net.FlagUp}}, true},
		"a NIC":                  {&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth0", Flags: net.FlagUp}}, true},
		"a NIC that is down":     {&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}}, true},
		"a bridge":               {&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0", Flags: net.FlagUp}}, true},
		"the device of a router": {&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "loopback0", Flags: net.FlagUp}}, true},
		"kube-proxy's device":    {&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "kube-ipvs0"}}, false},
		"keepalived's link": {
			&netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Name: "vrrp.51", Flags: net.FlagUp, HardwareAddr: vrrp}}, false,
		},
	} {
		if got := areAddressesHeld(tc.link, policy); got != tc.want {
			t.Errorf("%s: got %t, want %t", name, got, tc.want)
		}
	}
}
