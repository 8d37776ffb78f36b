// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package files replaces and removes files atomically: a reader sees the old or
// the new content, even after a crash. It also locks files.
package files

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
)

// TemporarySuffix ends the names of files that are being written. A process that
// was killed may leave one; the next write of the same file replaces it.
const TemporarySuffix = ".writing"

// Unfinished returns the paths of a directory's temporary files with a name prefix. It is cheaper than filepath.Glob
// for a directory with thousands of files. A directory that does not exist has none.
func Unfinished(dir, prefix string) (paths []string, err error) {
	d, err := os.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	for _, name := range names {
		if strings.HasPrefix(name, prefix) && strings.HasSuffix(name, TemporarySuffix) {
			paths = append(paths, filepath.Join(dir, name))
		}
	}
	return paths, err
}

// Options configures Replace and Rewrite.
type Options struct {
	Mode os.FileMode
	// Durable makes Replace sync the content: after a node crash, the file has the old or the new content, never only
	// part of it. It does not sync the directory, so the old content, or no file, may return.
	Durable bool
	// Check may refuse the written file before it becomes visible. Optional.
	Check func(path string) error
}

// Replace writes a file. kind names it in failpoints. Callers must not replace the
// same file concurrently.
func Replace(failpoints failpoint.Injector, kind, path string, content []byte, o Options) error {
	temporary := path + TemporarySuffix
	err := write(failpoints, kind, temporary, content, o)
	if err == nil && o.Check != nil {
		err = o.Check(temporary)
	}
	if err == nil {
		err = failpoints.Do("rename "+kind, func() error { return os.Rename(temporary, path) })
	}
	if err != nil {
		if removeErr := os.Remove(temporary); !errors.Is(removeErr, os.ErrNotExist) {
			err = errors.Join(err, removeErr)
		}
		return describe(err)
	}
	return nil
}

func write(failpoints failpoint.Injector, kind, path string, content []byte, o Options) (err error) {
	var f *os.File
	err = failpoints.Do("write "+kind, func() (err error) {
		// O_TRUNC, because a process that was killed may have left the file.
		if f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, o.Mode); err != nil {
			return err
		}
		_, err = f.Write(content)
		return err
	})
	if err == nil && o.Durable {
		err = failpoints.Do("sync "+kind, f.Sync)
	}
	if f != nil {
		err = errors.Join(err, f.Close())
	}
	return err
}

// Rewrite changes a file in place, because containers may have mounted it and would not see a replacement. It does
// nothing if the file already has the content, and calls Replace if the file does not exist. A crash may leave part
// of the content.
func Rewrite(failpoints failpoint.Injector, kind, path string, content []byte, o Options) error {
	old, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return Replace(failpoints, kind, path, content, o)
	}
	if err != nil || bytes.Equal(old, content) {
		return err
	}
	return describe(failpoints.Do("rewrite "+kind, func() error {
		f, err := os.OpenFile(path, os.O_WRONLY, o.Mode)
		if err != nil {
			return err
		}
		if err = reserveSpace(f, len(content)); err == nil {
			_, err = f.WriteAt(content, 0)
		}
		if err == nil {
			err = f.Truncate(int64(len(content)))
		}
		return errors.Join(err, f.Close())
	}))
}

// reserveSpace makes sure that the filesystem has room for size bytes of a file, so that a full one does not change
// the content. Some filesystems cannot reserve space; the write then fails instead.
func reserveSpace(f *os.File, size int) error {
	err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, int64(max(size, 1)))
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return err
	}
	return nil
}

// Remove removes a file. It succeeds if the file does not exist. After a node crash, the file may return.
func Remove(failpoints failpoint.Injector, kind, path string) error {
	err := failpoints.Do("remove "+kind, func() error { return os.Remove(path) })
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// describe adds the remedy to errors that an administrator can fix.
func describe(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w: free space or inodes on the node; nothing was changed, and the plugin retries", err)
	case errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w: the node's file system has become read-only: check the kernel log", err)
	default:
		return err
	}
}
