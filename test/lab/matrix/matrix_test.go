// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestUpdate(t *testing.T) {
	const other = "# Tested versions\n\n## Kubernetes\n\n| version |\n| --- |\n| v1.37.1 |\n"
	old := Row{Kernel: "6.1.0-1", Date: "2026-01-01", Key: "MAC", Tests: "passed: 3 in 5 s", Stories: "passed: 2 in 9 s"}
	lockdown := Row{Kernel: "6.1.0-1", Arguments: "lockdown=confidentiality", Date: "2026-01-01", Tests: Failed("TestA")}
	flavor := Row{Kernel: "6.1.0-1-cloud", Date: "2026-01-01", Tests: "passed: 3 in 6 s"}
	text := update(update(update(other, old), lockdown), flavor)
	again := Row{Kernel: "6.1.0-1", Date: "2026-02-02", Stories: Failed("TestB")}
	text = update(text, again)

	before, section, _ := strings.Cut(text, heading)
	if before != other+"\n" {
		t.Errorf("other sections: got %q, want %q", before, other+"\n")
	}
	var rows []Row
	for line := range strings.Lines(section) {
		if row, ok := parse(line); ok {
			rows = append(rows, row)
		}
	}
	merged := Row{Kernel: "6.1.0-1", Date: "2026-02-02", Key: "MAC", Tests: "passed: 3 in 5 s", Stories: Failed("TestB")}
	if diff := cmp.Diff([]Row{merged, lockdown, flavor}, rows); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
	if old.Failed() || !lockdown.Failed() || !merged.Failed() {
		t.Errorf("failed: got %t, %t, %t, want false, true, true", old.Failed(), lockdown.Failed(), merged.Failed())
	}
}
