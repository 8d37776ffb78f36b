// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestGracePeriod_startsAgainAfterInterruption(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := gracePeriod{length: time.Minute}
		round := func(want string, found ...string) {
			t.Helper()
			due := ""
			for _, description := range found {
				if g.isDue(description, 0) {
					due += description
				}
			}
			if due != want {
				t.Errorf("after %q were found: got %q due, want %q", found, due, want)
			}
		}
		round("", "a", "b", "c")
		g.endRound()
		time.Sleep(30 * time.Second) //nolint:forbidigo // the time of synctest
		round("", "a", "c")          // b is no longer an orphan
		g.endRound()
		time.Sleep(30 * time.Second) //nolint:forbidigo // the time of synctest
		round("ac", "a", "b", "c")
		g.forget("c") // removed
		g.endRound()
		round("a", "a", "b", "c")
		g.endRound()
		time.Sleep(time.Minute) //nolint:forbidigo // the time of synctest
		round("bc", "b", "c")
	})
}
