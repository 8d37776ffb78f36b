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
			"PartitionableDevices", "AdminAccess", "PrioritizedList", "WorkloadClaims", "SkipNodeOperations",
			"BindingConditions",
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

// fault is a fault of the reference driver: it does not meet a requirement.
type fault struct {
	name    string // the ID of the requirement, or ID/NAME
	id      string
	text    string   // what the driver does not do, or does
	implies []string // other cases that fail too
}

// variants returns faults of requirements with more than one sentence, or more than one way not to
// meet it.
func variants() []fault {
	return []fault{
		{name: "PREP-01/count", text: "The response has only the first device of a request with the count 2"},
		{name: "PREP-01/name", text: "A claim with a long name fails"},
		{name: "PREP-02/other", text: "All entries of a call have the devices of its last claim"},
		{name: "PREP-03/share", text: "A second call counts the capacity of a share again"},
		{name: "PREP-03/spec", text: "A second call changes the CDI edits of the same IDs"},
		{name: "PREP-04/spec", text: "After a restart, prepare changes the CDI edits of the same IDs",
			implies: []string{"CDI-08", "UPG-05"}},
		{name: "PREP-05/record", text: "Calls for several claims at the same time lose records",
			implies: []string{"PREP-13"}},
		{name: "PREP-07/specs", text: "A failure of one claim removes the CDI devices of the other claims of the call"},
		{name: "PREP-10/crash", text: "The process ends when the UID differs"},
		{name: "PREP-11/crash", text: "The process ends when the claim has no allocation"},
		{name: "PREP-11/hang", text: "The call never ends when the claim has no allocation"},
		{name: "PREP-12/name", text: "The response has the device of another driver with the name of a device of this one"},
		{name: "PREP-13/crash", text: "The process ends when another claim has the device"},
		{name: "PREP-13/race", text: "Calls for two claims with one device at the same time both succeed"},
		{name: "PREP-13/restart", text: "After a restart, a device in use is prepared for another claim"},
		{name: "PREP-17/claims", text: "A call for many claims takes too long"},
		{name: "PREP-17/few", text: "A driver with few devices takes too long for all of them"},
		{name: "PREP-20/edits", text: "The CDI device of one request has the edits of the other request's device, too"},
		{name: "PREP-21/class", text: "The parameters of the class are ignored", implies: []string{"PREP-22"}},
		{name: "PREP-21/named", text: "The parameters of the class are ignored if they name the request"},
		{name: "PREP-22/class", text: "Parameters of the class that cannot be decoded are ignored"},
		{name: "PREP-22/crash", text: "The process ends when parameters cannot be decoded"},
		{name: "PREP-24/busy", text: "A call that was canceled while the driver read the claim leaves it busy"},
		{name: "UNPR-01/others", text: "Unprepare removes the CDI devices of other claims",
			implies: []string{"UNPR-06", "SHARE-02"}},
		{name: "UNPR-01/second", text: "The second device of a claim stays in use"},
		{name: "UNPR-01/share", text: "The capacity of a share is not returned"},
		{name: "UNPR-02/more", text: "The response has entries for claims that are not in the request"},
		{name: "UNPR-06/namespace", text: "Unprepare also unprepares a claim of the same name in another namespace"},
		{name: "UNPR-09/hang", text: "Unprepare waits for an API server that does not answer"},
		{name: "UNPR-10/call", text: "The call fails when one claim cannot be unprepared"},
		{name: "UNPR-10/record", text: "After an error of unprepare, the next call succeeds, and the CDI device remains"},
		{name: "UNPR-11/device", text: "A claim whose second device was missing keeps the first one",
			implies: []string{"PREP-08"}},
		{name: "UNPR-12/uid", text: "The driver does not notice that a claim was deleted if another claim has its name"},
		{name: "UNPR-13/stale", text: "The second prepare uses the allocation of the first"},
		{name: "UNPR-14/again", text: "Each repeated prepare leaves an open file"},
		{name: "UNPR-14/failed", text: "Each prepare that fails leaves a file"},
		{name: "UNPR-14/uid", text: "Each claim leaves a file named after its UID"},
		{name: "UNPR-14/descriptors", text: "Each cycle leaves an open file"},
		{name: "UNPR-14/memory", text: "Each cycle keeps 4 MiB of memory"},
		{name: "CDI-02/again", text: "After an error, the next call returns IDs without writing their spec"},
		{name: "CDI-02/ignored", text: "An error while a spec is written is ignored"},
		{name: "CDI-07/claim", text: "Two devices of one claim set the same environment variable to different values"},
		{name: "CDI-08/unreachable", text: "A start while the API server is unavailable removes the specs of all claims"},
		{name: "SHARE-06/range", text: "A policy has valid values and a valid range"},
		{name: "SHARE-06/value", text: "A valid value is larger than the capacity"},
		{name: "SHARE-09/policy", text: "The published maximum of a share is the capacity that claims have not used"},
		{name: "SHARE-09/value", text: "The published capacity is the capacity that claims have not used"},
		{name: "SHARE-11/restart", text: "After a restart, shares that were prepared before it do not count"},
		{name: "REG-03/beta", text: "GetInfo lists v1beta1.DRAPlugin, which the driver does not serve",
			implies: []string{"REG-04"}},
		{name: "REG-12/foreign", text: "The driver removes the registration sockets of other drivers when it ends"},
		{name: "REG-12/call", text: "SIGTERM during prepare leaves a record that cannot be read"},
		{name: "UPG-01/busy", text: "Prepare fails while the other instance prepares", implies: []string{"PREP-05"}},
		{name: "UPG-01/specs", text: "A new instance removes the CDI devices of prepared claims",
			implies: []string{"CDI-08", "UPG-04", "META-05"}},
		{name: "UPG-03/slices", text: "The old instance deletes the slices when it ends, and the new one creates them again"},
		{name: "UPG-04/state", text: "A new instance drops the records of the old one"},
		{name: "ATTR-03/list", text: "A value in a list of strings is too long", implies: []string{"ATTR-05"}},
		{name: "PUB-02/left", text: "A slice of an earlier release remains"},
		{name: "PUB-04/device", text: "A device sets nodeName, although its slice has one"},
		{name: "PUB-10/edit", text: "A slice that was changed is not restored"},
		{name: "PUB-10/generation", text: "A deleted slice is created again with another generation than the other slices"},
		{name: "PUB-11/foreign", text: "The slices of other nodes are deleted"},
		{name: "PUB-13/dropped", text: "The driver does not notice that the API server drops fields"},
		{name: "PUB-14/back", text: "A device that returns is not published again"},
		{name: "STAT-01/second", text: "The status of a claim with two devices has one of them"},
		{name: "STAT-02/consumers", text: "A write of the status removes the consumers of the claim"},
		{name: "HEALTH-01/used", text: "Devices in use are missing"},
		{name: "HEALTH-03/back", text: "A device that returns is still reported as unhealthy"},
		{name: "HEALTH-04/others", text: "The end of one stream ends the others"},
		{name: "META-03/device", text: "The metadata names another device", implies: []string{"META-10"}},
		{name: "PART-01/counter", text: "A device consumes a counter that its set does not have"},
		{name: "PART-01/sets", text: "A slice has nine counter sets"},
		{name: "ADMIN-01/use", text: "A claim with admin access counts as use"},
		{name: "HEALTH-05/time", text: "The times decrease from message to message"},
		{name: "LIST-01/subrequest", text: "The parameters of the subrequest are ignored"},
		{name: "LIST-01/request", text: "The parameters of the request are ignored"},
		{name: "LIST-01/other", text: "The parameters of another subrequest apply"},
		{name: "SEC-01/group", text: "The role permits writing resources of a foreign API group"},
		{name: "SEC-01/proxy", text: "The role permits reading nodes/proxy"},
		{name: "SEC-03/spec", text: "Every user can write CDI specs"},
		{name: "SEC-03/mount", text: "Containers get the directory of registration sockets"},
		{name: "SEC-03/read", text: "Every user can read the state"},
	}
}

