// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"strings"
	"testing"
)

// TestRequirements checks the data: IDs are unique, each case has a requirement, and
// each requirement with a case names its source and the usual cause of a failure.
func TestRequirements(t *testing.T) {
	all, err := Requirements()
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]Requirement{}
	for _, r := range all {
		if known[r.ID].ID != "" {
			t.Errorf("%s exists twice", r.ID)
		}
		known[r.ID] = r
		if (r.Profile == "") == (r.Feature == "") {
			t.Errorf("%s: exactly one of profile %q and feature %q must be set", r.ID, r.Profile, r.Feature)
		}
		if r.Level == Must && r.Implemented() && (r.Source == nil && r.Reference == "" || r.Cause == "" && r.Source != nil) {
			t.Errorf("%s has a case, but no source or no usual cause", r.ID)
		}
		if r.Source != nil && r.Source.Version() == "" {
			t.Errorf("%s: the version of %s is not known", r.ID, r.Source.File)
		}
	}
	for id := range cases() {
		if known[id].ID == "" {
			t.Errorf("the case %s has no requirement", id)
		}
	}
	for _, r := range all {
		for _, id := range r.Implies {
			if known[id].ID == "" {
				t.Errorf("%s implies %s, which does not exist", r.ID, id)
			}
		}
	}
}

func TestExplain(t *testing.T) {
	text, err := Explain("prep-07")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"PREP-07 (must, DRA-NODE", "draplugin.go v0.37.2", "Usual cause",
		"Decision of the suite"} {
		if !strings.Contains(text, want) {
			t.Errorf("Explain(prep-07) = %q, want %q in it", text, want)
		}
	}
	if _, err := Explain("PREP-99"); err == nil || !strings.Contains(err.Error(), `"PREP-99"`) {
		t.Errorf("Explain(PREP-99): got error %v, want one that names it", err)
	}
}

func TestConfig_namesWrongFields(t *testing.T) {
	for _, test := range []struct {
		name string
		c    Config
		want string
	}{
		{"no driver", Config{Command: []string{"x"}}, "driver is empty"},
		{"no command", Config{Driver: "x.example.com"}, "0 of command, Serve, and kubelet"},
		{"kubelet without node", Config{Driver: "x.example.com", Kubelet: "/x"}, "node is empty"},
		{"unknown feature", Config{Driver: "x.example.com", Command: []string{"x"}, Features: []string{"Speed"}}, `"Speed"`},
		{"unknown profile", Config{Driver: "x.example.com", Command: []string{"x"}, Profiles: []string{"DRA-NODE"}},
			`"DRA-NODE"`},
		{"pods without a kubelet", Config{Driver: "x.example.com", Command: []string{"x"}, Pods: Pods{Image: "x"}},
			"pods: image"},
		{"unknown ID", Config{Driver: "x.example.com", Command: []string{"x"}, Only: []string{"FAST"}}, `"FAST"`},
		{"skip without reason", Config{Driver: "x.example.com", Command: []string{"x"},
			Skip: map[string]string{"PREP-01": ""}}, "PREP-01"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, err := test.c.complete(); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want %q", err, test.want)
			}
		})
	}
}
