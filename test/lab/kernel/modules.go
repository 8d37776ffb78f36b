// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Module is a kernel module file, decompressed.
type Module struct {
	// Name is the module's name with underscores, as /proc/modules prints it.
	Name string
	// Path is relative to ModuleDir and ends with ".ko".
	Path string
	Data []byte
}

// Modules returns the modules with names that match one of the patterns (see path.Match), and the modules that they
// need. A module follows the modules that it needs. A pattern without a match is not an error: kernels differ in what
// they build in and what they lack.
func (k Kernel) Modules(ctx context.Context, patterns []string) ([]Module, error) {
	raw, err := os.ReadFile(filepath.Join(k.ModuleDir(), "modules.dep"))
	if err != nil {
		return nil, err
	}
	files, err := resolve(string(raw), patterns)
	if err != nil {
		return nil, err
	}
	modules := make([]Module, 0, len(files))
	for _, file := range files {
		data, err := decompress(ctx, filepath.Join(k.ModuleDir(), file))
		if err != nil {
			return nil, fmt.Errorf("read module %s: %w", file, err)
		}
		modules = append(modules, Module{Name: moduleName(file), Path: strings.TrimSuffix(file, ".xz"), Data: data})
	}
	return modules, nil
}

// resolve returns the files in the text of a modules.dep that match the patterns,
// each after those that it needs.
func resolve(dep string, patterns []string) ([]string, error) {
	needs := map[string][]string{}
	var selected []string
	for line := range strings.Lines(dep) {
		file, list, found := strings.Cut(strings.TrimSpace(line), ":")
		if !found {
			return nil, fmt.Errorf("modules.dep: line %q has no colon", line)
		}
		needs[file] = strings.Fields(list)
		matches := func(pattern string) bool {
			ok, err := path.Match(pattern, moduleName(file))
			return ok && err == nil
		}
		if slices.ContainsFunc(patterns, matches) {
			selected = append(selected, file)
		}
	}
	var order []string
	seen := map[string]bool{}
	for _, file := range selected {
		// modules.dep lists all that a module needs; the last is to be loaded first.
		for _, file := range slices.Backward(append([]string{file}, needs[file]...)) {
			if !seen[file] {
				seen[file] = true
				order = append(order, file)
			}
		}
	}
	return order, nil
}

func moduleName(file string) string {
	name := strings.TrimSuffix(strings.TrimSuffix(path.Base(file), ".xz"), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// decompress returns the content of a module file without its compression. A
// module keeps its signature.
func decompress(ctx context.Context, file string) ([]byte, error) {
	if !strings.HasSuffix(file, ".xz") {
		return os.ReadFile(file)
	}
	xz := exec.CommandContext(ctx, "xz", "--decompress", "--stdout", file)
	var stderr bytes.Buffer
	xz.Stderr = &stderr
	data, err := xz.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	return data, nil
}

// Staged returns a directory lib/modules with the modules that match the patterns,
// decompressed, and the indexes that modprobe reads. It takes it from the
// directory cache if it is there.
func (k Kernel) Staged(ctx context.Context, patterns []string, cache string) (string, error) {
	key := sha256.Sum256([]byte(strings.Join(patterns, " ")))
	dir := filepath.Join(cache, fmt.Sprintf("%s-%x", filepath.Base(k.Dir), key[:6]))
	if _, err := os.Stat(dir); err == nil {
		return filepath.Join(dir, "lib/modules"), nil
	}
	modules, err := k.Modules(ctx, patterns)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(cache, "new-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	if err := k.stage(ctx, tmp, modules); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, dir); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	return filepath.Join(dir, "lib/modules"), nil
}

// stage writes the modules to a tree with the indexes that modprobe reads, below
// root/lib/modules.
func (k Kernel) stage(ctx context.Context, root string, modules []Module) error {
	dir := filepath.Join(root, "lib/modules", k.Release)
	for _, m := range modules {
		file := filepath.Join(dir, m.Path)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, m.Data, 0o644); err != nil {
			return err
		}
	}
	for _, name := range []string{"modules.order", "modules.builtin", "modules.builtin.modinfo"} {
		data, err := os.ReadFile(filepath.Join(k.ModuleDir(), name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			return err
		}
	}
	if out, err := exec.CommandContext(ctx, "depmod", "-b", root, k.Release).CombinedOutput(); err != nil {
		return fmt.Errorf("depmod %s: %w: %s", k.Release, err, out)
	}
	return nil
}