// faults returns the faults that -faults selects: all, or the named ones.
func faults(t *testing.T) []fault {
	t.Helper()
	all := allFaults(t)
	if *only == "" {
		return all
	}
	names := strings.Split(*only, ",")
	for _, name := range names {
		if !slices.ContainsFunc(all, func(f fault) bool { return f.name == name }) {
			t.Fatalf("-faults: there is no fault %q; conformance/%s lists all", name, mutantsFile)
		}
	}
	return slices.DeleteFunc(all, func(f fault) bool { return !slices.Contains(names, f.name) })
}

// allFaults returns the musts that are tested by socket, API, or process, and their variants.
func allFaults(t *testing.T) (faults []fault) {
	t.Helper()
	all, err := Requirements()
	if err != nil {
		t.Fatal(err)
	}
	known := variants()
	for _, r := range all {
		if r.Level == Must && r.Implemented() && !needsPods(r) {
			faults = append(faults, fault{r.ID, r.ID, r.Text, r.Implies})
		}
		for _, v := range known {
			if v.id, _, _ = strings.Cut(v.name, "/"); v.id == r.ID {
				faults = append(faults, v)
			}
		}
	}
	return faults
}

// needsPods reports whether the case of a requirement starts pods, which the reference driver
// cannot run.
func needsPods(r Requirement) bool { return slices.Contains(kinds(), r.Profile) && r.Way == Kubelet }

