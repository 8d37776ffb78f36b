// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package kernel fetches Linux kernels from the package archive that apt is configured for, and unpacks them into a
// cache. It does not install anything: it needs only apt-get, apt-cache, dpkg-deb, and depmod.
//
// A kernel is selected by one of:
//
//	6.12                         the newest cloud kernel of that series
//	6.12-amd64                   the newest kernel of another flavor of that series
//	linux-image-6.1.0-51-amd64   a package
//	linux-image-....deb          a package file
package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Kernel is an unpacked kernel package.
type Kernel struct {
	// Dir is the root of the package's file tree.
	Dir string
	// Release is what `uname -r` prints in the guest.
	Release string
}

// Image returns the path of the bootable kernel image.
func (k Kernel) Image() string { return filepath.Join(k.Dir, "boot", "vmlinuz-"+k.Release) }

// ModuleDir returns the directory that holds the kernel's modules and their
// indexes, such as modules.dep.
func (k Kernel) ModuleDir() string { return filepath.Join(k.Dir, "lib/modules", k.Release) }

// defaultFlavor is the flavor of a series without one. Cloud kernels boot fast
// and are what most nodes of Debian images run.
const defaultFlavor = "cloud-amd64"

const packagePrefix = "linux-image-"

var selectors = regexp.MustCompile(`^([0-9]+\.[0-9]+(-[a-z0-9-]+)?|linux-image-[0-9].*)$`)

// Fetch returns the kernel that selector names, from the cache or from the
// package archive. cache is the directory of unpacked kernels. If the archive
// does not answer, Fetch uses the newest matching kernel of the cache.
func Fetch(ctx context.Context, selector, cache string) (Kernel, error) {
	if strings.HasSuffix(selector, ".deb") {
		name := strings.TrimSuffix(filepath.Base(selector), ".deb")
		return unpack(ctx, selector, filepath.Join(cache, name))
	}
	if !selectors.MatchString(selector) {
		return Kernel{}, fmt.Errorf("kernel %q: want a series such as 6.12, with or without a flavor such as -amd64, "+
			"a package linux-image-..., or a file ....deb", selector)
	}
	name, version, err := find(ctx, selector)
	if err != nil {
		cached, cacheErr := fromCache(selector, cache)
		if cacheErr != nil {
			return Kernel{}, errors.Join(fmt.Errorf("find kernel %s: %w", selector, err), cacheErr)
		}
		return cached, nil
	}
	dir := filepath.Join(cache, name+"_"+version)
	if _, err := os.Stat(dir); err == nil {
		return open(dir)
	}
	download, err := os.MkdirTemp("", "lab-kernel-")
	if err != nil {
		return Kernel{}, err
	}
	defer os.RemoveAll(download)
	// The sandbox user of apt cannot write to the directory.
	get := exec.CommandContext(ctx, "apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", name+"="+version)
	get.Dir = download
	if out, err := get.CombinedOutput(); err != nil {
		return Kernel{}, fmt.Errorf("apt-get download %s: %w: %s: is the package index current? "+
			"`apt-get update` refreshes it", name, err, strings.TrimSpace(string(out)))
	}
	files, err := filepath.Glob(filepath.Join(download, "*.deb"))
	if err != nil {
		return Kernel{}, err
	}
	if len(files) != 1 {
		return Kernel{}, fmt.Errorf("apt-get download %s: got %d files, want 1", name, len(files))
	}
	return unpack(ctx, files[0], dir)
}

// find returns the name and the version of the newest package that matches the selector. It refreshes the package index
// if that does not have a match.
func find(ctx context.Context, selector string) (name, version string, err error) {
	name, version, err = findInIndex(ctx, selector)
	if err == nil {
		return name, version, nil
	}
	if out, updateErr := exec.CommandContext(ctx, "apt-get", "-qq", "update").CombinedOutput(); updateErr != nil {
		return "", "", fmt.Errorf("%w; apt-get update: %w: %s", err, updateErr, strings.TrimSpace(string(out)))
	}
	return findInIndex(ctx, selector)
}

