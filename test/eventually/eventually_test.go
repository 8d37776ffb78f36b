// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package eventually_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

var errPending = errors.New("pod is pending")

// recorder is a testing.TB that records the failure instead of failing.
type recorder struct {
	testing.TB
	failure string
}

func (r *recorder) Helper() {}

func (r *recorder) Fatalf(format string, args ...any) {
	r.failure = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func TestEventually_repeatsCheckUntilItSucceeds(t *testing.T) {
	calls := 0
	eventually.Eventually(t, time.Minute, "third check succeeds", func() error {
		if calls++; calls < 3 {
			return errPending
		}
		return nil
	})
	if calls != 3 {
		t.Errorf("Eventually ran check %d times, want 3", calls)
	}
}

func TestEventually_failureNamesConditionAndLastError(t *testing.T) {
	r := &recorder{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		eventually.Eventually(r, time.Millisecond, "pod default/a runs", func() error { return errPending })
	}()
	<-done
	for _, want := range []string{"pod default/a runs", errPending.Error(), "after "} {
		if !strings.Contains(r.failure, want) {
			t.Errorf("Eventually failed with %q, want a message that contains %q", r.failure, want)
		}
	}
}

func TestPoll(t *testing.T) {
	t.Run("wraps the last error after the timeout", func(t *testing.T) {
		err := eventually.Poll(t.Context(), time.Millisecond, func() error { return errPending })
		if !errors.Is(err, errPending) {
			t.Errorf("Poll returned %v, want an error that wraps %v", err, errPending)
		}
	})
	t.Run("stops when the context ends", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		calls := 0
		err := eventually.Poll(ctx, time.Hour, func() error {
			calls++
			cancel()
			return errPending
		})
		if !errors.Is(err, errPending) || calls != 1 {
			t.Errorf("Poll ran check %d times and returned %v, want 1 call and an error that wraps %v", calls, err, errPending)
		}
	})
}
