// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// ownMounts has the mounts of this process.
const ownMounts = "/proc/self/mountinfo"

// checkMount returns an error if the kernel refuses to execute files in dir, here or, if nodeMounts is not empty, on
// the node. nodeMounts is a file in the format of /proc/PID/mountinfo. The node's mount must be checked separately,
// because container runtimes mount a node directory into a container without the option noexec.
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
		mount, err := nodeMountOf(nodeMounts, dir)
		if err != nil {
			return fmt.Errorf("check the mount options of %s on the node: %w", dir, err)
		}
		if mount == nil || !isNoexec(mount) {
			return nil
		}
		mountPoint = mount.Mountpoint
	}
	return fmt.Errorf("the hook's directory %s: %s is mounted noexec, so that the runtime cannot run the hook: "+
		"choose another directory (--hook-dir, plugin.hookDir in the chart's values)", dir, mountPoint)
}

func isNoexec(m *mountinfo.Info) bool {
	return slices.Contains(strings.Split(m.Options, ","), "noexec")
}

// nodeMountOf returns the node's mount that a directory is on, or nil if none of the file's mounts contains it. On
// the node, the directory's path may contain symbolic links, which this process cannot read: the runtime resolved
// them before it mounted the directory here. So the directory's filesystem and its path there decide: they are the
// same for all processes.
func nodeMountOf(nodeMounts, dir string) (*mountinfo.Info, error) {
	p, err := mountLocationOf(dir)
	if err != nil {
		return nil, err
	}
	mounts, err := readMounts(nodeMounts, func(m *mountinfo.Info) bool {
		return contains(m.Mountpoint, dir) || p.pathBelow(m) != ""
	})
	if err != nil {
		return nil, err
	}
	byPath := topmost(mounts, dir)
	if byPath != nil && p.pathBelow(byPath) == dir {
		return byPath, nil // without symbolic links
	}
	if found := p.mountAmong(mounts); found != nil {
		return found, nil
	}
	return byPath, nil
}

// mountLocation is a directory: a device number, and the path on that device's filesystem.
type mountLocation struct {
	major, minor int
	path         string
}

// mountLocationOf returns a directory's location; the zero value if this process's mounts do not have it.
func mountLocationOf(dir string) (mountLocation, error) {
	resolved, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return mountLocation{}, err
	}
	mounts, err := readMounts(ownMounts, func(m *mountinfo.Info) bool { return contains(m.Mountpoint, resolved) })
	if err != nil {
		return mountLocation{}, err
	}
	own := topmost(mounts, resolved)
	if own == nil {
		return mountLocation{}, nil
	}
	return mountLocation{own.Major, own.Minor, rebase(resolved, own.Mountpoint, own.Root)}, nil
}

// pathBelow returns the path of p below the mount point of m; "" if m does not contain p.
func (p mountLocation) pathBelow(m *mountinfo.Info) string {
	if m.Major != p.major || m.Minor != p.minor || !contains(m.Root, p.path) {
		return ""
	}
	return rebase(p.path, m.Root, m.Mountpoint)
}

// mountAmong returns the mount that has p, or nil if none has it. If the node has p at several paths, one that allows
// executing files wins: with a wrong error, the plugin would never serve.
func (p mountLocation) mountAmong(mounts []*mountinfo.Info) (found *mountinfo.Info) {
	for _, m := range mounts {
		path := p.pathBelow(m)
		if path != "" && topmost(mounts, path) == m && (found == nil || isNoexec(found)) {
			found = m
		}
	}
	return found
}

// contains reports whether path is dir, or below it.
func contains(dir, path string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// rebase returns what path, which is below the directory from, is below the directory to.
func rebase(path, from, to string) string { return filepath.Join(to, strings.TrimPrefix(path, from)) }

// topmost returns the mount that has a path; nil if none of the mounts contains it.
func topmost(mounts []*mountinfo.Info, path string) (found *mountinfo.Info) {
	for _, m := range mounts { // a later mount covers an earlier one on the same directory
		if contains(m.Mountpoint, path) && (found == nil || len(m.Mountpoint) >= len(found.Mountpoint)) {
			found = m
		}
	}
	return found
}

// readMounts reads the selected mounts of a file in the format of /proc/PID/mountinfo.
func readMounts(path string, selected func(*mountinfo.Info) bool) ([]*mountinfo.Info, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return mountinfo.GetMountsFromReader(file, func(m *mountinfo.Info) (skip, stop bool) { return !selected(m), false })
}
