// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// A host that uses the address of a link reveals it to the network when it asks for another address.
func TestConflicts(t *testing.T) {
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	host := net.HardwareAddr{2, 3, 3, 3, 3, 3}
	broadcast := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	allNodes := net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}
	arp := func(operation uint16, sender, target string) []byte {
		return classify.EtherTo(broadcast, host, 0x0806, classify.ARP(operation, host, sender, target))
	}
	nd := func(source string, kind byte, target string) []byte {
		return classify.EtherTo(allNodes, host, 0x86dd, classify.IPv6(source, 58, classify.ND(kind, target)))
	}
	for i, tc := range []struct {
		name    string
		frame   []byte
		address string // "" if there is no conflict
	}{
		{"an ARP request of another address", arp(1, "10.20.0.9", p.ip), ""},
		{"a probe, which asks whether the address is in use", arp(1, "0.0.0.0", p.ip), ""},
		{"an ARP request of the address", arp(1, p.ip, "10.20.0.9"), p.ip},
		{"an announcement of the address", arp(2, p.ip, p.ip), p.ip},
		{"a solicitation of another address", nd("fd00:20::9", 135, "fd00:20::1"), ""},
		{"a solicitation that asks whether the address is in use", nd("::", 135, "fd00:20::1"), ""},
		{"a solicitation of the address", nd("fd00:20::1", 135, "fd00:20::9"), "fd00:20::1"},
		{"an advertisement of the address", nd("fe80::3", 136, "fd00:20::1"), "fd00:20::1"},
	} {
		link := listen(t, p.Namespace, "net1")
		sendRaw(e.wire, "wire", append(tc.frame, marker(i)...))
		if !link.saw(marker(i), time.Second) {
			t.Errorf("%s did not reach the pod", tc.name)
		}
		found, err := e.node.Conflicts()
		if err != nil {
			t.Fatal(err)
		}
		want := []string{}
		if tc.address != "" {
			want = append(want, fmt.Sprintf("%s of %s: %s", tc.address, p.attachment.MAC, host))
		}
		got := []string{}
		for _, c := range found {
			got = append(got, fmt.Sprintf("%s of %s: %s", c.Address, c.Link, c.Host))
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: conflicts %v, want %v", tc.name, got, want)
		}
	}
}
