// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/conformance/reference"
)

// referenceVariable makes the test binary the reference driver.
const referenceVariable = "CONFORMANCE_REFERENCE"

func TestMain(m *testing.M) {
	if os.Getenv(referenceVariable) != "" {
		if err := reference.Main(os.Getenv); err != nil {
			log.Fatal(err)
		}
		return
	}
	os.Exit(m.Run())
}

var (
	update = flag.Bool("update", false, "with -full, write mutants.md")
	full   = flag.Bool("full", false, "run all cases for each fault, not only that of the fault")
	only   = flag.String("faults", "", "run only these faults, separated by commas")
)

// referenceConfig returns the configuration for the reference driver with a fault.
func referenceConfig(t *testing.T, fault string) Config {
	t.Helper()
	rbac := filepath.Join(t.TempDir(), "rbac.yaml")
	if err := os.WriteFile(rbac, []byte(reference.RBAC(fault)), 0o600); err != nil {
		t.Fatal(err)
	}
	c := Config{
		Driver: reference.Name,
		Features: []string{
			"ConsumableCapacity", "SharedDevices", "RollingUpdate", "DeviceTaints", "Status", "Health", "Metadata",
			"PartitionableDevices", "AdminAccess", "PrioritizedList", "WorkloadClaims",
		},
		Command: []string{"env", referenceVariable + "=1", "FAULT=" + fault, os.Args[0]},
		Parameters: []string{
			`{"apiVersion":"reference.conformance.example/v1","kind":"Parameters","value":"one"}`,
			`{"apiVersion":"reference.conformance.example/v1","kind":"Parameters","value":"two"}`,
			`{"apiVersion":"reference.conformance.example/v1","kind":"Parameters","value":"` + strings.Repeat("x", 9500) + `"}`,
		},
		Profiles: kinds(),
		RBAC:     []string{rbac},
		Hooks: Hooks{
			RemoveDevice:  []string{"sh", "-c", `touch "$STATE_DIR/removed-$DEVICE"`},
			RestoreDevice: []string{"sh", "-c", `rm "$STATE_DIR/removed-$DEVICE"`},
			Interfaces:    []string{"sh", "-c", `cat "$STATE_DIR/pod-$CLAIM_UID"`},
		},
		Quiet: Duration{time.Second}, Cycles: 20, StartTimeout: Duration{5 * time.Second},
		callTimeout: 6 * time.Second, caseTimeout: 30 * time.Second,
	}
	switch fault {
	case "REG-11":
		c.Driver = "Reference.conformance.example"
	case "HEALTH-07":
		c.Features = slices.DeleteFunc(c.Features, func(f string) bool { return f == "Health" })
		c.Command = append([]string{"env", "NO_HEALTH=1"}, c.Command...)
	}
	return c
}

func TestReference_meetsAllRequirements(t *testing.T) {
	Test(t, referenceConfig(t, ""))
}

// faults returns the musts that are tested by socket, API, or process.
func faults(t *testing.T) (ids []string) {
	t.Helper()
	all, err := Requirements()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range all {
		chosen := *only == "" || slices.Contains(strings.Split(*only, ","), r.ID)
		if r.Level == Must && r.Implemented() && !needsPods(r) && chosen {
			ids = append(ids, r.ID)
		}
	}
	return ids
}

// needsPods reports whether the case of a requirement starts pods, which the reference driver
// cannot run.
func needsPods(r Requirement) bool { return slices.Contains(kinds(), r.Profile) && r.Way == Kubelet }

// mutantsFile is the table that TestMutants writes.
const mutantsFile = "mutants.md"

// TestMutants runs the suite against the reference driver with each fault. The case of
// the fault must fail. With -full, all other cases run too: those fail, and no others, that the
// requirement lists under implies. -update writes the table of what failed.
func TestMutants(t *testing.T) {
	all, err := Requirements()
	if err != nil {
		t.Fatal(err)
	}
	implied := map[string][]string{}
	for _, r := range all {
		implied[r.ID] = r.Implies
	}
	var mu sync.Mutex
	rows := map[string]string{}
	t.Run("faults", func(t *testing.T) {
		for _, fault := range faults(t) {
			t.Run(fault, func(t *testing.T) {
				t.Parallel()
				c := referenceConfig(t, fault)
				if !*full {
					c.Only = []string{fault}
				}
				report, err := Run(t.Context(), c, nil)
				if err != nil {
					t.Fatal(err)
				}
				failed := map[string]Result{}
				for _, r := range report.Results() {
					if r.Status == Failed {
						failed[r.Requirement.ID] = r
					}
				}
				own, caught := failed[fault]
				if !caught {
					t.Errorf("the case passes for a driver with this fault")
				}
				var others []string
				for _, r := range report.Results() {
					if id := r.Requirement.ID; r.Status == Failed && id != fault {
						others = append(others, id)
					}
				}
				if *full {
					checkImplied(t, implied[fault], failed, others)
				}
				mu.Lock()
				defer mu.Unlock()
				if caught {
					rows[fault] = mutantsRow(own.Requirement, others)
				}
			})
		}
	})
	if !*full || *only != "" {
		return
	}
	if got := mutantsTable(faults(t), rows); *update && len(rows) == len(faults(t)) {
		if err := os.WriteFile(mutantsFile, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// checkImplied compares the other cases that failed with what a requirement implies.
func checkImplied(t *testing.T, implied []string, failed map[string]Result, others []string) {
	t.Helper()
	for _, id := range others {
		if !slices.Contains(implied, id) {
			t.Errorf("%s fails too, and is not listed under implies: %s", id, firstLine(failed[id].Message))
		}
	}
	for _, id := range implied {
		if !slices.Contains(others, id) {
			t.Errorf("%s is listed under implies, and passes", id)
		}
	}
}

// TestMutants_table fails if the committed table differs from the requirements: each fault has
// a row, with what the requirement implies.
func TestMutants_table(t *testing.T) {
	all, err := Requirements()
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]string{}
	for _, r := range all {
		rows[r.ID] = mutantsRow(r, r.Implies)
	}
	raw, err := os.ReadFile(mutantsFile)
	if err != nil {
		t.Fatal(err)
	}
	got, want := strings.Split(string(raw), "\n"), strings.Split(string(mutantsTable(faults(t), rows)), "\n")
	for i := range max(len(got), len(want)) {
		if i >= min(len(got), len(want)) || got[i] != want[i] {
			t.Fatalf("%s differs from requirements.yaml in line %d: run make conformance-mutants", mutantsFile, i+1)
		}
	}
}

// mutantsRow returns the row of a fault, with the other cases that failed.
func mutantsRow(r Requirement, others []string) string {
	text := strings.ReplaceAll(r.Text, "`", "") // of Kubernetes, not of this project
	return fmt.Sprintf("| %s | %s | %s |\n", r.ID, text, strings.Join(others, ", "))
}

func mutantsTable(ids []string, rows map[string]string) []byte {
	var b bytes.Buffer
	b.WriteString(`<!-- Generated by go test -run TestMutants -full -update. -->

# Faults and the cases that find them

The reference driver ran with one fault for each requirement. The case of the requirement failed
each time; the last column lists other cases that failed.

| Fault | Requirement that is not met | Other cases that failed |
|---|---|---|
`)
	for _, id := range ids {
		b.WriteString(rows[id])
	}
	return b.Bytes()
}
