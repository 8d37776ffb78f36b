// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package capability_test

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/capability"
)

// droppedVariable is set for the process in which the test drops a capability.
const droppedVariable = "CAPABILITY_DROPPED"

func TestDrop_removesCapabilityFromAllThreads(t *testing.T) {
	if os.Getenv(droppedVariable) == "" {
		runInChild(t)
		return
	}
	if has, err := capability.Has(unix.CAP_PERFMON); err != nil || !has {
		t.Skipf("Has returned %t and error %v: run the test as root", has, err)
	}
	if err := capability.Drop(unix.CAP_PERFMON); err != nil {
		t.Fatal(err)
	}
	if has, err := capability.Has(unix.CAP_PERFMON); err != nil || has {
		t.Errorf("Has after Drop returned %t and error %v, want false", has, err)
	}
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(tasks) < 2 {
		t.Fatalf("threads of this process: %v, error %v, want several", tasks, err)
	}
	for _, task := range tasks {
		for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
			if contains(t, task, set, unix.CAP_PERFMON) {
				t.Errorf("%s: %s has the dropped capability", task, set)
			}
		}
		if !contains(t, task, "CapPrm", unix.CAP_NET_ADMIN) {
			t.Errorf("%s: CapPrm lacks a capability that was not dropped", task)
		}
	}
}

// runInChild runs the test in another process, because a dropped capability is
// lost. That process is built like this one.
func runInChild(t *testing.T) {
	t.Helper()
	child := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	child.Env = append(os.Environ(), droppedVariable+"=1")
	out, err := child.CombinedOutput()
	switch {
	case err != nil:
		t.Fatalf("%v: %s", err, out)
	case strings.Contains(string(out), "--- SKIP"):
		t.Skip(string(out))
	}
}

// contains reports whether a set of a thread contains a capability.
func contains(t *testing.T, status, set string, capability int) bool {
	t.Helper()
	f, err := os.Open(status)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), ":")
		if name != set {
			continue
		}
		bits, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		return bits>>capability&1 == 1
	}
	t.Fatalf("%s has no line %s", status, set)
	return false
}
