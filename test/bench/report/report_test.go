// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	plugin = "BenchmarkPlugin/shares=10/parallel=1-2 3 1 ns/op"
	rest   = "attach-p50-µs 900 attach-p99-µs 2000 hook-p50-µs 2100 hook-p99-µs 1000 prepare-p50-µs 1100 prepare-p99-µs"
)

var input = strings.NewReplacer("PLUGIN", plugin, "REST", rest).Replace(`goos: linux
BenchmarkKernel/shares=10/parallel=1-2 3 1 ns/op 200 start-p50-µs 400 start-p99-µs 9000 end-p50-µs 12000 end-p99-µs
PLUGIN 300 REST
PLUGIN 100 REST
PLUGIN 250 REST
BenchmarkCNI/shares=10/parallel=1-2 3 1 ns/op 12000 start-p50-µs 24000 start-p99-µs
BenchmarkTraffic/limiter=driver/limit=100M-2 1 1 ns/op 0.5 send-error-% 850 neighbor-p99-µs 97 one-to-eight-flows-%
`)

func TestRun(t *testing.T) {
	directory := t.TempDir()
	var out strings.Builder
	if err := run(strings.NewReader(input), &out, []string{"write", directory}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| 10 | 1 | 0.2 (0.4) | 0.25 (0.9) | 2 (2.1) | 1 (1.1) | 12 (24) | 1.25 | 0.25 |\n", // the median of three runs
		"| 10 | 1 | 9 (12) | - | - | - | - |\n",                                             // no results
		"at most 3.6 times its median.\n",
		"| this driver | +0.5 % | - | - | - | 850 µs | 97 % |\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the report lacks %q:\n%s", want, out.String())
		}
	}
	raw, err := os.ReadFile(filepath.Join(directory, "start-1.svg"))
	if err != nil || !strings.Contains(string(raw), "CNI ADD") {
		t.Errorf("plot of starts: got error %v and no label CNI ADD", err)
	}
}

func TestRun_withoutResults(t *testing.T) {
	if err := run(strings.NewReader("FAIL\n"), &strings.Builder{}, []string{"write", t.TempDir()}); err == nil {
		t.Error("report without results: got no error")
	}
}

func TestRun_check(t *testing.T) {
	const kernel = "BenchmarkKernel/shares=10/parallel=1-2 3 1 ns/op 200 start-p50-µs\n"
	for _, tc := range []struct{ name, results, wantErr string }{
		{"as the baseline", input, ""},
		{"a slower machine", "BenchmarkKernel/shares=10/parallel=1-2 3 1 ns/op 2000 start-p50-µs\n" +
			"BenchmarkPlugin/shares=10/parallel=1-2 3 1 ns/op 7400 attach-p50-µs\n", ""},
		{"within the bound", kernel + "BenchmarkPlugin/shares=10/parallel=1-2 3 1 ns/op 740 attach-p50-µs\n", ""},
		{"outside the bound", kernel + "BenchmarkPlugin/shares=10/parallel=1-2 3 1 ns/op 760 attach-p50-µs\n",
			"attach takes 3.80 times the kernel's part, more than 3 times the 1.25"},
		{"a slower hook", kernel + "BenchmarkPlugin/shares=10/parallel=1-2 3 1 ns/op 9000 hook-p50-µs\n",
			"hook takes 45.00 times"},
		{"another situation", strings.ReplaceAll(input, "parallel=1-2", "parallel=8-2"), "no results of both"},
		{"no results of the kernel", "BenchmarkPlugin/shares=10/parallel=1-2 3 1 ns/op 740 attach-p50-µs\n",
			"no results of both"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			baseline := filepath.Join(t.TempDir(), "bench.txt")
			if err := os.WriteFile(baseline, []byte(input), 0o600); err != nil {
				t.Fatal(err)
			}
			err := run(strings.NewReader(tc.results), &strings.Builder{}, []string{"check", baseline})
			if tc.wantErr == "" && err != nil || tc.wantErr != "" && (err == nil || !strings.Contains(err.Error(), tc.wantErr)) {
				t.Errorf("check returned %v, want an error with %q", err, tc.wantErr)
			}
		})
	}
}
