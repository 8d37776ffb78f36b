// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"
)

// Latencies holds the durations of repetitions of one operation. The zero value is ready to
// use. Several goroutines can use it.
type Latencies struct {
	mu    sync.Mutex
	times []time.Duration
}

// Time runs an operation, and adds its time unless it fails.
func (l *Latencies) Time(operation func() error) error { return l.Since(time.Now(), operation) }

// Since runs an operation, and adds the time from start to its end unless it fails. Operations that wait for
// each other have a common start: some of them wait before they begin to run.
func (l *Latencies) Since(start time.Time, operation func() error) error {
	if err := operation(); err != nil {
		return err
	}
	elapsed := time.Since(start)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.times = append(l.times, elapsed)
	return nil
}

// Report adds the median and the 99th percentile, in µs, to the results of a benchmark, as
// the metrics NAME-p50-µs and NAME-p99-µs, unless there were no repetitions.
func (l *Latencies) Report(b *testing.B, name string) {
	if l.Percentile(50) == 0 {
		return
	}
	b.ReportMetric(float64(l.Percentile(50))/1e3, name+"-p50-µs")
	b.ReportMetric(float64(l.Percentile(99))/1e3, name+"-p99-µs")
}

// Percentile returns a time that percent of the repetitions did not exceed; 0 without repetitions.
func (l *Latencies) Percentile(percent int) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.times) == 0 {
		return 0
	}
	slices.Sort(l.times)
	return l.times[(len(l.times)*percent+99)/100-1]
}

// InParallel calls do for each number below count, in workers goroutines. It returns the
// errors of all calls.
func InParallel(workers, count int, do func(i int) error) error {
	work := make(chan int)
	errs := make([]error, workers)
	var all sync.WaitGroup
	for worker := range workers {
		all.Go(func() {
			for i := range work {
				errs[worker] = errors.Join(errs[worker], do(i))
			}
		})
	}
	for i := range count {
		work <- i
	}
	close(work)
	all.Wait()
	return errors.Join(errs...)
}

// InRounds calls each phase for each number below count, with the time when the phase began. A round consists of size
// numbers: their first phases run in parallel, and then their next ones.
func InRounds(size, count int, phases ...func(i int, began time.Time) error) error {
	for first := 0; first < count; first += size {
		n := min(size, count-first)
		for _, do := range phases {
			began := time.Now()
			if err := InParallel(n, n, func(i int) error { return do(first+i, began) }); err != nil {
				return err
			}
		}
	}
	return nil
}
