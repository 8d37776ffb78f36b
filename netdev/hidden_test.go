// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"testing"
	"time"
)

func TestInspection_confirms(t *testing.T) {
	start := time.Unix(1000, 0)
	last := inspection{accepted: []macAddress{{7}}, changes: 3, compared: start}
	now := inspection{accepted: []macAddress{{7}}, changes: 3, compared: start.Add(time.Second)}
	for name, test := range map[string]struct {
		change func(last, now *inspection)
		want   bool
	}{
		"nothing has changed": {func(_, _ *inspection) {}, true},
		"the NIC accepts other addresses": {
			func(_, now *inspection) { now.accepted = []macAddress{{8}} }, false},
		"a link was detached, or has another address": {
			func(_, now *inspection) { now.changes++ }, false},
		"another plugin may have removed an attachment": {
			func(_, now *inspection) { now.compared = start.Add(compareInterval) }, false},
		"a link that was detached may remain": {
			func(last, _ *inspection) { last.excused = true }, false},
		"an address is not that of an attachment": {
			func(last, _ *inspection) { last.suspects = addressSet{{2, 0, 0, 0, 0, 1}: {}} }, false},
		"this is the first inspection": {func(last, _ *inspection) { *last = inspection{} }, false},
	} {
		t.Run(name, func(t *testing.T) {
			last, now := last, now
			test.change(&last, &now)
			if got := now.confirms(last); got != test.want {
				t.Errorf("confirms: got %t, want %t", got, test.want)
			}
		})
	}
}
