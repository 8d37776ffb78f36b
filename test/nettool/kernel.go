// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
)

// showCookieHelper prints whether the kernel has the helper for the cookie of the sender's network namespace in
// programs of tc: "true" or "false". It asks the kernel, not the driver, so a test does not only expect what the driver
// claims.
func showCookieHelper() error {
	err := features.HaveProgramHelper(ebpf.SchedCLS, asm.FnGetNetnsCookie)
	if err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
		return fmt.Errorf("load a program of tc: %w", err)
	}
	_, err = fmt.Println(err == nil)
	return err
}
