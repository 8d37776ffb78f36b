// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package measure

import "testing"

func TestParseProcessorTime(t *testing.T) {
	before := parseProcessorTime("cpu  100 0 100 600 0 50 50 100 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
	if want := (processorTime{total: 1000, idle: 600, stolen: 100}); before != want {
		t.Errorf("got %+v, want %+v", before, want)
	}
	after := parseProcessorTime("cpu  150 0 100 640 0 50 50 110 7 0\n")
	if got := after.stolenSince(before); got != 0.1 {
		t.Errorf("stolen since: got %g, want 0.1", got)
	}
}