// mutantsFile is the table that TestMutants writes.
const mutantsFile = "mutants.md"

// TestMutants runs the suite against the reference driver with each fault. The case of the
// fault must fail. With -full, all other cases run too. Of these, exactly the cases that the
// requirement or the variant lists under implies must fail. -update writes the table of what
// failed.
func TestMutants(t *testing.T) {
	var mu sync.Mutex
	rows := map[string]string{}
	t.Run("faults", func(t *testing.T) {
		for _, f := range faults(t) {
			t.Run(f.name, func(t *testing.T) {
				t.Parallel()
				c := referenceConfig(t, f.name)
				if !*full {
					c.Only = []string{f.id}
				}
				report, err := Run(t.Context(), c, nil)
				if err != nil {
					t.Fatal(err)
				}
				failed := map[string]Result{}
				var others []string
				for _, r := range report.Results() {
					if r.Status != Failed {
						continue
					}
					failed[r.Requirement.ID] = r
					if r.Requirement.ID != f.id {
						others = append(others, r.Requirement.ID)
					}
				}
				if *full {
					checkImplied(t, f.implies, failed, others)
				}
				own, caught := failed[f.id]
				if !caught {
					t.Fatal("the case passes for a driver with this fault")
				}
				readsFile := slices.Contains([]string{"SEC-01", "STAT-08", "BIND-02"}, own.Requirement.ID)
				if len(own.Calls) == 0 && !readsFile {
					t.Errorf("the report has no request and no response: %s", own.Explain())
				}
				t.Log(own.Explain())
				mu.Lock()
				defer mu.Unlock()
				rows[f.name] = mutantsRow(f, others)
			})
		}
	})
	if !*full || !*update || len(rows) != len(faults(t)) {
		return
	}
	if err := os.WriteFile(mutantsFile, mutantsTable(allFaults(t), withKnown(t, rows)), 0o600); err != nil {
		t.Fatal(err)
	}
}

// withKnown adds the rows of the table for faults that did not run.
func withKnown(t *testing.T, rows map[string]string) map[string]string {
	t.Helper()
	raw, err := os.ReadFile(mutantsFile)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if name, _, ok := strings.Cut(strings.TrimPrefix(line, "| "), " |"); ok && rows[name] == "" {
			rows[name] = line
		}
	}
	return rows
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

// TestMutants_table fails if the committed table differs from the faults: each has a row, with
// what it implies.
func TestMutants_table(t *testing.T) {
	all := allFaults(t)
	rows := map[string]string{}
	for _, f := range all {
		rows[f.name] = mutantsRow(f, f.implies)
	}
	raw, err := os.ReadFile(mutantsFile)
	if err != nil {
		t.Fatal(err)
	}
	got, want := strings.Split(string(raw), "\n"), strings.Split(string(mutantsTable(all, rows)), "\n")
	for i := range max(len(got), len(want)) {
		if i >= min(len(got), len(want)) || got[i] != want[i] {
			t.Fatalf("%s differs from the faults in line %d: run make conformance-mutants", mutantsFile, i+1)
		}
	}
}

// mutantsRow returns the row of a fault, with the other cases that failed.
func mutantsRow(f fault, others []string) string {
	text := strings.ReplaceAll(f.text, "`", "") // of Kubernetes, not of this project
	return fmt.Sprintf("| %s | %s | %s |\n", f.name, text, strings.Join(others, ", "))
}

func mutantsTable(faults []fault, rows map[string]string) []byte {
	var b bytes.Buffer
	b.WriteString(`<!-- Generated by go test -run TestMutants -full -update. -->

# Faults and the cases that find them

The reference driver ran with each fault: one for each requirement, and more, named ID/NAME, for other ways
not to meet it. The case of the requirement failed each time; the last column lists other cases that failed.

| Fault | Requirement that is not met, or what the driver does | Other cases that failed |
|---|---|---|
`)
	for _, f := range faults {
		b.WriteString(rows[f.name])
	}
	return b.Bytes()
}

// TestRun_reportsOnlyCallsOfCase fails if the report of a case has calls of the case before it.
func TestRun_reportsOnlyCallsOfCase(t *testing.T) {
	c := referenceConfig(t, "CDI-02")
	c.Only = []string{"PREP-01", "CDI-02"}
	report, err := Run(t.Context(), c, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range report.Results() {
		calls := strings.Join(r.Calls, "\n")
		if r.Requirement.ID == "CDI-02" && (calls == "" || strings.Contains(calls, "Unprepare")) {
			t.Errorf("the case calls prepare only, and the report has the calls\n%s", calls)
		}
	}
}
