// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package files_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

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
