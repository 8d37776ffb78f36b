// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// maxReruns is how many tests may fail for them to run once more, as in .ci/gotest.sh.
const maxReruns = 5

// attempt runs the tests with names that match a regular expression, and returns their result and exit status. It
// returns an error if the tests could not run to their end.
type attempt func(ctx context.Context, pattern string) (result, int, error)

// withRerun runs tests. If RERUNS names a directory, as in `make test`, up to five tests that fail run
// once more, and a file in the directory receives the names of those that then pass. The name that the
// pattern selects is the element of a test's name at a level: 0 for tests, and 1 for stories, which are
// subtests.
func withRerun(ctx context.Context, pattern string, level int, run attempt) (result, int, error) {
	first, status, err := run(ctx, pattern)
	failed := first.failedAt(level)
	directory := os.Getenv("RERUNS")
	if directory == "" || err != nil || len(failed) == 0 || len(failed) > maxReruns {
		return first, status, err
	}
	fmt.Println("lab: again:", strings.Join(failed, ", "))
	quoted := make([]string, len(failed))
	for i, name := range failed {
		quoted[i] = regexp.QuoteMeta(name)
	}
	second, status, err := run(ctx, "^("+strings.Join(quoted, "|")+")$")
	if err != nil || status != 0 {
		return first, status, err
	}
	flaky := ""
	for _, name := range failed {
		flaky += "test/lab." + name + ": 2 runs, 1 failures\n"
	}
	return first.after(second), 0, os.WriteFile(filepath.Join(directory, "lab-"+failed[0]), []byte(flaky), 0o644)
}

// failedAt returns the elements at a level of the names of failed tests.
func (r result) failedAt(level int) (names []string) {
	for _, test := range r.failed {
		if elements := strings.Split(test, "/"); len(elements) > level {
			names = append(names, elements[level])
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// after returns the result if the failed tests passed in another run.
func (r result) after(rerun result) result {
	r.failed = nil
	for _, test := range rerun.passed {
		if !slices.Contains(r.passed, test) {
			r.passed = append(r.passed, test)
		}
	}
	return r
}
