// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package requeue_test

import (
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/internal/requeue"
)

func TestSoonest(t *testing.T) {
	for _, tc := range []struct{ a, b, want time.Duration }{
		{0, 0, 0},
		{0, time.Second, time.Second},
		{time.Second, 0, time.Second},
		{time.Second, time.Minute, time.Second},
		{time.Minute, time.Second, time.Second},
	} {
		if got := requeue.Soonest(tc.a, tc.b); got != tc.want {
			t.Errorf("Soonest(%s, %s): got %s, want %s", tc.a, tc.b, got, tc.want)
		}
	}
}
