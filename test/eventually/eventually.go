// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package eventually repeats a check until it succeeds or a deadline passes.
//
// Use it for conditions that another process or goroutine causes and that the test can
// observe only by polling, such as the state of an API object or of a link. A test that
// receives events, over a channel for example, should wait for the event instead.
package eventually

import (
	"context"
	"fmt"
	"testing"
	"time"
)

// interval is the longest time between the end of a failed check and the start of the next one, except after slow
// checks. At first, the time is shorter, an eighth of the time that has passed. A short wait therefore ends soon after
// its condition is met.
const interval = 50 * time.Millisecond

const (
	shortestInterval = 2 * time.Millisecond
	// slowInterval is the longest time between two slow checks.
	slowInterval = time.Second
)

// nextInterval returns the time until the next check. Slow checks, such as those that start
// kubectl, take at most about a third of the time of a long wait, to leave processor time
// for the processes that the test waits for.
func nextInterval(passed, check time.Duration) time.Duration {
	longest := max(interval, min(2*check, slowInterval))
	return min(max(passed/8, shortestInterval), longest)
}

// Eventually fails the test if check does not return nil within timeout. The
// failure message contains condition, which describes the expected state (for
// example "claim default/c1 is deallocated"), and the error of the last check.
//
// Eventually runs check in the calling goroutine, which must be the one that
// runs the test, so check may use t. It runs check at least once.
func Eventually(t testing.TB, timeout time.Duration, condition string, check func() error) {
	t.Helper()
	// Not t.Context(): cleanup functions also wait, and it is canceled by then.
	if err := Poll(context.Background(), timeout, check); err != nil {
		t.Fatalf("condition not met: %s: %v", condition, err)
	}
}

// Poll repeats check until it returns nil, timeout passes, or ctx ends. It returns the error of the last check, with
// the time that Poll waited. It is Eventually for code without a testing.TB.
func Poll(ctx context.Context, timeout time.Duration, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	start := time.Now()
	timer := time.NewTimer(shortestInterval)
	defer timer.Stop()
	for {
		began := time.Now()
		err := check()
		if err == nil {
			return nil
		}
		timer.Reset(nextInterval(time.Since(start), time.Since(began)))
		select {
		case <-ctx.Done():
			return fmt.Errorf("after %s: %w", time.Since(start).Round(time.Millisecond), err)
		case <-timer.C:
		}
	}
}
