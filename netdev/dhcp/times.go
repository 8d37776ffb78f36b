// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dhcp

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Times are the times when the client of a lease acts, as durations since the node booted. Unlike the time of day, that
// clock does not jump, and it continues while the node is suspended.
type Times struct {
	// Renew (T1) is when the client asks the server that leased the address, Rebind (T2) when it
	// asks all servers, and Expires when it may no longer use the address. They are Never for
	// a lease without end.
	Renew, Rebind, Expires time.Duration
}

// Never is the time of an event that does not happen.
const Never time.Duration = 1<<63 - 1

// SinceBoot returns the time since the node booted.
func SinceBoot() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic(fmt.Sprintf("clock_gettime CLOCK_BOOTTIME: %v", err)) // only with a wrong address
	}
	return time.Duration(t.Nano())
}

// State is the state of a client (RFC 2131, section 4.4).
type State int

// Values of State.
const (
	// Bound means that there is nothing to do.
	Bound State = iota
	// Renewing means that the client asks the server that leased the address.
	Renewing
	// Rebinding means that the client asks all servers.
	Rebinding
	// Expired means that the client may no longer use the address.
	Expired
)

// State returns the state of the client of the lease.
func (t Times) State(now time.Duration) State {
	switch {
	case now >= t.Expires:
		return Expired
	case now >= t.Rebind:
		return Rebinding
	case now >= t.Renew:
		return Renewing
	default:
		return Bound
	}
}

// Remaining returns how long the client may use the address; Never for a lease without end.
func (t Times) Remaining(now time.Duration) time.Duration {
	if t.Expires == Never {
		return Never
	}
	return max(t.Expires-now, 0)
}

// minRetry and maxRetry limit the time between two requests for one lease.
const (
	minRetry = time.Second
	maxRetry = time.Minute
)

// Wait returns how long the client waits before it acts. attempted reports whether an attempt has
// just failed: then it waits for half of the time until its state changes (RFC 2131, section
// 4.4.5), and at least a minute or, if the lease is short, a 32nd of the lease. fuzz, from 0 to 1,
// spreads the requests of clients that leased their addresses at the same time.
func (t Times) Wait(now time.Duration, attempted bool, fuzz float64) time.Duration {
	state := t.State(now)
	if state == Expired {
		return 0
	}
	next := map[State]time.Duration{Bound: t.Renew, Renewing: t.Rebind, Rebinding: t.Expires}[state]
	if next == Never {
		return Never
	}
	if state == Bound { // at T1, or up to an eighth of the time to T2 later: clients spread their requests
		return next - now + spread((t.Rebind-t.Renew)/8, fuzz)
	}
	if !attempted {
		return 0
	}
	lease := 2 * (t.Expires - t.Renew) // T1 is half of the lease, unless the server sets another T1
	least := min(max(lease/32, minRetry), maxRetry)
	wait := max((next-now)/2, least)
	wait += spread(wait/8, fuzz)
	return min(wait, t.Expires-now)
}

func spread(d time.Duration, fuzz float64) time.Duration { return time.Duration(float64(d) * fuzz) }

// Backoff returns how long a client without a lease waits after a number of attempts: 4 s after the first, twice as
// long after each subsequent one, and at most a minute (RFC 2131, section 4.1). fuzz is from 0 to 1.
func Backoff(attempts int, fuzz float64) time.Duration {
	wait := maxRetry
	if attempts < 5 {
		wait = min(4*time.Second<<max(attempts-1, 0), maxRetry)
	}
	return wait + spread(wait/8, fuzz)
}

// minLease is the shortest lease that the client accepts: with a shorter one, all pods of the node
// would send requests continuously.
const minLease = 10 * time.Second

// infinite is a lease without end, in seconds.
const infinite = 1<<32 - 1

// newTimes returns the times of a lease that was requested at a time. The server sets
// lease, t1, and t2; a missing or impossible t1 or t2 has the value that RFC 2131 recommends.
func newTimes(requested, lease, t1, t2 time.Duration) (Times, error) {
	if lease < minLease {
		return Times{}, fmt.Errorf("the server leases for %s: the shortest lease that is accepted is %s", lease, minLease)
	}
	if lease >= infinite*time.Second {
		return Times{Renew: Never, Rebind: Never, Expires: Never}, nil
	}
	if t1 <= 0 || t2 <= t1 || t2 >= lease {
		t1, t2 = lease/2, lease*7/8
	}
	t1 = max(t1, minLease/4)
	t2 = max(t2, t1)
	return Times{Renew: requested + t1, Rebind: requested + t2, Expires: requested + lease}, nil
}
