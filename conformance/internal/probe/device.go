// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// deviceNumber returns the type and the numbers of a device node.
func deviceNumber(path string) (string, error) {
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil {
		return "", fmt.Errorf("device node %s: %w", path, err)
	}
	kind := "c"
	if stat.Mode&unix.S_IFMT == unix.S_IFBLK {
		kind = "b"
	}
	return fmt.Sprintf("%s:%d:%d", kind, unix.Major(stat.Rdev), unix.Minor(stat.Rdev)), nil
}

// refused returns an error unless the kernel refuses to open a new device node of each
// number, or to create it. A container that may not use a device can still have the
// capability to create its node.
func refused(numbers []string) error {
	dir, err := os.MkdirTemp("/dev", "devices") // device nodes can be used on this file system
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }() // the container ends
	var errs []error
	for i, number := range numbers {
		errs = append(errs, openNew(filepath.Join(dir, fmt.Sprint(i)), number))
	}
	return errors.Join(errs...)
}

// openNew returns an error if it can create and open a device node.
func openNew(path, number string) error {
	var major, minor uint32
	kind, numbers, _ := strings.Cut(number, ":")
	if _, err := fmt.Sscanf(numbers, "%d:%d", &major, &minor); err != nil {
		return fmt.Errorf("device number %q: %w", number, err)
	}
	mode := uint32(unix.S_IFCHR)
	if kind == "b" {
		mode = unix.S_IFBLK
	}
	err := unix.Mknod(path, mode|0o600, int(unix.Mkdev(major, minor)))
	if errors.Is(err, syscall.EPERM) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("create a node of device %s: %w", number, err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES):
		return nil
	case err != nil: // the driver of the device answered: the container may use it
		return fmt.Errorf("open a node of device %s: %w: the container may use the device", number, err)
	}
	return errors.Join(fmt.Errorf("the container can open device %s", number), f.Close())
}
