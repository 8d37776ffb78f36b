// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package files_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/files"
)

func TestUnfinished(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"own_a.json", "own_a.json.writing", "own_b.json.writing", "other_a.json.writing"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for prefix, want := range map[string][]string{
		"own_": {"own_a.json.writing", "own_b.json.writing"},
		"":     {"other_a.json.writing", "own_a.json.writing", "own_b.json.writing"},
		"no_":  nil,
	} {
		var paths []string
		for _, name := range want {
			paths = append(paths, filepath.Join(dir, name))
		}
		got, err := files.Unfinished(dir, prefix)
		if slices.Sort(got); err != nil || !slices.Equal(got, paths) {
			t.Errorf("prefix %q: got %v and error %v, want %v", prefix, got, err, paths)
		}
	}
	if got, err := files.Unfinished(filepath.Join(dir, "missing"), ""); err != nil || len(got) > 0 {
		t.Errorf("missing directory: got %v and error %v, want neither", got, err)
	}
}

// Containers have mounted the file, so a full file system must not leave half of the new content in it.
func TestRewrite_keepsContentOnFullFileSystem(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("cannot mount a file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(dir, "a")
	old := bytes.Repeat([]byte("o"), 4096)
	if err := os.WriteFile(path, old, 0o600); err != nil {
		t.Fatal(err)
	}
	err := files.Rewrite(nil, "file", path, bytes.Repeat([]byte("n"), 128<<10), files.Options{Mode: 0o600})
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("Rewrite returned %v, want ENOSPC", err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, old) {
		t.Errorf("the file has %d bytes that begin with %q (error %v), want the old content", len(got), got[:1], err)
	}
	if err := files.Rewrite(nil, "file", path, []byte("new"), files.Options{Mode: 0o600}); err != nil {
		t.Error(err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "new" {
		t.Errorf("the file has the content %q, error %v", got, err)
	}
}
