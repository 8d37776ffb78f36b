// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// BenchmarkProgram measures how long the programs take for one UDP datagram that a share sends or
// receives, with each key, with and without the check of its identity. It needs root.
func BenchmarkProgram(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("loading BPF programs needs root")
	}
	for _, key := range Keys() {
		for _, checks := range []bool{false, true} {
			for _, direction := range []string{"sent", "received"} {
				b.Run(fmt.Sprintf("%s/%s/checked=%t", key, direction, checks), func(b *testing.B) {
					e, err := openMeasured(b, key, checks, direction)
					if err != nil {
						b.Skip(err)
					}
					perFrame := e.measure(b, b.N, b.ResetTimer)
					b.ReportMetric(float64(perFrame.Nanoseconds()), "ns/frame")
				})
			}
		}
	}
}

// maxCheck is the bound for the check of a frame's identity that docs/user/security.md states. On a slow or busy
// processor, the check may take as long as the rest of the program.
const maxCheck = 100 * time.Nanosecond

func TestProgram_costOfCheck(t *testing.T) {
	if cpu, err := os.ReadFile("/proc/cpuinfo"); err != nil || strings.Contains(string(cpu), "QEMU TCG") {
		t.Skip("an emulated processor says nothing about nanoseconds")
	}
	// The kernel gives each frame of a test run a socket. A frame from the wire does not have one, and the program for the
	// key MAC does not look for one.
	for direction, key := range map[string]Key{"sent": KeyCookie, "received": KeyMAC} {
		unchecked, err := openMeasured(t, key, false, direction)
		if err != nil {
			t.Skip(err)
		}
		checked, err := openMeasured(t, key, true, direction)
		if err != nil {
			t.Skip(err)
		}
		// Another process can only make a run longer, so the shortest of several counts.
		const runs, frames = 20, 20000
		without, with := time.Hour, time.Hour
		for range runs {
			without = min(without, unchecked.measure(t, frames, nil))
			with = min(with, checked.measure(t, frames, nil))
		}
		t.Logf("a frame that is %s takes %v, and %v without the check of its identity", direction, with, without)
		if bound := max(maxCheck, without); with-without > bound {
			t.Errorf("the check of a frame that is %s takes %v, want at most %v", direction, with-without, bound)
		}
	}
}

// measured is a pair of programs with one NIC, which is the loopback device, and one share.
type measured struct {
	*Classifier
	program *ebpf.Program
	frame   []byte
}

// loopback is the device that the kernel uses for test runs.
const loopback = 1

// openMeasured loads the programs for a key, with or without the check of identity, to measure
// one of them.
func openMeasured(t testing.TB, key Key, checks bool, direction string) (m measured, err error) {
	t.Helper()
	if checks {
		m.Classifier, err = openChecks(key, acceptTestRuns)
	} else {
		m.Classifier, err = OpenUnpinned(AttachClsact, key, false)
	}
	if err != nil {
		return m, err
	}
	t.Cleanup(func() { _ = m.Close() })
	conn, err := rtnl.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	cookie, err := conn.Cookie()
	if err != nil {
		t.Fatal(err)
	}
	payload := ipv4(linkIP, 17, 0, udp(5000, 5001))
	m.program, m.frame = m.egress, etherTo(wireMAC, linkMAC, protoIPv4, payload)
	if direction == "received" {
		// The socket of the frame belongs to this namespace, and the link to another.
		m.program, m.frame = m.ingress, etherTo(linkMAC, wireMAC, protoIPv4, payload)
		cookie++
	}
	nic := NIC{Index: loopback, Major: testMajor, HostCookie: 1, Policy: Policy{Identity: IdentityEnforce}}
	value := bpfNic{Major: uint32(testMajor) << 16, HostCookie: nic.HostCookie}
	copy(value.Mac[:], nicMAC)
	link := Member{Parent: loopback, Cookie: cookie, MAC: linkMAC, Addresses: []netip.Addr{netip.MustParseAddr(linkIP)}}
	for _, err := range []error{
		m.SetPolicy(nic), m.maps.DraSharedNics.Put(uint32(loopback), value), m.startCounts(loopback),
		m.AddMember(link, testClass),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return m, nil
}

// measure returns the mean time for a frame. The program must not refuse any.
func (m measured) measure(t testing.TB, frames int, reset func()) time.Duration {
	t.Helper()
	verdict, perFrame, err := m.program.Benchmark(m.frame, frames, reset)
	if err != nil {
		t.Fatal(err)
	}
	if pass := ^uint32(0); verdict != pass { // TC_ACT_UNSPEC of a sent frame, FILTER_ACT of a received one
		t.Fatalf("the verdict on a frame is %d, want %d", int32(verdict), int32(pass))
	}
	for _, class := range []uint32{testClass, unidentified(testMajor)} {
		if r, err := m.Refusals(loopback, class); err != nil || len(r.Dropped) > 0 {
			t.Fatalf("the program refused frames: %v, error %v", r.Dropped, err)
		}
	}
	return perFrame
}