func findInIndex(ctx context.Context, selector string) (name, version string, err error) {
	out, err := exec.CommandContext(ctx, "apt-cache", "pkgnames", packagePrefix).Output()
	if err != nil {
		return "", "", fmt.Errorf("apt-cache pkgnames: %w", err)
	}
	name = newest(selector, strings.Fields(string(out)))
	if name == "" {
		return "", "", fmt.Errorf("the package index has no %s", pattern(selector))
	}
	out, err = exec.CommandContext(ctx, "apt-cache", "show", "--no-all-versions", name).Output()
	if err != nil {
		return "", "", fmt.Errorf("apt-cache show %s: %w", name, err)
	}
	for line := range strings.Lines(string(out)) {
		if version, ok := strings.CutPrefix(line, "Version:"); ok {
			return name, strings.TrimSpace(version), nil
		}
	}
	return "", "", fmt.Errorf("apt-cache show %s: no version in %q", name, out)
}

// pattern returns the regular expression for the names of the packages that a
// selector matches. Packages without a patch level in their names are
// meta packages without files.
func pattern(selector string) *regexp.Regexp {
	if strings.HasPrefix(selector, packagePrefix) {
		return regexp.MustCompile("^" + regexp.QuoteMeta(selector) + "$")
	}
	series, flavor, found := strings.Cut(selector, "-")
	if !found {
		flavor = defaultFlavor
	}
	return regexp.MustCompile("^" + packagePrefix + regexp.QuoteMeta(series) + `\.[0-9][0-9A-Za-z.+~]*(-[0-9]+)?-` +
		regexp.QuoteMeta(flavor) + "$")
}

// newest returns the name with the highest version among those that match the
// selector, or "" if none does.
func newest(selector string, names []string) string {
	matches := pattern(selector)
	matching := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return !matches.MatchString(name) })
	if len(matching) == 0 {
		return ""
	}
	return slices.MaxFunc(matching, compareVersions)
}

// numbers matches the parts of a version: numbers and the separators between them.
var numbers = regexp.MustCompile(`[0-9]+|[^0-9]+`)

// compareVersions compares two names. Numbers in them count by value.
func compareVersions(a, b string) int {
	as, bs := numbers.FindAllString(a, -1), numbers.FindAllString(b, -1)
	return slices.CompareFunc(as, bs, func(a, b string) int {
		na, errA := strconv.Atoi(a)
		nb, errB := strconv.Atoi(b)
		if errA == nil && errB == nil {
			return na - nb
		}
		return strings.Compare(a, b)
	})
}

// fromCache returns the newest kernel of the cache that matches the selector.
func fromCache(selector, cache string) (Kernel, error) {
	dirs, err := filepath.Glob(filepath.Join(cache, packagePrefix+"*_*"))
	if err != nil {
		return Kernel{}, err
	}
	byName := map[string]string{}
	var names []string
	for _, dir := range dirs {
		name, _, _ := strings.Cut(filepath.Base(dir), "_")
		byName[name] = dir
		names = append(names, name)
	}
	name := newest(selector, names)
	if name == "" {
		return Kernel{}, fmt.Errorf("the cache %s has no %s", cache, pattern(selector))
	}
	return open(byName[name])
}

// unpack unpacks a package file to dir, which appears only when it is complete.
func unpack(ctx context.Context, file, dir string) (Kernel, error) {
	if _, err := os.Stat(dir); err == nil {
		return open(dir)
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return Kernel{}, err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "new-")
	if err != nil {
		return Kernel{}, err
	}
	defer os.RemoveAll(tmp)
	if out, err := exec.CommandContext(ctx, "dpkg-deb", "-x", file, tmp).CombinedOutput(); err != nil {
		return Kernel{}, fmt.Errorf("unpack %s: %w: %s", file, err, out)
	}
	k, err := open(tmp)
	if err != nil {
		return Kernel{}, err
	}
	// A kernel package does not contain indexes; its installation script makes them.
	if out, err := exec.CommandContext(ctx, "depmod", "-b", tmp, k.Release).CombinedOutput(); err != nil {
		return Kernel{}, fmt.Errorf("depmod %s: %w: %s", k.Release, err, out)
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return Kernel{}, err
	}
	if err := os.Rename(tmp, dir); err != nil && !errors.Is(err, os.ErrExist) {
		return Kernel{}, err
	}
	return open(dir)
}

// open returns the kernel with its package unpacked in dir.
func open(dir string) (Kernel, error) {
	images, err := filepath.Glob(filepath.Join(dir, "boot/vmlinuz-*"))
	if err != nil {
		return Kernel{}, err
	}
	if len(images) != 1 {
		return Kernel{}, fmt.Errorf("kernel in %s: got %d images boot/vmlinuz-*, want 1", dir, len(images))
	}
	return Kernel{Dir: dir, Release: strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")}, nil
}
