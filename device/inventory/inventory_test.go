// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"slices"
	"testing"
)

func TestSet(t *testing.T) {
	var s Set[int]
	if s.IsDiscovered() || s.Get("a") != nil || len(s.Sorted()) > 0 {
		t.Errorf("before the first discovery: IsDiscovered %t, devices %v", s.IsDiscovered(), s.Names())
	}
	s.Replace(map[string]*int{})
	if !s.IsDiscovered() {
		t.Error("after a discovery of no devices: IsDiscovered returned false")
	}
	one, two := 1, 2
	s.Replace(map[string]*int{"b": &two, "a": &one})
	if got := s.Sorted(); !slices.Equal(got, []*int{&one, &two}) {
		t.Errorf("Sorted: got %v, want the devices a and b", got)
	}
	if got := s.Names(); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("Names: got %q, want a and b", got)
	}
	if s.Get("b") != &two || s.Get("c") != nil {
		t.Errorf("Get: got %v for b and %v for c, want b's device and nil", s.Get("b"), s.Get("c"))
	}
}
