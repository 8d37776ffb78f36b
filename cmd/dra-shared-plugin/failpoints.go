// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !crash

package main

import "github.com/dra-shared/dra-driver-shared/internal/failpoint"

// newFailpoints returns no injector. With the build tag crash, the plugin ends at
// the failpoint that a test selects.
func newFailpoints(string) failpoint.Injector { return nil }
