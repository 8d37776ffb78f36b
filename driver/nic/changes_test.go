// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Refresh runs often, and logs only what it changed.
func TestChangesOf(t *testing.T) {
	nic := func(change func(*device)) map[string]*device {
		d := &device{name: "nic0", line: 10e9}
		if change != nil {
			change(d)
		}
		return map[string]*device{"nic0": d}
	}
	absent := nic(func(d *device) { d.absent = true })
	unusable := nic(func(d *device) { d.absent, d.unusable = true, errors.New("no carrier") })
	singleQueue := nic(func(d *device) { d.singleQueue = "one queue" })
	problems := []problem{{"nic0", "nic0", errors.New("no carrier")}}
	type found struct{ Missing, Shared, SingleQueue, Stopped, Problems []string }
	nic0 := []string{"nic0"}
	for name, tc := range map[string]struct {
		old, next                map[string]*device
		oldProblems, newProblems []problem
		want                     found
	}{
		"nothing":                 {want: found{}},
		"first Refresh":           {next: nic(nil), want: found{Shared: nic0}},
		"unchanged":               {old: nic(nil), next: nic(nil), want: found{}},
		"slower link":             {old: nic(nil), next: nic(func(d *device) { d.line = 1e9 }), want: found{Shared: nic0}},
		"no carrier":              {old: nic(nil), next: nic(func(d *device) { d.down = true }), want: found{Shared: nic0}},
		"returned":                {old: absent, next: nic(nil), want: found{Shared: nic0}},
		"missing":                 {old: nic(nil), next: absent, want: found{Missing: nic0}},
		"missing since the start": {next: absent, want: found{Missing: nic0}},
		"still missing":           {old: absent, next: absent, want: found{}},
		"cannot be shared":        {old: nic(nil), next: unusable, newProblems: problems, want: found{Problems: nic0}},
		"still cannot be shared": {
			old: unusable, next: unusable, oldProblems: problems, newProblems: problems, want: found{}},
		"usable, but missing since": {old: unusable, next: absent, oldProblems: problems, want: found{}},
		"stopped":                   {old: nic(nil), want: found{Stopped: nic0}},
		"one queue":                 {old: nic(nil), next: singleQueue, want: found{SingleQueue: nic0}},
		"one queue from the start":  {next: singleQueue, want: found{Shared: nic0, SingleQueue: nic0}},
		"still one queue":           {old: singleQueue, next: singleQueue, want: found{}},
		"several queues again":      {old: singleQueue, next: nic(nil), want: found{}},
		"one queue for another reason": {
			old: nic(func(d *device) { d.singleQueue = "another" }), next: singleQueue, want: found{SingleQueue: nic0}},
		"another problem": {
			oldProblems: []problem{{"nic0", "nic0", errors.New("busy")}}, newProblems: problems, want: found{Problems: nic0}},
		"problem of another NIC": {
			oldProblems: []problem{{"nic1", "nic1", errors.New("no carrier")}}, newProblems: problems,
			want: found{Problems: nic0}},
	} {
		t.Run(name, func(t *testing.T) {
			c := changesOf(tc.old, tc.next, tc.oldProblems, tc.newProblems)
			got := found{namesOf(c.missing), namesOf(c.shared), namesOf(c.singleQueue), namesOf(c.stopped), nil}
			for _, p := range c.problems {
				got.Problems = append(got.Problems, p.nic)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("changes (-want +got):\n%s", diff)
			}
		})
	}
}

// The log lists devices in a fixed order.
func TestChangesOf_sortedByName(t *testing.T) {
	devices := map[string]*device{}
	for _, name := range []string{"c", "a", "d", "b"} {
		devices[name] = &device{name: name}
	}
	want := []string{"a", "b", "c", "d"}
	if diff := cmp.Diff(want, namesOf(changesOf(nil, devices, nil, nil).shared)); diff != "" {
		t.Errorf("shared devices (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, namesOf(changesOf(devices, nil, nil, nil).stopped)); diff != "" {
		t.Errorf("stopped devices (-want +got):\n%s", diff)
	}
}

func namesOf(devices []*device) (names []string) {
	for _, d := range devices {
		names = append(names, d.name)
	}
	return names
}
