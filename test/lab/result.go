// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// result is the result of tests, read from the output of `go test -v`.
type result struct {
	passed, failed, skipped []string
}

var resultLine = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): ([^ ]+) \(`)

// readResult reads the result of tests and subtests.
func readResult(output string) (r result) {
	for line := range strings.Lines(output) {
		match := resultLine.FindStringSubmatch(line)
		if match == nil {
			continue
		}
		switch name := match[2]; match[1] {
		case "PASS":
			r.passed = append(r.passed, name)
		case "FAIL":
			r.failed = append(r.failed, name)
		case "SKIP":
			r.skipped = append(r.skipped, name)
		}
	}
	return r
}

// leaves returns the tests of a list without subtests in any list, so each is counted once.
func (r result) leaves(tests []string) (leaves []string) {
	all := slices.Concat(r.passed, r.failed, r.skipped)
	for _, test := range tests {
		if !slices.ContainsFunc(all, func(other string) bool { return strings.HasPrefix(other, test+"/") }) {
			leaves = append(leaves, test)
		}
	}
	return leaves
}

// String describes the result for a table.
func (r result) String() string {
	passed, failed, skipped := r.leaves(r.passed), r.leaves(r.failed), r.leaves(r.skipped)
	if len(failed) > 0 {
		return fmt.Sprintf("**failed**: %s; %d passed", strings.Join(failed, ", "), len(passed))
	}
	if len(skipped) > 0 {
		return fmt.Sprintf("passed: %d, skipped: %d", len(passed), len(skipped))
	}
	return fmt.Sprintf("passed: %d", len(passed))
}

// keyTest is the test that attacks the classifier once for each key. Its subtests
// are skipped for the keys that the kernel does not have.
const keyTest = "TestRawFrames_useClassOfForgedAddressOnlyWithoutCookie/key_"

// strongestKey returns the first key that keyTest passed for, because the tests run from the strongest key to the
// weakest. It returns "" if there is none.
func (r result) strongestKey() string {
	for _, test := range r.passed {
		if key, found := strings.CutPrefix(test, keyTest); found {
			return key
		}
	}
	return ""
}
