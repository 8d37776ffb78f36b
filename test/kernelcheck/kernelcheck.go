// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package kernelcheck keeps tests from skipping what they should test. The tests of package netdev and its subpackages
// skip what the kernel does not permit, so a defect that keeps the driver from using a kernel feature would look like a
// kernel without the feature. The lab knows the kernels that it boots: it lists the checks that must pass in an
// environment variable, and a test that needs such a check then fails where it would skip.
package kernelcheck

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// Variable is the environment variable with the checks that must pass, separated by spaces.
const Variable = "KERNEL_CHECKS"

// The checks. The metric dra_shared_kernel_check has the same names.
const (
	NetnsCookieOfSocket = "NetnsCookieOfSocket"
	ForwardedByRoute    = "ForwardedByRoute"
	ARPSender           = "ARPSender"
	SenderLists         = "SenderLists"
	TCX                 = "TCX"
)

// Expected returns the checks in Variable.
func Expected() []string { return strings.Fields(os.Getenv(Variable)) }

// Skip skips a test that needs a check, which did not pass for the reason. It fails the test if Variable
// has the check.
func Skip(t testing.TB, check string, reason any) {
	t.Helper()
	if slices.Contains(Expected(), check) {
		t.Fatalf("check %s of the kernel did not pass, and %s lists it: %v", check, Variable, reason)
	}
	t.Skipf("check %s of the kernel did not pass: %v", check, reason)
}
