// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/internal/capability"
)

// dropPerfmon drops CAP_PERFMON, which lets a process load programs that read kernel memory. The plugin needs it only
// to load the classifier, and not on every kernel.
func dropPerfmon(ctx context.Context) {
	logger := klog.FromContext(ctx)
	if err := capability.Drop(unix.CAP_PERFMON); err != nil {
		logger.Error(err, "Failed to drop CAP_PERFMON; continuing with the capability")
		return
	}
	logger.V(2).Info("Dropped CAP_PERFMON")
}
