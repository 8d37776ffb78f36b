// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"net"
	"strings"
	"testing"
)

// The API server refuses an event of more than 1,024 characters.
func TestHiddenLinks_warnsOfThousandsOfAddresses(t *testing.T) {
	var addresses []net.HardwareAddr
	for i := range 1001 {
		addresses = append(addresses, net.HardwareAddr{2, 0, 0, 0, byte(i >> 8), byte(i)})
	}
	k := &Kind{hidden: newHiddenLinks()}
	k.hidden.update("enp129s0f0np0", describeAddresses(addresses), true)
	warnings := k.Warnings()
	if len(warnings) != 1 || len(warnings[0].Message) > 1024 ||
		!strings.Contains(warnings[0].Message, "02:00:00:00:00:00") || !strings.Contains(warnings[0].Message, "996 more") {
		t.Errorf("warnings %+v, want one with a few addresses and their number", warnings)
	}
}

// There is one warning for the time from the first hidden link until the NIC is no longer guarded.
func TestHiddenLinks_warnsWhileNICIsGuarded(t *testing.T) {
	k := &Kind{hidden: newHiddenLinks()}
	for i, step := range []struct {
		addresses string
		guarded   bool
		isNew     bool
		changed   bool
		warns     string
	}{
		{"", false, false, false, ""},
		{"", true, false, false, ""}, // for a link that the node sees: the claim has a condition
		{"[02:00:00:00:00:01]", true, true, true, "02:00:00:00:00:01"},
		{"[02:00:00:00:00:02]", true, false, false, "02:00:00:00:00:01"},
		{"", true, false, false, "02:00:00:00:00:01"},
		{"", false, false, true, ""},
		{"[02:00:00:00:00:03]", true, true, true, "02:00:00:00:00:03"},
	} {
		if isNew := k.hidden.update("eth1", step.addresses, step.guarded); isNew != step.isNew {
			t.Errorf("step %d: links are new: %t, want %t", i, isNew, step.isNew)
		}
		changed := len(k.hidden.changed) > 0
		if changed {
			<-k.hidden.changed
		}
		if changed != step.changed || k.hidden.isGuarded("eth1") != step.guarded {
			t.Errorf("step %d: changed %t, want %t; guarded: %t", i, changed, step.changed, k.hidden.isGuarded("eth1"))
		}
		warnings := k.Warnings()
		if len(warnings) > 0 != (step.warns != "") ||
			len(warnings) > 0 && (warnings[0].Device != "eth1" || !strings.Contains(warnings[0].Message, step.warns)) {
			t.Errorf("step %d: warnings %+v, want one about %q", i, warnings, step.warns)
		}
	}
	k.hidden.keep(nil)
	if warnings := k.Warnings(); len(warnings) > 0 {
		t.Errorf("warnings %+v about a NIC that is gone", warnings)
	}
}
