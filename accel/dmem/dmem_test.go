// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dmem

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
)

const region = "drm/0000:43:00.0/vram0"

// fixture imitates procfs and cgroup v2 by plain files: no kernel
// that these tests run on has the controller.
func fixture(t *testing.T) Limiter {
	t.Helper()
	dir := t.TempDir()
	write := func(name, content string) {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("proc/42/cgroup", "0::/kubepods/podx/c1\n")
	write("proc/43/cgroup", "12:cpu:/kubepods/podx/c1\n0::/\n")
	write("cgroup/cgroup.subtree_control", "cpu memory dmem\n")
	write("cgroup/kubepods/cgroup.subtree_control", "cpu memory\n")
	write("cgroup/kubepods/podx/cgroup.subtree_control", "")
	write("cgroup/kubepods/podx/c1/dmem.max", "drm/0000:44:00.0/vram0 max\n"+region+" max\n")
	return Limiter{Proc: filepath.Join(dir, "proc"), Cgroups: filepath.Join(dir, "cgroup"), Region: region, Bytes: 1 << 30}
}

func (l Limiter) content(t *testing.T, name string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(l.Cgroups, name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(raw))
}

func TestLimiter(t *testing.T) {
	l := fixture(t)
	if err := l.Run(strings.NewReader(`{"pid": 42}`)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"kubepods/podx/c1/dmem.max":            region + " 1073741824",
		"cgroup.subtree_control":               "cpu memory dmem", // it was on already
		"kubepods/cgroup.subtree_control":      "+dmem",
		"kubepods/podx/cgroup.subtree_control": "+dmem",
	} {
		if got := l.content(t, name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	// A second share of the device, in the same container.
	l.Bytes = 1 << 20
	if err := l.Run(strings.NewReader(`{"pid": 42}`)); err != nil {
		t.Fatal(err)
	}
	if got := l.content(t, "kubepods/podx/c1/dmem.max"); got != region+" 1074790400" {
		t.Errorf("two shares: %q", got)
	}
}

func TestLimiter_failsWithoutLimit(t *testing.T) {
	for name, tc := range map[string]struct {
		state string
		harm  func(l *Limiter) error
		want  string
	}{
		"no state":        {`{`, nil, "read the container's state"},
		"no such process": {`{"pid": 1}`, nil, "find the container's cgroup"},
		"cgroup v1":       {`{"pid": 43}`, nil, "no cgroup of its own in the unified hierarchy"},
		"no controller": {`{"pid": 42}`, func(l *Limiter) error {
			return os.Remove(filepath.Join(l.Cgroups,
				"kubepods/podx/c1/dmem.max"))
		},
			"read the limits of device memory"},
		"a limit that is not a number": {`{"pid": 42}`, func(l *Limiter) error {
			return os.WriteFile(filepath.Join(l.Cgroups, "kubepods/podx/c1/dmem.max"), []byte(region+" lots"), 0o644)
		}, "limit of " + region},
	} {
		t.Run(name, func(t *testing.T) {
			l := fixture(t)
			if tc.harm != nil {
				if err := tc.harm(&l); err != nil {
					t.Fatal(err)
				}
			}
			if err := l.Run(strings.NewReader(tc.state)); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got  %v\nwant %s", err, tc.want)
			}
		})
	}
}

func TestRegionOf(t *testing.T) {
	cgroups := fstest.MapFS{
		"dmem.capacity": {
			Data: []byte("drm/0000:03:00.0/vram0 8514437120\ndrm/0000:03:00.0/stolen 67108864\ndrm/0000:43:00.0/vram0 1\n"),
		},
	}
	for bus, want := range map[string]string{"0000:43:00.0": region, "0000:03:00.0": "drm/0000:03:00.0/vram0",
		"0000:99:00.0": "", "": ""} {
		if got := RegionOf(cgroups, bus); got != want {
			t.Errorf("%s: %q, want %q", bus, got, want)
		}
	}
	if got := RegionOf(fstest.MapFS{}, "0000:43:00.0"); got != "" {
		t.Errorf("without the controller: %q", got)
	}
}

// This test runs where the kernel has the controller.
func TestLimiter_onRunningKernel(t *testing.T) {
	raw, err := os.ReadFile("/sys/fs/cgroup/" + capacityFile)
	if err != nil {
		t.Skipf("no cgroup controller dmem: %v (see docs/dev/limits.md)", err)
	}
	for line := range strings.Lines(string(raw)) {
		parts := strings.Split(strings.Fields(line)[0], "/")
		if len(parts) == 3 && parts[0] == "drm" && strings.HasPrefix(parts[2], "vram") {
			if got := RegionOf(os.DirFS("/sys/fs/cgroup"), parts[1]); got == "" {
				t.Errorf("%s: no region of %s", line, parts[1])
			}
		}
	}
}
