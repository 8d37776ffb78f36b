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
		callTimeout: 3 * time.Second, caseTimeout: 20 * time.Second,
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

// TestMutants runs the suite against the reference driver with each fault. The case of
// the fault must fail. With -full, all other cases run too; they may fail only if the
// requirement lists them under implies, and mutants.md is compared.
func TestMutants(t *testing.T) {
	const table = "mutants.md"
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
					id := r.Requirement.ID
					if r.Status == Failed && id != fault {
						others = append(others, id)
					}
					if r.Status == Failed && id != fault && !slices.Contains(implied[fault], id) {
						t.Errorf("%s fails too, and is not listed under implies: %s", id, firstLine(r.Message))
					}
				}
				mu.Lock()
				defer mu.Unlock()
				text := strings.ReplaceAll(own.Requirement.Text, "`", "") // of Kubernetes, not of this project
				rows[fault] = fmt.Sprintf("| %s | %s | %s |\n", fault, text, strings.Join(others, ", "))
			})
		}
	})
	if t.Failed() || *only != "" || !*full {
		return
	}
	got := mutantsTable(faults(t), rows)
	if *update {
		if err := os.WriteFile(table, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(table)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s differs from the result (%v): run go test -run TestMutants -full -update", table, err)
	}
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
