// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// firstSeen holds the times when the controller first saw objects in a state, such as being deleted. The times in the
// objects come from other clocks, which may differ from the controller's clock. The times are lost when the controller
// restarts. The zero value is ready for use.
type firstSeen struct {
	mu    sync.Mutex
	times map[types.UID]sighting
}

type sighting struct{ first, last time.Time }

// forgottenAfter is how long after the last call for an object age forgets the object. While the object is in
// the state, the controller calls again at least every leaderInterval.
const forgottenAfter = 10 * time.Minute

// age records that the controller sees the object in the state, and returns the time since it first did.
func (f *firstSeen) age(uid types.UID, now time.Time) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	isForgotten := func(_ types.UID, s sighting) bool { return now.Sub(s.last) > forgottenAfter }
	s, ok := f.times[uid]
	if !ok || isForgotten(uid, s) {
		maps.DeleteFunc(f.times, isForgotten)
		s.first = now
	}
	if f.times == nil {
		f.times = map[types.UID]sighting{}
	}
	s.last = now
	f.times[uid] = s
	return now.Sub(s.first)
}
