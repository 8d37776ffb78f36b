// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/dra-shared/dra-driver-shared/conformance"
)

// TestRequirements_quoteTheirSources compares the sentences of the requirements with the
// versions of the modules that they name. Those that the module cache lacks are skipped.
func TestRequirements_quoteTheirSources(t *testing.T) {
	all, err := conformance.Requirements()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("go", "env", "GOMODCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	compared := 0
	for _, r := range all {
		if r.Source == nil {
			continue
		}
		module := strings.Join(strings.SplitN(r.Source.File, "/", 3)[:2], "/")
		dir := filepath.Join(strings.TrimSpace(string(out)), module+"@"+r.Source.Version())
		if _, err := os.Stat(dir); err != nil {
			continue
		}
		raw, err := os.ReadFile(filepath.Join(dir, strings.TrimPrefix(r.Source.File, module)))
		if err != nil {
			t.Errorf("%s: %v", r.ID, err)
			continue
		}
		compared++
		if !strings.Contains(plain(string(raw)), plain(r.Source.Quote)) {
			t.Errorf("%s: %s %s does not contain %q", r.ID, r.Source.File, r.Source.Version(), r.Source.Quote)
		}
	}
	if compared < 70 { // sentences in k8s.io/api, kubelet, and dynamic-resource-allocation, which go.mod requires
		t.Errorf("compared %d sentences only: are the versions in go.mod those of conformance.SourceVersions?", compared)
	}
}

// plain returns text without comment marks and with single spaces.
func plain(s string) string {
	return strings.Join(strings.Fields(regexp.MustCompile(`(?m)^\s*//`).ReplaceAllString(s, "")), " ")
}
