// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"testing"
	"time"
)

const passedOutput = `=== RUN   TestA
--- PASS: TestA (0.01s)
=== RUN   TestRawFrames_useClassOfForgedAddressOnlyWithoutCookie
--- PASS: TestRawFrames_useClassOfForgedAddressOnlyWithoutCookie (4.00s)
    --- SKIP: TestRawFrames_useClassOfForgedAddressOnlyWithoutCookie/key_NetnsCookie (0.00s)
    --- PASS: TestRawFrames_useClassOfForgedAddressOnlyWithoutCookie/key_NetnsCookieOfSocket (2.00s)
    --- PASS: TestRawFrames_useClassOfForgedAddressOnlyWithoutCookie/key_MAC (2.00s)
PASS
`

const failedOutput = `--- FAIL: TestB (0.01s)
    --- FAIL: TestB/x (0.00s)
    --- PASS: TestB/y (0.00s)
--- PASS: TestC (0.01s)
`

func TestDescribe(t *testing.T) {
	for _, tc := range []struct {
		name, output string
		status       int
		err          error
		want         string
	}{
		{"passed", passedOutput, 0, nil, "passed: 3, skipped: 1 in 2 s"},
		{"failed", failedOutput, 1, nil, "**failed**: TestB/x; 2 passed in 2 s"},
		{"ended early", "--- PASS: TestC (0.01s)\npanic: timeout\n", 2, nil,
			"**failed**: the tests ended early; passed: 1 in 2 s"},
		{"guest ended", "", 1, errors.New("guest ended\nlast messages"), "**failed**: guest ended; passed: 0 in 2 s"},
	} {
		if got := describe(readResult(tc.output), tc.status, tc.err, 2*time.Second); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestStrongestKey(t *testing.T) {
	if got, want := readResult(passedOutput).strongestKey(), "NetnsCookieOfSocket"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := readResult(failedOutput).strongestKey(); got != "" {
		t.Errorf("without the test of keys: got %q, want none", got)
	}
}
