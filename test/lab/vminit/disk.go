// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package vminit

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// bootDisk replaces this process by the init program of the root disk. It returns
// only if that fails.
func bootDisk(job Job) error {
	const root = "/newroot"
	if err := mountAll([]mount{{"proc", "/proc", "proc", ""}, {"sysfs", "/sys", "sysfs", ""}}); err != nil {
		return err
	}
	if err := runAll(modprobe(job.Modules)); err != nil {
		return err
	}
	err := eventually.Poll(context.Background(), 20*time.Second, func() error {
		_, err := os.Stat(job.RootDisk)
		return err
	})
	if err != nil {
		return fmt.Errorf("wait for the root disk: %w", err)
	}
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(job.RootDisk, root, "ext4", unix.MS_NOATIME, ""); err != nil {
		return fmt.Errorf("mount %s: %w", job.RootDisk, err)
	}
	// Debian's /lib is a link to usr/lib.
	for source, target := range map[string]string{"/lib/modules": root + "/usr/lib/modules", OverlayDir: root} {
		if err := copyTree(source, target); err != nil {
			return fmt.Errorf("copy %s to the root disk: %w", source, err)
		}
	}
	for _, dir := range []string{"/proc", "/sys", "/dev"} {
		if err := unix.Mount(dir, root+dir, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", dir, err)
		}
	}
	if job.Labels {
		if err := labelAdded(root); err != nil {
			return err
		}
	}
	argv := []string{"/bin/busybox", "switch_root", root, "/sbin/init"}
	return fmt.Errorf("run %v: %w", argv, unix.Exec(argv[0], argv, os.Environ()))
}

// labelAdded gives the files that were added to the root disk their SELinux labels. The kernel allows that because it
// does not have a policy yet. The root disk has /proc, which setfiles needs.
func labelAdded(root string) error {
	entries, err := os.ReadDir(OverlayDir)
	if err != nil {
		return err
	}
	argv := []string{"/sbin/setfiles", "-F", "/etc/selinux/default/contexts/files/file_contexts", "/usr/lib/modules"}
	for _, entry := range entries {
		argv = append(argv, "/"+entry.Name())
	}
	setfiles := exec.Command(argv[0], argv[1:]...)
	setfiles.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	setfiles.Dir = "/"
	setfiles.Stdin = strings.NewReader("") // /dev/null is in the new root only
	if out, err := setfiles.CombinedOutput(); err != nil {
		return fmt.Errorf("label the files: %s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// copyTree copies the files of a tree into another one, which may already contain files.
func copyTree(source, target string) error {
	return filepath.WalkDir(source, func(file string, entry os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(source, file)
		if err != nil {
			return err
		}
		copied := filepath.Join(target, relative)
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return os.MkdirAll(copied, info.Mode().Perm())
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		return os.WriteFile(copied, raw, info.Mode().Perm())
	})
}
