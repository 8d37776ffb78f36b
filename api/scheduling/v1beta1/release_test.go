// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1beta1

import (
	"strings"
	"testing"
	"time"
)

func TestParseRelease(t *testing.T) {
	for _, tc := range []struct {
		value string
		want  Release
		err   string
	}{
		{value: "OnDeletion"},
		{value: "OnCompletion", want: Release{OnCompletion: true}},
		{value: "OnSuspension", want: Release{OnSuspension: true}},
		{value: "Unused=90s", want: Release{Unused: 90 * time.Second}},
		{value: "OnCompletion, OnSuspension,Unused=10m",
			want: Release{OnCompletion: true, OnSuspension: true, Unused: 10 * time.Minute}},
		{value: "", err: `"" is unknown: use OnDeletion, or a list of OnCompletion, OnSuspension, and Unused=<duration>`},
		{value: "onCompletion", err: `"onCompletion" is unknown`},
		{value: "OnCompletion=1m", err: `"OnCompletion=1m" is unknown`},
		{value: "OnCompletion,", err: `"" is unknown`},
		{value: "OnCompletion,OnCompletion", err: "contains OnCompletion twice"},
		{value: "OnDeletion,OnCompletion", err: "OnDeletion cannot be combined with other elements"},
		{value: "Unused", err: "Unused must have a duration of at least 1s, such as Unused=10m"},
		{value: "Unused=10", err: "Unused must have a duration"},
		{value: "Unused=10ms", err: "Unused must have a duration"},
		{value: "Unused=-10m", err: "Unused must have a duration"},
	} {
		t.Run(tc.value, func(t *testing.T) {
			got, err := ParseRelease(tc.value)
			if got != tc.want {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
			if tc.err == "" && err != nil || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
				t.Errorf("got error %v, want %q", err, tc.err)
			}
		})
	}
}
