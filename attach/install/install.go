// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package install installs the hook on the node.
package install

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// Installation is the hook's copy in a directory on the node.
type Installation struct {
	path       string
	content    []byte
	nodeMounts string // see checkMount
	failpoints failpoint.Injector
}

const hookPrefix = "dra-shared-hook-"

// New reads the hook and determines its path in dir. The file name contains a hash of the content, so a
// version never replaces another one, which may be running or in a container's CDI spec. nodeMounts is the path of a
// file with the node's mounts, such as its /proc/1/mountinfo; if it is empty, this process has the same mounts as the
// node.
func New(source, dir, nodeMounts string, failpoints failpoint.Injector) (*Installation, error) {
	content, err := os.ReadFile(source)
	if err != nil {
		return nil, fmt.Errorf("read the hook: %w", err)
	}
	name := fmt.Sprintf("%s%x", hookPrefix, sha256.Sum256(content))[:len(hookPrefix)+16]
	return &Installation{
		path: filepath.Join(dir, name), content: content, nodeMounts: nodeMounts, failpoints: failpoints,
	}, nil
}

// Path returns the path of the installed hook.
func (i *Installation) Path() string { return i.path }

// Install copies the hook to its path if the file does not exist or differs. It reports whether it
// has copied it.
func (i *Installation) Install() (installed bool, err error) {
	dir := filepath.Dir(i.path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return false, fmt.Errorf("%w%s", err, remedyOf(err))
	}
	if err := checkMount(dir, i.nodeMounts); err != nil {
		return false, err
	}
	present, err := os.ReadFile(i.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	if err == nil && bytes.Equal(present, i.content) && i.Check() == nil {
		return false, nil
	}
	options := files.Options{Mode: 0o755, Durable: true}
	if err := files.Replace(i.failpoints, "hook", i.path, i.content, options); err != nil {
		return false, fmt.Errorf("install the hook: %w%s", err, remedyOf(err))
	}
	return true, i.Check()
}

// remedyOf returns the remedy for a failed write to the hook's directory, to be appended to the
// error; "" if none is known.
func remedyOf(err error) string {
	if errors.Is(err, unix.EROFS) || errors.Is(err, fs.ErrPermission) {
		return ": choose a directory that the plugin may write to (--hook-dir, plugin.hookDir in the chart's values)"
	}
	return ""
}

// Check returns an error if the hook is not at its path, or if its permissions or mount options prevent the runtime
// from running it. It does not read the content.
func (i *Installation) Check() error {
	info, err := os.Stat(i.path)
	if err != nil {
		return fmt.Errorf("the hook is missing: %w", err)
	}
	if info.Mode().Perm()&0o111 == 0 || info.Size() != int64(len(i.content)) {
		return fmt.Errorf("another program changed the hook %s: mode %s, %d bytes, want %d", i.path, info.Mode(),
			info.Size(), len(i.content))
	}
	return checkMount(filepath.Dir(i.path), i.nodeMounts)
}

// tryTimeout limits one run of the hook.
const tryTimeout = 10 * time.Second

// Try runs the installed hook with attach.TryFlag, which makes it do nothing. It fails if the kernel or a security
// module forbids this process to execute files in the directory. It cannot detect a rule that applies only to the
// runtime, which has a different security context.
func (i *Installation) Try(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	if out, err := exec.CommandContext(ctx, i.path, "-"+attach.TryFlag).CombinedOutput(); err != nil {
		return fmt.Errorf("run the installed hook: %w %s: may files of this directory be executed on the node? "+
			"Otherwise choose another (--hook-dir, plugin.hookDir in the chart's values)", err, bytes.TrimSpace(out))
	}
	return nil
}

// Hooks returns the paths of the hooks that are installed in a directory.
func Hooks(dir string) ([]string, error) {
	return filepath.Glob(filepath.Join(dir, hookPrefix+"*[0-9a-f]"))
}
