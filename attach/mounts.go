// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// checkMount returns an error if the kernel refuses to execute files in dir, here or, if nodeMounts
// is not empty, on the node. nodeMounts is a file in the format of /proc/PID/mountinfo. The mount
// of the node must be checked separately, because container runtimes mount a directory of the node
// into a container without the option noexec.
func checkMount(dir, nodeMounts string) error {
	var stat unix.Statfs_t
	if err := unix.Statfs(dir, &stat); err != nil {
		return fmt.Errorf("check the mount options of %s: %w", dir, err)
	}
	mountPoint := dir
	if stat.Flags&unix.ST_NOEXEC == 0 {
		if nodeMounts == "" {
			return nil
		}
		mount, err := mountOf(nodeMounts, dir)
		if err != nil {
			return fmt.Errorf("check the mount options of %s on the node: %w", dir, err)
		}
		if mount == nil || !slices.Contains(strings.Split(mount.Options, ","), "noexec") {
			return nil
		}
		mountPoint = mount.Mountpoint
	}
	return fmt.Errorf("the hook's directory %s: %s is mounted noexec, so that the runtime cannot run the hook: "+
		"choose another directory (--hook-dir, plugin.hookDir in the chart's values)", dir, mountPoint)
}

// mountOf returns the mount that a directory is on, or nil if none of the file's mounts
// contains it.
func mountOf(nodeMounts, dir string) (found *mountinfo.Info, err error) {
	file, err := os.Open(nodeMounts)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	mounts, err := mountinfo.GetMountsFromReader(file, mountinfo.ParentsFilter(dir))
	if err != nil {
		return nil, err
	}
	for _, m := range mounts { // a later mount covers an earlier one on the same directory
		if found == nil || len(m.Mountpoint) >= len(found.Mountpoint) {
			found = m
		}
	}
	return found, nil
}
