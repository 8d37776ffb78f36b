// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// Install copies the hook to a directory of the node and returns its path. The
// file name contains a hash of the content, so that Install never overwrites a
// version that is running or that the CDI spec of a container names.
func Install(source, dir string, failpoints failpoint.Injector) (string, error) {
	content, err := os.ReadFile(source)
	if err != nil {
		return "", fmt.Errorf("read the hook: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(dir, &stat); err != nil {
		return "", fmt.Errorf("check the mount options of %s: %w", dir, err)
	}
	if stat.Flags&unix.ST_NOEXEC != 0 {
		return "", fmt.Errorf(
			"%s is mounted noexec, so that the runtime cannot run the hook: choose another directory (--hook-dir)",
			dir,
		)
	}
	path := filepath.Join(dir, fmt.Sprintf("%s%x", hookPrefix, sha256.Sum256(content))[:len(hookPrefix)+16])
	installed, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if err == nil && bytes.Equal(installed, content) {
		return path, nil
	}
	if err := files.Replace(failpoints, "hook", path, content, files.Options{Mode: 0o755, Durable: true}); err != nil {
		return "", fmt.Errorf("install the hook: %w", err)
	}
	return path, nil
}

const hookPrefix = "dra-shared-hook-"

// Hooks returns the paths of the hooks that are installed in a directory.
func Hooks(dir string) ([]string, error) {
	return filepath.Glob(filepath.Join(dir, hookPrefix+"*[0-9a-f]"))
}
