// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"net/netip"
	"os"
	"testing"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// BenchmarkProgram measures how long the program for outgoing frames takes for one
// UDP datagram of a share, with each key, with and without the check of its identity. It
// needs root.
func BenchmarkProgram(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("loading BPF programs needs root")
	}
	for _, key := range Keys() {
		b.Run(string(key)+"/unchecked", func(b *testing.B) {
			c, err := OpenUnpinned(HookClsact, key, false)
			benchmarkProgram(b, c, err)
		})
		b.Run(string(key)+"/checked", func(b *testing.B) {
			c, err := openChecks(key)
			benchmarkProgram(b, c, err)
		})
	}
}

func benchmarkProgram(b *testing.B, c *Classifier, err error) {
	if err != nil {
		b.Skip(err)
	}
	defer c.Close()
	const loopback = 1 // the kernel uses it for test runs
	nic := NIC{Index: loopback, Major: testMajor, HostCookie: 1, Policy: Policy{Identity: IdentityEnforce}}
	if err := c.SetPolicy(nic); err != nil {
		b.Fatal(err)
	}
	value := bpfNic{Major: uint32(testMajor) << 16, HostCookie: nic.HostCookie}
	if err := c.maps.DraSharedNics.Put(uint32(loopback), value); err != nil {
		b.Fatal(err)
	}
	if err := c.startCounts(loopback); err != nil {
		b.Fatal(err)
	}
	conn, err := rtnl.Open()
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	cookie, err := conn.Cookie()
	if err != nil {
		b.Fatal(err)
	}
	m := Member{Parent: loopback, Cookie: cookie, MAC: linkMAC, Addresses: []netip.Addr{netip.MustParseAddr(linkIP)}}
	if err := c.AddMember(m, uint32(testMajor)<<16|16); err != nil {
		b.Fatal(err)
	}
	frame := ether(linkMAC, 0x0800, ipv4(linkIP, 17, 0, udp(5000, 5001)))
	verdict, perFrame, err := c.egress.Benchmark(frame, b.N, b.ResetTimer)
	if err != nil {
		b.Fatal(err)
	}
	if pass := ^uint32(0); verdict != pass {
		b.Fatalf("the verdict on the frame is %d, want %d", int32(verdict), int32(pass))
	}
	b.ReportMetric(float64(perFrame.Nanoseconds()), "ns/frame")
}
