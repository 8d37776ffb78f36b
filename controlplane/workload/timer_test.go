// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

func TestReleaseDue(t *testing.T) {
	afterTen := scheduling.Release{Unused: 10 * time.Minute}
	clock := clocktesting.NewFakePassiveClock(time.Now())
	timer := NewTimer(clock)
	for _, step := range []struct {
		name   string
		passed time.Duration // since the step before
		policy scheduling.Release
		state  State
		isUsed bool
		due    bool
		wait   time.Duration
	}{
		{"unused", 0, afterTen, State{}, false, false, 10 * time.Minute},
		{"unused for nine minutes", 9 * time.Minute, afterTen, State{}, false, false, time.Minute},
		{"used", 0, afterTen, State{}, true, false, 0},
		{"unused again", time.Hour, afterTen, State{}, false, false, 10 * time.Minute},
		{"another policy", 9 * time.Minute, scheduling.Release{OnCompletion: true}, State{}, false, false, 0},
		{"the first policy again", 9 * time.Minute, afterTen, State{}, false, false, 10 * time.Minute},
		{"unused for ten minutes", 10 * time.Minute, afterTen, State{}, false, true, 0},
		{"complete", 0, scheduling.Release{OnCompletion: true}, State{Complete: true}, false, true, 0},
		{"complete and used", 0, scheduling.Release{OnCompletion: true}, State{Complete: true}, true, false, 0},
		{"suspended", 0, scheduling.Release{OnCompletion: true}, State{Suspended: true}, false, false, 0},
		{"suspended, or a time", 0, scheduling.Release{OnSuspension: true, Unused: time.Hour},
			State{Suspended: true}, false, true, 0},
	} {
		clock.SetTime(clock.Now().Add(step.passed))
		due, wait := ReleaseDue(step.policy, step.state, "owner", step.isUsed, timer)
		if due != step.due || wait != step.wait {
			t.Errorf("%s: got %t, %v, want %t, %v", step.name, due, wait, step.due, step.wait)
		}
	}
}
