// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// Timer measures how long each owner's claims have been unused. It starts when the controller notices that they are
// unused. After a restart of the controller, it starts again, and the claims are released later.
type Timer struct {
	clock clock.PassiveClock

	mu    sync.Mutex
	since map[types.UID]time.Time
}

// NewTimer returns a Timer without owners.
func NewTimer(c clock.PassiveClock) *Timer {
	return &Timer{clock: c, since: map[types.UID]time.Time{}}
}

// remaining returns how long the claims of the owner must still be unused until they have
// been unused for the given time. It is 0 or negative if they have been.
func (t *Timer) remaining(owner types.UID, unused time.Duration) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	since, ok := t.since[owner]
	if !ok {
		since = t.clock.Now()
		t.since[owner] = since
	}
	return unused - t.clock.Since(since)
}

// Reset forgets the owner: its claims are in use, or it no longer exists.
func (t *Timer) Reset(owner types.UID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.since, owner)
}

// ReleaseDue reports whether the claims of an owner must be released now. If not, wait is the time until the caller
// must ask again; 0 if only an event can change the answer. state is the state of the owner's workload. isUsed reports
// whether a pod uses the claims.
func ReleaseDue(
	policy scheduling.Release, state State, owner types.UID, isUsed bool, unused *Timer,
) (due bool, wait time.Duration) {
	switch {
	case isUsed:
		unused.Reset(owner)
		return false, 0
	case policy.Unused == 0:
		unused.Reset(owner) // the policy may change
		return policy.OnCompletion && state.Complete || policy.OnSuspension && state.Suspended, 0
	case policy.OnCompletion && state.Complete, policy.OnSuspension && state.Suspended:
		return true, 0
	}
	wait = unused.remaining(owner, policy.Unused)
	return wait <= 0, max(wait, 0)
}
