// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestWithRerun(t *testing.T) {
	for _, tc := range []struct {
		name         string
		level        int
		rerun        bool
		outputs      []string // of each run; a run passes if no line of it is a failure
		wantPatterns []string
		want         string
		wantFlaky    string
	}{
		{
			name: "all pass", rerun: true, outputs: []string{passedOutput},
			wantPatterns: []string{"."}, want: "passed: 3, skipped: 1",
		},
		{
			name: "a test passes when it runs again", rerun: true,
			outputs: []string{
				failedOutput, "--- PASS: TestB (0.01s)\n    --- PASS: TestB/x (0.00s)\n    --- PASS: TestB/y (0.00s)\n",
			},
			wantPatterns: []string{".", "^(TestB)$"}, want: "passed: 3", wantFlaky: "test/lab.TestB: 2 runs, 1 failures\n",
		},
		{
			name: "a story passes when it runs again", rerun: true, level: 1,
			outputs:      []string{failedOutput, "--- PASS: TestB (0.01s)\n    --- PASS: TestB/x (0.00s)\n"},
			wantPatterns: []string{".", "^(x)$"}, want: "passed: 3", wantFlaky: "test/lab.x: 2 runs, 1 failures\n",
		},
		{
			name: "a test fails twice", rerun: true, outputs: []string{failedOutput, failedOutput},
			wantPatterns: []string{".", "^(TestB)$"}, want: "**failed**: TestB/x; 2 passed",
		},
		{
			name: "too many tests fail", rerun: true,
			outputs: []string{strings.Join([]string{
				"--- FAIL: T1 (0.01s)", "--- FAIL: T2 (0.01s)", "--- FAIL: T3 (0.01s)", "--- FAIL: T4 (0.01s)",
				"--- FAIL: T5 (0.01s)", "--- FAIL: T6 (0.01s)", "",
			}, "\n")},
			wantPatterns: []string{"."}, want: "**failed**: T1, T2, T3, T4, T5, T6; 0 passed",
		},
		{
			name: "outside of make test", outputs: []string{failedOutput},
			wantPatterns: []string{"."}, want: "**failed**: TestB/x; 2 passed",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			directory := ""
			if tc.rerun {
				directory = t.TempDir()
			}
			t.Setenv("RERUNS", directory)
			var patterns []string
			run := func(_ context.Context, pattern string) (result, int, error) {
				r := readResult(tc.outputs[len(patterns)])
				patterns = append(patterns, pattern)
				return r, min(len(r.failed), 1), nil
			}
			got, status, err := withRerun(t.Context(), ".", tc.level, run)
			if err != nil || got.String() != tc.want || (status == 0) != (len(got.failed) == 0) {
				t.Errorf("got %q, status %d, error %v, want %q", got, status, err, tc.want)
			}
			if !slices.Equal(patterns, tc.wantPatterns) {
				t.Errorf("patterns: got %q, want %q", patterns, tc.wantPatterns)
			}
			files, err := filepath.Glob(filepath.Join(directory, "lab-*"))
			if err != nil {
				t.Fatal(err)
			}
			flaky := ""
			for _, file := range files {
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				flaky += string(text)
			}
			if flaky != tc.wantFlaky {
				t.Errorf("flaky tests: got %q, want %q", flaky, tc.wantFlaky)
			}
		})
	}
}
