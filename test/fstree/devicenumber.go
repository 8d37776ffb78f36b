// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package fstree

import (
	"fmt"
	"io/fs"
	"syscall"

	"golang.org/x/sys/unix"
)

// deviceNumber returns the MAJOR:MINOR number of a device node.
func deviceNumber(info fs.FileInfo) (string, error) {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return "", fmt.Errorf("%s: the file information has no device number", info.Name())
	}
	return fmt.Sprintf("%d:%d", unix.Major(stat.Rdev), unix.Minor(stat.Rdev)), nil
}
