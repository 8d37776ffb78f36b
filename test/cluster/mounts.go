// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// privateMounts makes every mount of this namespace private. Later mounts then do not propagate to the machine.
func privateMounts() error {
	return mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
}

// mountSys mounts a sysfs that shows the links of this network namespace, and
// moves the cgroup hierarchies to it.
func mountSys() error {
	if err := mount("/sys/fs/cgroup", "/mnt", "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	if err := unmountBelow("/sys"); err != nil {
		return err
	}
	return errors.Join(
		mount("sysfs", "/sys", "sysfs", 0, ""),
		mount("/mnt", "/sys/fs/cgroup", "", unix.MS_MOVE, ""),
		unmountBelow("/sys/fs/cgroup/unified"), // crun refuses hierarchies of both versions
	)
}

// mountFresh mounts an empty tmpfs on each path. It unmounts what is mounted
// below first, because hidden mounts confuse the kubelet when it looks up the
// propagation of a mount.
func mountFresh(paths ...string) error {
	for _, path := range paths {
		if err := unmountBelow(path); err != nil {
			return err
		}
		if err := mount("tmpfs", path, "tmpfs", 0, "mode=755"); err != nil {
			return err
		}
	}
	return nil
}

// mountDev mounts a private copy of /dev. A test can then add device nodes to one node without changing the machine or
// other nodes.
func mountDev() error {
	const dir = "/mnt"
	if err := mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID, "mode=755"); err != nil {
		return err
	}
	if err := copyDev("/dev", dir); err != nil {
		return err
	}
	return mount(dir, "/dev", "", unix.MS_MOVE, "")
}

// copyDev recreates the device nodes, symbolic links, and directories of one
// directory in another. It bind-mounts directories of other file systems.
func copyDev(from, to string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	var top unix.Stat_t
	if err := unix.Stat(from, &top); err != nil {
		return err
	}
	for _, e := range entries {
		source, target := filepath.Join(from, e.Name()), filepath.Join(to, e.Name())
		var stat unix.Stat_t
		if err := unix.Lstat(source, &stat); err != nil {
			return err
		}
		switch stat.Mode & unix.S_IFMT {
		case unix.S_IFCHR, unix.S_IFBLK:
			if err = unix.Mknod(target, stat.Mode, int(stat.Rdev)); err == nil {
				err = unix.Chmod(target, stat.Mode&0o7777) // the umask may have removed bits
			}
		case unix.S_IFLNK:
			var link string
			if link, err = os.Readlink(source); err == nil {
				err = os.Symlink(link, target)
			}
		case unix.S_IFDIR:
			if err = os.Mkdir(target, 0o755); err == nil && stat.Dev != top.Dev {
				err = mount(source, target, "", unix.MS_BIND, "")
			} else if err == nil {
				err = copyDev(source, target)
			}
		}
		if err != nil {
			return fmt.Errorf("copy %s: %w", source, err)
		}
	}
	return nil
}

// shadowSysctls mounts regular files over the sysctls that the kubelet sets. They
// apply to the whole machine, which a test must not change.
func shadowSysctls(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, value := range map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	} {
		file := filepath.Join(dir, strings.ReplaceAll(name, "/", "_"))
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := mount(file, "/proc/sys/"+name, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	return nil
}

// unmountBelow unmounts root and everything that is mounted below it.
func unmountBelow(root string) error {
	f, err := os.Open("/proc/self/mounts")
	if err != nil {
		return err
	}
	defer f.Close()
	var targets []string
	for scan := bufio.NewScanner(f); scan.Scan(); {
		if target := strings.Fields(scan.Text())[1]; target == root || strings.HasPrefix(target, root+"/") {
			targets = append(targets, target)
		}
	}
	sort.Sort(sort.Reverse(sort.StringSlice(targets))) // children before parents
	for _, target := range targets {
		if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", target, err)
		}
	}
	return nil
}

func mount(source, target, fstype string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", source, target, err)
	}
	return nil
}
