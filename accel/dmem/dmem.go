// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package dmem limits the device memory that a container can allocate, using the kernel's cgroup controller dmem
// (Linux 6.14, cgroup v2; Documentation/admin-guide/cgroup-v2.rst). The device's driver must charge its allocations
// to the controller.
//
// A limit applies to a cgroup. The runtime creates a new cgroup whenever a container starts, so the
// limits of several shares of one device add up in it. If several containers have the same share,
// the limit applies to each of them separately.
package dmem

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

// capacityFile exists in the root cgroup only. It has one line per region, such as
// "drm/0000:03:00.0/vram0 8514437120" (bytes).
const capacityFile = "dmem.capacity"

// RegionOf returns the region of a PCI device's memory, or "" if the kernel cannot limit it. cgroups is the root of
// the cgroup filesystem.
func RegionOf(cgroups fs.FS, pciBusID string) string {
	if cgroups == nil || pciBusID == "" {
		return ""
	}
	raw, err := fs.ReadFile(cgroups, capacityFile)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(raw)) {
		region, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		if path.Base(path.Dir(region)) == pciBusID && strings.HasPrefix(path.Base(region), "vram") {
			return region
		}
	}
	return ""
}

// Command is the command of the hook that runs a Limiter.
const Command = "limit-memory"

// Args returns the arguments that make the hook limit a region to a number of bytes, without the program name.
func Args(region string, bytes uint64) []string {
	return []string{Command, "--region=" + region, "--bytes=" + strconv.FormatUint(bytes, 10)}
}

// Limiter sets the limit. The OCI runtime runs it as a hook, in the node's
// namespaces.
type Limiter struct {
	Proc, Cgroups string // mount points, such as /proc and /sys/fs/cgroup
	Region        string
	Bytes         uint64
}

// Run limits the container that has its state on stdin. If it returns an error, the container must not start.
func (l Limiter) Run(stdin io.Reader) error {
	var state struct {
		Pid int `json:"pid"`
	}
	if err := json.NewDecoder(io.LimitReader(stdin, 1<<20)).Decode(&state); err != nil {
		return fmt.Errorf("read the container's state: %w", err)
	}
	cgroup, err := l.cgroupOf(state.Pid)
	if err != nil {
		return err
	}
	if err := l.delegate(cgroup); err != nil {
		return err
	}
	return l.limit(filepath.Join(l.Cgroups, cgroup, "dmem.max"))
}

// cgroupOf returns the path of a process's cgroup in the unified hierarchy, which is number 0 (cgroups(7)).
func (l Limiter) cgroupOf(pid int) (string, error) {
	raw, err := os.ReadFile(filepath.Join(l.Proc, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return "", fmt.Errorf("find the container's cgroup: %w", err)
	}
	for line := range strings.Lines(string(raw)) {
		if cgroup, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok && path.Clean(cgroup) != "/" {
			return path.Clean(cgroup), nil
		}
	}
	return "", errors.New("the container has no cgroup of its own in the unified hierarchy (cgroup v2)")
}

// delegate enables the controller in all parent cgroups, because runtimes enable
// only the controllers that they know.
func (l Limiter) delegate(cgroup string) error {
	above := l.Cgroups
	for _, name := range strings.Split(strings.Trim(path.Dir(cgroup), "/"), "/") {
		if err := enable(above); err != nil {
			return err
		}
		above = filepath.Join(above, name)
	}
	return enable(above)
}

// enable enables the controller for the children of a cgroup.
func enable(dir string) error {
	file := filepath.Join(dir, "cgroup.subtree_control")
	raw, err := os.ReadFile(file)
	if err == nil && strings.Contains(" "+strings.TrimSpace(string(raw))+" ", " dmem ") {
		return nil
	}
	if err == nil {
		err = os.WriteFile(file, []byte("+dmem"), 0o644)
	}
	if err != nil {
		return fmt.Errorf("enable the cgroup controller dmem in %s: %w", dir, err)
	}
	return nil
}

// limit increases the cgroup's limit, which counts as 0 if not set, and reads it back.
func (l Limiter) limit(file string) error {
	before, limited, err := l.read(file)
	if err != nil {
		return err
	}
	want := l.Bytes
	if limited { // by another share of the device
		want += before
	}
	if err := os.WriteFile(file, fmt.Appendf(nil, "%s %d", l.Region, want), 0o644); err != nil {
		return fmt.Errorf("limit %s to %d bytes: %w", l.Region, want, err)
	}
	// The kernel rounds down to pages.
	got, limited, err := l.read(file)
	if err != nil {
		return fmt.Errorf("limit %s to %d bytes: read the limit: %w", l.Region, want, err)
	}
	if !limited || got > want {
		return fmt.Errorf("limit %s to %d bytes: the kernel has %d (limited: %t): does another program write %s?",
			l.Region, want, got, limited, file)
	}
	return nil
}

// read returns the limit of the region in a dmem.max file, and whether there is
// one.
func (l Limiter) read(file string) (limit uint64, limited bool, err error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return 0, false, fmt.Errorf("read the limits of device memory: %w", err)
	}
	for line := range strings.Lines(string(raw)) {
		region, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if region != l.Region || value == "max" {
			continue
		}
		if limit, err = strconv.ParseUint(value, 10, 64); err != nil {
			return 0, false, fmt.Errorf("%s: limit of %s: %w", file, l.Region, err)
		}
		return limit, true, nil
	}
	return 0, false, nil
}
