// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dad

import (
	"net"
	"net/netip"
	"testing"
)

func FuzzParse(f *testing.F) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	f.Add(arpProbe(mac, netip.MustParseAddr("10.0.0.1")))
	f.Add(neighborSolicitation(mac, netip.MustParseAddr("fd00::1")))
	f.Fuzz(func(t *testing.T, frame []byte) {
		for _, family := range []family{ipv4, ipv6} {
			address, mac, ok := family.parse(frame)
			if ok && (address.Is4() != family.is4 || len(mac) != 6) {
				t.Errorf("parsed address %s and MAC address %s of a frame with EtherType %#x", address, mac, family.etherType)
			}
		}
	})
}

// A probe claims the address that it asks for.
func TestParse_probes(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	for text, family := range map[string]family{"10.0.0.1": ipv4, "fd00::1": ipv6} {
		want := netip.MustParseAddr(text)
		address, from, ok := family.parse(family.probe(mac, want))
		if !ok || address != want || from.String() != mac.String() {
			t.Errorf("got %s of %s (ok %t), want %s of %s", address, from, ok, want, mac)
		}
	}
}
