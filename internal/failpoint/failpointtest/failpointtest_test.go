// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package failpointtest_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint/failpointtest"
)

var errKilled = errors.New("killed")

func TestKiller_Inject(t *testing.T) {
	run := []string{"write", "create link", "write"}
	for _, tc := range []struct {
		name     string
		point    failpointtest.Point
		want     []string // the operations with an effect
		wantKill string   // the operation at which Kill is called
	}{
		{"the zero point is never reached", failpointtest.Point{}, run, ""},
		{"before the second operation of a name", failpointtest.Point{Name: "write", N: 2}, run[:2], "write"},
		{"after the second operation of a name", failpointtest.Point{Name: "write", N: 2, After: true}, run, "write"},
		{"before an operation, counting all", failpointtest.Point{N: 2}, run[:1], "create link"},
		{"after an operation, counting all", failpointtest.Point{N: 2, After: true}, run[:2], "create link"},
		{"a name that does not occur", failpointtest.Point{Name: "write", N: 3}, run, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			killedAt := ""
			k := &failpointtest.Killer{Point: tc.point, Kill: func(operation string) error {
				killedAt = operation
				return errKilled
			}}
			var got []string
			for _, name := range run {
				err := k.Inject(name, func() error {
					got = append(got, name)
					return nil
				})
				if killed := killedAt != ""; killed != errors.Is(err, errKilled) {
					t.Errorf("operation %s: Inject returned %v, Kill was called: %t", name, err, killed)
				}
				if err != nil {
					break
				}
			}
			if !slices.Equal(got, tc.want) || killedAt != tc.wantKill {
				t.Errorf("point %s: operations %v, killed at %q; want %v, %q", tc.point, got, killedAt, tc.want, tc.wantKill)
			}
		})
	}
}
