// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"strings"
	"testing"
)

func TestAddressUsers(t *testing.T) {
	for name, tc := range map[string]struct {
		senders string // the last bytes of MAC addresses that use an address, in order
		want    string // of the error, or ""
	}{
		"one link":                   {"aaa", ""},
		"one link after another":     {"aab", ""},
		"two links at the same time": {"aba", "address 10.20.9.1 was used by several links at the same time"},
	} {
		users := addressUsers{}
		for _, sender := range []byte(tc.senders) {
			frame := make([]byte, arpSize)
			frame[13] = sender
			copy(frame[14:], []byte{10, 20, 9, 1})
			users.add(netip.MustParsePrefix("10.20.9.0/28"), frame)
		}
		err := users.report()
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: got error %v, want %q", name, err, tc.want)
		}
	}
}
