// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

func TestDirection(t *testing.T) {
	type step struct{ nic, seen uint64 }
	for name, test := range map[string]struct {
		steps []step
		want  bool
	}{
		"no frames":                              {[]step{{0, 0}, {0, 0}}, false},
		"all frames are seen":                    {[]step{{1000, 1000}}, false},
		"the program sees segments as one":       {[]step{{1000, 20}}, false},
		"a few frames are missed":                {[]step{{10, 0}, {10, 0}}, false},
		"many frames are missed":                 {[]step{{1000, 0}}, true},
		"few frames are missed each time":        {[]step{{20, 0}, {20, 0}}, true},
		"frames are seen again":                  {[]step{{1000, 0}, {10, 10}}, false},
		"no frames after many were missed":       {[]step{{1000, 0}, {0, 0}}, true},
		"the counters of the NIC were reset":     {[]step{{^uint64(0) - 5, 0}}, false},
		"some are seen between two small losses": {[]step{{20, 0}, {5, 5}, {20, 0}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var d direction
			for _, s := range test.steps {
				d.update(s.nic, s.seen, 0)
			}
			if d.missed != test.want {
				t.Errorf("after %v: missed is %t, want %t", test.steps, d.missed, test.want)
			}
		})
	}
}

// Frames that reach a queue without their class are dropped there, and counted.
func TestArrival_countsStrayFrames(t *testing.T) {
	for name, test := range map[string]struct {
		counts []uint64
		want   uint64
	}{
		"none":                         {[]uint64{0, 0}, 0},
		"some":                         {[]uint64{0, 40, 45}, 45},
		"some, and then none":          {[]uint64{0, 40, 40}, 40},
		"the queues are created again": {[]uint64{1000, 0, 3}, 3},
		"many before the first look":   {[]uint64{1000, 1000}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			a := arrival{last: frames{strays: test.counts[0]}}
			for _, strays := range test.counts[1:] {
				a.update(frames{strays: strays})
			}
			if a.strays != test.want {
				t.Errorf("got %d strays, want %d", a.strays, test.want)
			}
		})
	}
}

// The members of a bond send and receive frames of LACP, or of ARP monitoring, that the bond counts as its own.
func TestArrival_bond(t *testing.T) {
	start := time.Now()
	for name, test := range map[string]struct {
		perSecond uint64
		members   int
		want      bool
	}{
		"idle, with LACP":         {2, 2, false},
		"idle, ARP monitoring":    {40, 2, false},
		"traffic that is missed":  {1000, 2, true},
		"no bond, few are missed": {2, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			a := arrival{last: frames{at: start}}
			for seconds := uint64(30); seconds <= 90; seconds += 30 {
				counts := classify.Counts{Sent: seconds * test.perSecond, Received: seconds * test.perSecond}
				a.update(frames{nic: counts, at: start.Add(time.Duration(seconds) * time.Second), members: test.members})
			}
			if a.sent.missed != test.want || a.received.missed != test.want {
				t.Errorf("missed is %t for sent and %t for received frames, want %t", a.sent.missed, a.received.missed, test.want)
			}
		})
	}
}
