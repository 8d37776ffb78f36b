// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"
)

func TestLatencies_percentile(t *testing.T) {
	var l Latencies
	if got := l.Percentile(50); got != 0 {
		t.Errorf("percentile of no times: got %s, want 0", got)
	}
	for i := 100; i > 0; i-- {
		l.times = append(l.times, time.Duration(i))
	}
	for percent, want := range map[int]time.Duration{1: 1, 50: 50, 99: 99, 100: 100} {
		if got := l.Percentile(percent); got != want {
			t.Errorf("percentile %d of 1 to 100: got %d, want %d", percent, got, want)
		}
	}
	l.times = l.times[:3] // 1, 2, 3
	for percent, want := range map[int]time.Duration{1: 1, 50: 2, 99: 3} {
		if got := l.Percentile(percent); got != want {
			t.Errorf("percentile %d of 1 to 3: got %d, want %d", percent, got, want)
		}
	}
}

func TestLatencies_failedOperationsDoNotCount(t *testing.T) {
	var l Latencies
	failure := errors.New("failure")
	if err := l.Time(func() error { return failure }); !errors.Is(err, failure) {
		t.Errorf("error of a failed operation: got %v, want %v", err, failure)
	}
	if len(l.times) != 0 {
		t.Errorf("times after a failed operation: got %v, want none", l.times)
	}
}

func TestLatencies_Since(t *testing.T) {
	var l Latencies
	if err := l.Since(time.Now().Add(-time.Minute), func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	if got := l.Percentile(50); got < time.Minute || got > time.Hour {
		t.Errorf("time of an operation whose start was a minute ago: got %s", got)
	}
}

func TestInParallel(t *testing.T) {
	var sum atomic.Int64
	failure := errors.New("failure")
	err := InParallel(3, 100, func(i int) error {
		sum.Add(int64(i))
		if i == 50 {
			return failure
		}
		return nil
	})
	if sum.Load() != 4950 || !errors.Is(err, failure) {
		t.Errorf("100 calls: got the sum %d and error %v, want 4950 and %v", sum.Load(), err, failure)
	}
}

func TestInRounds(t *testing.T) {
	var running, most atomic.Int64
	started, ended := make([]atomic.Bool, 10), make([]atomic.Bool, 10)
	err := InRounds(4, 10, func(i int, _ time.Time) error {
		started[i].Store(true)
		most.Store(max(most.Load(), running.Add(1)))
		return nil
	}, func(i int, _ time.Time) error {
		if !started[i].Load() || ended[i].Swap(true) {
			t.Errorf("number %d ended before its start, or twice", i)
		}
		running.Add(-1)
		return nil
	})
	if err != nil || running.Load() != 0 || most.Load() != 4 {
		t.Errorf("rounds of 4: %d numbers did not end, %d ran at a time, error %v", running.Load(), most.Load(), err)
	}
	for i := range ended {
		if !ended[i].Load() {
			t.Errorf("number %d did not end", i)
		}
	}
}
