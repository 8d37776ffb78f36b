// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

func TestIsInRound(t *testing.T) {
	const claims = 1000
	perRound := map[uint32]int{}
	for i := range claims {
		uid := types.UID(fmt.Sprintf("7b0c1e52-41d0-4c8e-9d1e-%012x", i))
		reported := 0
		for round := uint32(7); round < 7+statusRounds; round++ {
			if isInRound(uid, round) {
				reported++
				perRound[round]++
			}
		}
		if reported != 1 {
			t.Fatalf("claim %s is reported in %d of %d rounds, want 1", uid, reported, statusRounds)
		}
	}
	for round, n := range perRound {
		if n > 2*claims/statusRounds {
			t.Errorf("round %d reports %d of %d claims, want about %d", round, n, claims, claims/statusRounds)
		}
	}
}
