// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package shape

import "testing"

const mega = 1_000_000

func TestNICRates_share(t *testing.T) {
	link := NICRates{Line: 10_000 * mega, Reserve: 100 * mega, MinShare: 10 * mega}
	for _, tc := range []struct {
		name    string
		rates   Rates
		ceil    uint64
		quantum uint32
		queue   uint32
	}{
		{
			name:  "a hard cap has equal floor and ceil",
			rates: Rates{Floor: 100 * mega, Ceil: 100 * mega},
			ceil:  100 * mega, quantum: 10 * maxGSO, queue: 250_000,
		},
		{
			name:  "a slow share has a quantum of one segment and a queue of three",
			rates: Rates{Floor: 10 * mega, Ceil: 10 * mega},
			ceil:  10 * mega, quantum: maxGSO, queue: 3 * maxGSO,
		},
		{
			name:  "a floor may borrow up to the line",
			rates: Rates{Floor: 20 * mega, Ceil: 10_000 * mega},
			ceil:  10_000 * mega, quantum: 2 * maxGSO, queue: 25_000_000,
		},
		{
			name:  "the ceil is not above the line",
			rates: Rates{Floor: 20 * mega, Ceil: 99_000 * mega},
			ceil:  10_000 * mega, quantum: 2 * maxGSO, queue: 25_000_000,
		},
		{
			name:  "a large share has a quantum in proportion to the smallest share",
			rates: Rates{Floor: 9_000 * mega, Ceil: 9_000 * mega},
			ceil:  9_000 * mega, quantum: 900 * maxGSO, queue: 22_500_000,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := link.share(OneTree, FirstMinor, tc.rates)
			if c.floor != tc.rates.Floor || c.ceil != tc.ceil || c.quantum != tc.quantum || c.queue != tc.queue {
				t.Errorf("share returned %+v, want floor %d, ceil %d, quantum %d, queue %d",
					c, tc.rates.Floor, tc.ceil, tc.quantum, tc.queue)
			}
		})
	}
}

func TestNICRates_quantum_isProportionalToFloor(t *testing.T) {
	fast := NICRates{Line: 25_000 * mega, MinShare: 10 * mega}
	small, large := fast.quantum(5_000*mega), fast.quantum(20_000*mega)
	if ratio := float64(large) / float64(small); ratio < 3.99 || ratio > 4.01 {
		t.Errorf("floors of 5 and 20 Gbit/s have the quanta %d and %d, want the ratio 1 to 4", small, large)
	}
	for line, want := range map[uint64]uint32{1000 * mega: maxQuantum, 15_000 * mega: 125_000_000} {
		if got := (NICRates{Line: line, MinShare: 1}).quantum(line); got != want {
			t.Errorf("the quantum of a line of %d bit/s is %d, want its limit %d", line, got, want)
		}
	}
}

func TestSendQueueBytes(t *testing.T) {
	for _, tc := range []struct {
		name string
		rate uint64
		want uint32
	}{
		{"8 ms at the rate", 1000 * mega, 1_000_000},
		{"8 ms at a rate just above the minimum", 100 * mega, 100_000},
		{"the fragments of a datagram of 64 KiB", mega, 80 << 10},
		{"the maximum that a class can have", 1 << 44, 1 << 31},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := sendQueueBytes(tc.rate); got != tc.want {
				t.Errorf("sendQueueBytes(%d) = %d, want %d", tc.rate, got, tc.want)
			}
			if segment := SegmentBytes(tc.rate, 9000); int(sendQueueBytes(tc.rate)) < 2*segment {
				t.Errorf("sendQueueBytes(%d) holds less than two segments of %d bytes", tc.rate, segment)
			}
		})
	}
}

func TestNICRates_base_fitsReserve(t *testing.T) {
	for _, link := range []NICRates{
		{Line: 10_000 * mega, Reserve: 100 * mega},
		{Line: 1000, Reserve: 10},
		{Line: 400_000 * mega, Reserve: 4000 * mega},
		{Line: 10_000 * mega, Reserve: 100 * mega, Forwarded: Rates{Floor: 1000 * mega, Ceil: 10_000 * mega}},
	} {
		var floors uint64
		for _, c := range link.base(OneTree) {
			if c.minor != classRoot {
				floors += c.floor
			}
			if c.ceil > link.Line {
				t.Errorf("%+v: class %d has ceil %d, want at most the line", link, c.minor, c.ceil)
			}
		}
		if link.Reserve >= 32 && floors > link.Reserve+link.Forwarded.Floor {
			t.Errorf("%+v: the floors of the base classes add up to %d, want at most the reserve and the forwarded floor",
				link, floors)
		}
	}
}

func TestSegmentBytes(t *testing.T) {
	for _, tc := range []struct {
		rate uint64
		mtu  int
		want int
	}{
		{10 * mega, 1500, 6000},
		{10 * mega, 9000, 36000},
		{100 * mega, 1500, 25000},
		{1000 * mega, 1500, maxGSO},
	} {
		if got := SegmentBytes(tc.rate, tc.mtu); got != tc.want {
			t.Errorf("SegmentBytes(%d, %d) = %d, want %d", tc.rate, tc.mtu, got, tc.want)
		}
	}
}

func TestTicks(t *testing.T) {
	for _, rate := range []uint64{100 * mega, 10_000 * mega, 400_000 * mega} {
		// The burst is 1 ms at the rate.
		if got, want := ticks(burstBytes(rate), rate), uint32(1e6/64); got != want {
			t.Errorf("ticks(burstBytes(%d), %d) = %d, want %d", rate, rate, got, want)
		}
	}
	if got := ticks(1<<40, 1); got != 1<<32-1 {
		t.Errorf("ticks(1<<40, 1) = %d, want the maximum of a uint32", got)
	}
}

func TestIFBName_isShortAndUnique(t *testing.T) {
	seen := map[string]bool{}
	for _, nic := range []string{"nic0", "enp134s0f0np0", "enp134s0f0np1", "enp134s0f1np01"} {
		name := IFBName(nic)
		if len(name) > 15 || seen[name] {
			t.Errorf("IFBName(%q) = %q, want a unique name of at most 15 bytes", nic, name)
		}
		seen[name] = true
	}
}
