// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package requeue combines the times until a reconciler or a device kind must run again.
package requeue

import "time"

// Soonest returns the shorter of two durations, where 0 means never.
func Soonest(a, b time.Duration) time.Duration {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}
