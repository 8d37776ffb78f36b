// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package bpffs checks for and mounts the BPF file system that the classifier pins its maps in.
package bpffs

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ErrNotMounted is wrapped by the error of Check for a directory that is not the
// mount point of a BPF file system.
var ErrNotMounted = errors.New("no BPF file system is mounted")

// Check returns an error if dir is not in a BPF file system.
func Check(dir string) error {
	var stat unix.Statfs_t
	if err := unix.Statfs(dir, &stat); err != nil {
		return fmt.Errorf("find the type of the file system at %s: %w", dir, err)
	}
	if stat.Type != unix.BPF_FS_MAGIC {
		return fmt.Errorf("%w on %s: the file system there has type %#x", ErrNotMounted, dir, stat.Type)
	}
	return nil
}

// Mount mounts a BPF file system on dir, unless dir is in one. It reports
// whether it mounted one.
func Mount(dir string) (mounted bool, err error) {
	if err := Check(dir); !errors.Is(err, ErrNotMounted) {
		return false, err
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("bpf", dir, "bpf", flags, "mode=700"); err != nil {
		return false, fmt.Errorf("mount a BPF file system on %s: %w", dir, err)
	}
	return true, nil
}
