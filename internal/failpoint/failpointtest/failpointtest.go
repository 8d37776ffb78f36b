// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package failpointtest supplies an injector for tests that end a component at
// one failpoint: just before the operation, so that its effect is missing, or
// just after it, so that the component does not learn its result.
//
// A test first runs the component with Record set and without a Point, which yields the run's failpoints, and then
// repeats the run once for each of them.
package failpointtest

import (
	"fmt"
	"sync"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
)

// Point is a moment in a run: before or after the Nth operation. The zero Point
// is never reached.
type Point struct {
	// Name is the name of the operation. If it is empty, N counts all operations.
	Name string
	// N is 1 for the first operation.
	N int
	// After is false for the moment before the operation.
	After bool
}

// String returns, for example, "before create link#2".
func (p Point) String() string {
	side := "before"
	if p.After {
		side = "after"
	}
	return fmt.Sprintf("%s %s#%d", side, p.Name, p.N)
}

// Killer ends a component at a Point. It is safe for concurrent use.
type Killer struct {
	// Point is when to call Kill.
	Point Point
	// Kill ends the component. operation is the name of the operation at Point.
	// If Kill returns, the operation fails with the error that Kill returned.
	Kill func(operation string) error
	// Record, if not nil, is called before each operation with the operation's name and its number among operations of
	// that name. Calls are serialized.
	Record func(operation string, n int)

	mu    sync.Mutex
	total int
	seen  map[string]int
}

// Inject is a failpoint.Injector.
func (k *Killer) Inject(name string, operation func() error) error {
	due := k.count(name)
	if !due {
		return operation()
	}
	if k.Point.After {
		_ = operation() // the component ends before it sees the result
	}
	return k.Kill(name)
}

// Total returns the number of operations that have started.
func (k *Killer) Total() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.total
}

// count counts an operation and reports whether it is the one of the Point.
func (k *Killer) count(name string) (due bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.seen == nil {
		k.seen = map[string]int{}
	}
	k.total++
	k.seen[name]++
	if k.Record != nil {
		k.Record(name, k.seen[name])
	}
	if k.Point.Name == "" {
		return k.total == k.Point.N
	}
	return name == k.Point.Name && k.seen[name] == k.Point.N
}

var _ failpoint.Injector = (*Killer)(nil).Inject
