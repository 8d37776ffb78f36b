// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

func TestFirstSeen_age(t *testing.T) {
	var f firstSeen
	start := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	for _, step := range []struct {
		uid  types.UID
		at   time.Duration
		want time.Duration
	}{
		{"a", 0, 0}, {"a", time.Minute, time.Minute}, {"b", time.Minute, 0},
		{"b", forgottenAfter + time.Minute, forgottenAfter}, {"a", forgottenAfter + 2*time.Minute, 0},
	} {
		if got := f.age(step.uid, start.Add(step.at)); got != step.want {
			t.Errorf("time since %s was first seen, after %s: got %s, want %s", step.uid, step.at, got, step.want)
		}
	}
}
