// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
)

// Where bpf() is denied, all keys fail, including the one with a program that needs CAP_PERFMON. The remedy is for
// the key that needs least.
func TestWithRemedy_bpfDenied(t *testing.T) {
	denied := fmt.Errorf("load classifier: map create: operation not permitted: %w", classify.ErrDenied)
	_, err := trial.Strongest([]trial.Result{
		{Key: classify.KeyCookie, Err: denied},
		{Key: classify.KeySocketCookie, Err: fmt.Errorf("load classifier: %w", classify.ErrNoPerfmon)},
		{Key: classify.KeyMAC, Err: denied},
	})
	got := withRemedy(err)
	if !errors.Is(got, err) {
		t.Errorf("withRemedy returned %v, want an error that wraps %v", got, err)
	}
	for _, text := range []string{got.Error(), claimstatus.Truncate(got.Error(), 512)} {
		for _, want := range []string{"CAP_BPF", "plugin.seLinuxOptions.type=spc_t", "user namespace"} {
			if !strings.Contains(text, want) {
				t.Errorf("withRemedy returned %q, want a text that contains %q", text, want)
			}
		}
	}
}

// A NIC that may still become an uplink makes the plugin unready, for a minute at most. An uplink that only a pattern
// names does not: the network may be meant for nodes with further NICs.
func TestSurvey_ready_uplink(t *testing.T) {
	for _, early := range []bool{true, false} {
		uplink := problem{"nic0", "nic0", &uplinkError{network: "storage", toShare: "nic0", early: early}}
		alone := survey{problems: []problem{uplink}}
		if err := alone.ready(); (err != nil) != early {
			t.Errorf("early: %t: the only NIC: got error %v, want one: %t", early, err, early)
		}
		another := survey{usable: []*device{{name: "nic1"}}, problems: []problem{uplink}}
		if err := another.ready(); err != nil {
			t.Errorf("early: %t: with another NIC: got error %v, want none", early, err)
		}
	}
}
