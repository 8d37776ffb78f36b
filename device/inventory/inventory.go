// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package inventory holds the devices that a device kind has discovered.
package inventory

import (
	"maps"
	"slices"
	"sync"
)

// Set holds a kind's devices by name, as of the last discovery. The zero value is a Set before the first discovery. A
// Set is safe for concurrent use. Its devices must not be modified.
type Set[T any] struct {
	mu      sync.RWMutex
	devices map[string]*T // nil before the first Replace
}

// Replace replaces all devices with newly discovered ones. The caller must not modify them afterward.
func (s *Set[T]) Replace(devices map[string]*T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.devices = devices
}

// IsDiscovered reports whether Replace was called.
func (s *Set[T]) IsDiscovered() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.devices != nil
}

// Get returns the device of that name, or nil.
func (s *Set[T]) Get(name string) *T {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.devices[name]
}

// Names returns the names of all devices, sorted.
func (s *Set[T]) Names() []string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Sorted(maps.Keys(s.devices))
}

// Sorted returns all devices, by name.
func (s *Set[T]) Sorted() (sorted []*T) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, name := range slices.Sorted(maps.Keys(s.devices)) {
		sorted = append(sorted, s.devices[name])
	}
	return sorted
}
