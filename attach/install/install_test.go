// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestInstallation_Install_keepsPreviousHook(t *testing.T) {
	dir, source := t.TempDir(), filepath.Join(t.TempDir(), "hook")
	var paths []string
	for _, content := range []string{"old", "new", "new"} {
		if err := os.WriteFile(source, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		installation, err := New(source, dir, "", nil)
		if err == nil {
			_, err = installation.Install()
		}
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, installation.Path())
	}
	for _, other := range []string{"another-program", filepath.Base(paths[0]) + ".writing"} {
		if err := os.WriteFile(filepath.Join(dir, other), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	installed, err := Hooks(dir)
	if err != nil || len(installed) != 2 || paths[1] != paths[2] || !slices.Contains(installed, paths[0]) ||
		!slices.Contains(installed, paths[1]) {
		t.Errorf("installed %v, %v; want %v", installed, err, paths[:2])
	}
}

// A hook that another program removed or changed is found, and installed again.
func TestInstallation_Check(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"removed":        os.Remove,
		"directory gone": func(path string) error { return os.RemoveAll(filepath.Dir(path)) },
		"not executable": func(path string) error { return os.Chmod(path, 0o600) },
		"truncated":      func(path string) error { return os.Truncate(path, 3) },
	} {
		t.Run(name, func(t *testing.T) {
			source := filepath.Join(t.TempDir(), "hook")
			if err := os.WriteFile(source, []byte("#!/bin/sh\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			installation, err := New(source, filepath.Join(t.TempDir(), "hooks"), "", nil)
			if err != nil {
				t.Fatal(err)
			}
			if installation.Check() == nil {
				t.Error("Check before Install: nil, want an error")
			}
			for range 2 {
				if installed, err := installation.Install(); err != nil || !installed {
					t.Fatalf("Install: %t, %v, want true", installed, err)
				}
				if installed, err := installation.Install(); err != nil || installed {
					t.Fatalf("Install again: %t, %v, want false", installed, err)
				}
				if err := errors.Join(installation.Check(), installation.Try(t.Context())); err != nil {
					t.Fatal(err)
				}
				if err := damage(installation.Path()); err != nil {
					t.Fatal(err)
				}
				if installation.Check() == nil {
					t.Error("Check: nil, want an error")
				}
			}
		})
	}
}
