// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package eventually

import (
	"testing"
	"time"
)

func TestNextInterval(t *testing.T) {
	const ms = time.Millisecond
	for _, tc := range []struct {
		name                string
		passed, check, want time.Duration
	}{
		{"first check", 0, 0, 2 * ms},
		{"short wait", 80 * ms, ms, 10 * ms},
		{"long wait", 10 * time.Second, ms, 50 * ms},
		{"first slow check", 140 * ms, 140 * ms, 17500 * time.Microsecond},
		{"slow check in a long wait", 10 * time.Second, 140 * ms, 280 * ms},
		{"very slow check", 10 * time.Second, 3 * time.Second, time.Second},
	} {
		if got := nextInterval(tc.passed, tc.check); got != tc.want {
			t.Errorf("%s: interval after a check of %v, %v after the start: got %v, want %v",
				tc.name, tc.check, tc.passed, got, tc.want)
		}
	}
}
