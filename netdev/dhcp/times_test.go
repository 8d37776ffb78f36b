// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dhcp

import (
	"testing"
	"time"
)

func TestNewTimes(t *testing.T) {
	const at = 100 * time.Second
	const s, ms = time.Second, time.Millisecond
	for name, test := range map[string]struct {
		lease, t1, t2 time.Duration
		want          Times // zero for an error
	}{
		"the server sets no times":      {80 * s, 0, 0, Times{at + 40*s, at + 70*s, at + 80*s}},
		"the server sets times":         {80 * s, 10 * s, 20 * s, Times{at + 10*s, at + 20*s, at + 80*s}},
		"T2 before T1":                  {80 * s, 20 * s, 10 * s, Times{at + 40*s, at + 70*s, at + 80*s}},
		"T2 after the lease":            {80 * s, 20 * s, 90 * s, Times{at + 40*s, at + 70*s, at + 80*s}},
		"T1 would be a flood":           {80 * s, 1 * ms, 2 * ms, Times{at + 2500*ms, at + 2500*ms, at + 80*s}},
		"without end":                   {infinite * s, 0, 0, Times{Never, Never, Never}},
		"shorter than accepted":         {lease: 9 * s},
		"the server leases for no time": {},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := newTimes(at, test.lease, test.t1, test.t2)
			if got != test.want || (err != nil) != (test.want == Times{}) {
				t.Errorf("got %v and error %v, want %v", got, err, test.want)
			}
		})
	}
}

func TestTimes_State(t *testing.T) {
	lease := Times{Renew: 50 * time.Second, Rebind: 87 * time.Second, Expires: 100 * time.Second}
	for now, want := range map[time.Duration]State{
		0: Bound, 49 * time.Second: Bound, 50 * time.Second: Renewing, 86 * time.Second: Renewing,
		87 * time.Second: Rebinding, 99 * time.Second: Rebinding, 100 * time.Second: Expired, time.Hour: Expired,
	} {
		if got := lease.State(now); got != want {
			t.Errorf("after %s: got state %d, want %d", now, got, want)
		}
	}
	if got := (Times{Renew: Never, Rebind: Never, Expires: Never}).State(1000 * time.Hour); got != Bound {
		t.Errorf("a lease without end has the state %d, want %d", got, Bound)
	}
}

func TestTimes_Wait(t *testing.T) {
	short := Times{Renew: 10 * time.Second, Rebind: 17 * time.Second, Expires: 20 * time.Second}
	long := Times{Renew: 12 * time.Hour, Rebind: 21 * time.Hour, Expires: 24 * time.Hour}
	never := Times{Renew: Never, Rebind: Never, Expires: Never}
	const s, ms, h = time.Second, time.Millisecond, time.Hour
	for name, test := range map[string]struct {
		times     Times
		now       time.Duration
		attempted bool
		fuzz      float64
		want      time.Duration
	}{
		"bound":                          {short, 4 * s, false, 0, 6 * s},
		"bound, later than others":       {short, 4 * s, false, 1, 6*s + 875*ms},
		"time to renew":                  {short, 10 * s, false, 0, 0},
		"renewal failed":                 {short, 11 * s, true, 0, 3 * s},
		"renewal failed late":            {short, 16900 * ms, true, 0, s},
		"rebinding failed":               {short, 18 * s, true, 0, s},
		"rebinding failed late":          {short, 19500 * ms, true, 0, 500 * ms},
		"expired":                        {short, 20 * s, false, 0, 0},
		"renewal of a long lease failed": {long, 13 * h, true, 0, 4 * h},
		"the same, later than others":    {long, 13 * h, true, 1, 4*h + h/2},
		"at most one request a minute":   {long, 24*h - 80*s, true, 0, time.Minute},
		"without end":                    {never, h, false, 0, Never},
	} {
		t.Run(name, func(t *testing.T) {
			if got := test.times.Wait(test.now, test.attempted, test.fuzz); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

// With a failing server, a client asks a limited number of times.
func TestTimes_Wait_limitsAttempts(t *testing.T) {
	for _, lease := range []time.Duration{10 * time.Second, time.Minute, time.Hour, 24 * time.Hour} {
		times, err := newTimes(0, lease, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		now, attempts := times.Renew, 0
		for times.State(now) != Expired {
			now += times.Wait(now, true, 0)
			attempts++
		}
		if attempts > 40 {
			t.Errorf("a lease of %s causes %d attempts", lease, attempts)
		}
	}
}

func TestBackoff(t *testing.T) {
	for attempts, want := range map[int]time.Duration{
		0: 4 * time.Second, 1: 4 * time.Second, 2: 8 * time.Second, 4: 32 * time.Second, 5: time.Minute, 1000: time.Minute,
	} {
		if got := Backoff(attempts, 0); got != want {
			t.Errorf("after %d attempts: got %s, want %s", attempts, got, want)
		}
	}
}

func TestID(t *testing.T) {
	id := ID("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "claim", "share")
	if len(id) != 23 || id[0] != 0xff || id[6] != 4 || id[7] != 0x6b || id[22] != 0xc8 {
		t.Errorf("got %x, want ff, four bytes, 0004, and the UUID", id)
	}
	if other := ID("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "claim", "other"); string(other) == string(id) {
		t.Error("two shares of a pod have the same identifier")
	}
	if got := ID("0123456789abcdef0123456789abcdef", "", ""); got[7] != 0x01 || got[22] != 0xef {
		t.Errorf("got %x for the UID of a static pod, want its bytes", got)
	}
	if got := ID("not-a-uuid", "", ""); len(got) != 23 {
		t.Errorf("got %x for another UID, want 23 bytes", got)
	}
}
