// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/test/kernelcheck"
)

// confidentiality is the argument that makes a kernel refuse programs that read its memory.
const confidentiality = "lockdown=confidentiality"

// expectedChecks returns the checks that a kernel of Debian passes for a process with all capabilities. A
// kernel that fails one of them shows a defect of the driver, or a change of the kernel that users must know.
func expectedChecks(release string, arguments []string) (checks []string) {
	if !slices.Contains(arguments, confidentiality) {
		checks = append(checks, kernelcheck.NetnsCookieOfSocket, kernelcheck.ForwardedByRoute, kernelcheck.ARPSender,
			kernelcheck.SenderLists)
	}
	if hasTCX(release) {
		checks = append(checks, kernelcheck.TCX)
	}
	return checks
}

// hasTCX reports whether the kernel of a release such as 6.12.117+deb12-cloud-amd64 has TCX, which is part of Linux
// 6.6.
func hasTCX(release string) bool {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return false
	}
	return major > 6 || major == 6 && minor >= 6
}

// checkKey returns an error if the strongest key that withstood the tests' attacks is weaker than the kernel permits.
func checkKey(key, release string, arguments []string) error {
	want := classify.KeyMAC
	if slices.Contains(expectedChecks(release, arguments), kernelcheck.NetnsCookieOfSocket) {
		want = classify.KeySocketCookie
	}
	keys := classify.Keys() // the strongest first
	if i := slices.Index(keys, classify.Key(key)); i < 0 || i > slices.Index(keys, want) {
		return fmt.Errorf("the attacks were held for no key or only for a weaker one than %s: %q", want, key)
	}
	return nil
}
