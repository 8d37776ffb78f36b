// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import "time"

// gracePeriod remembers when orphans were first found. Only orphans that persist for the grace period
// are removed: an object that is being created has its record by then.
type gracePeriod struct {
	length time.Duration
	// firstSeen holds when each orphan of the previous round was first found, by description;
	// present collects those of the current round.
	firstSeen, present map[string]time.Time
}

// isDue notes that an orphan was found in this round, and reports whether its grace period is
// over, which is at least as long as minimum.
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

// forget makes the grace period of an orphan begin again if it is found in a later round.
func (g *gracePeriod) forget(description string) { delete(g.present, description) }

// endRound ends a round. The orphans that were not found in it are no longer known.
func (g *gracePeriod) endRound() { g.firstSeen, g.present = g.present, nil }
