// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import "time"

// gracePeriod remembers when orphans were first found. Only orphans that persist for the grace period
// are removed: an object that is being created has its record by then.
type gracePeriod struct {
	length time.Duration
	// firstSeen holds when each orphan of the previous round was first found, by description; present collects the
	// orphans of the current round.
	firstSeen, present map[string]time.Time
}

// isDue notes that an orphan was found in this round, and reports whether its grace period, which is at least
// minimum, is over.
func (g *gracePeriod) isDue(description string, minimum time.Duration) bool {
	first, known := g.firstSeen[description]
	if !known {
		first = time.Now()
	}
	if g.present == nil {
		g.present = map[string]time.Time{}
	}
	g.present[description] = first
	return time.Since(first) >= max(g.length, minimum)
}

// forget restarts an orphan's grace period if it is found in a later round.
func (g *gracePeriod) forget(description string) { delete(g.present, description) }

// endRound ends a round and forgets the orphans that were not found in it.
func (g *gracePeriod) endRound() { g.firstSeen, g.present = g.present, nil }
