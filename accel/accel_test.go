// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package accel_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dra-shared/dra-driver-shared/accel"
	"github.com/dra-shared/dra-driver-shared/test/fstree"
)

func machine(t *testing.T, name string) (accel.Host, fstest.MapFS) {
	t.Helper()
	files, err := fstree.Load("testdata/" + name + ".tree")
	if err != nil {
		t.Fatal(err)
	}
	return accel.Host{Sys: fstree.Sub(files, "sys"), Proc: fstree.Sub(files, "proc"), Dev: fstree.Sub(files, "dev")}, files
}

// found formats a device and its nodes as one line.
func found(devices []accel.Device) (lines []string) {
	for _, d := range devices {
		lines = append(
			lines,
			strings.Join(
				append([]string{d.PCIBusID, d.Vendor + ":" + d.ID, d.Driver, d.DriverVersion, d.Model}, d.Nodes...),
				" ",
			),
		)
	}
	return lines
}

func TestFind(t *testing.T) {
	amd := func(bus, card, render string) string {
		return bus + " 1002:74a1 amdgpu 6.12.12 AMD Instinct MI300X /dev/dri/" + card + " /dev/dri/" + render
	}
	for _, tc := range []struct {
		name, machine string
		match         accel.Match
		want          []string
	}{
		{"a class alone takes the board's own display too", "eight-h200", accel.Match{Class: "0300"},
			[]string{"0000:03:00.0 1a03:2000 ast   /dev/dri/card0"}},
		{"no such device", "eight-h200", accel.Match{Vendor: "1002"}, nil},
		{"processing accelerators, with their render nodes", "render-nodes", accel.Match{Class: "1200", Vendor: "1002"},
			[]string{amd("0000:43:00.0", "card1", "renderD129"), amd("0000:83:00.0", "card2", "renderD130")}},
		{"render nodes of all vendors, with their PCI functions", "render-nodes",
			accel.Match{Paths: []string{"/dev/dri/renderD*"}}, []string{
				"0000:00:02.0 8086:7d55 i915   /dev/dri/renderD128",
				"0000:43:00.0 1002:74a1 amdgpu 6.12.12 AMD Instinct MI300X /dev/dri/renderD129",
				"0000:83:00.0 1002:74a1 amdgpu 6.12.12 AMD Instinct MI300X /dev/dri/renderD130"}},
		{"criteria and paths together narrow the nodes", "render-nodes", accel.Match{Vendor: "1002",
			Paths: []string{"/dev/dri/renderD*"}}, []string{
			"0000:43:00.0 1002:74a1 amdgpu 6.12.12 AMD Instinct MI300X /dev/dri/renderD129",
			"0000:83:00.0 1002:74a1 amdgpu 6.12.12 AMD Instinct MI300X /dev/dri/renderD130"}},
		{"no frame buffer and no bus of the board", "render-nodes", accel.Match{Vendor: "8086", ID: "7D55"},
			[]string{"0000:00:02.0 8086:7d55 i915   /dev/dri/card0 /dev/dri/renderD128"}},
		{"the subsystem accel", "render-nodes", accel.Match{ID: "7d1d"}, []string{"0000:00:0b.0 8086:7d1d intel_vpu   " +
			"/dev/accel/accel0"}},
		{"nodes that sysfs does not know", "render-nodes", accel.Match{Paths: []string{"/dev/npu[0-9]"}}, []string{" :    " +
			"/dev/npu0", " :    /dev/npu1"}},
		{"a directory and a plain name", "render-nodes", accel.Match{Paths: []string{"/dev/dri", "/dev/kfd"}},
			[]string{" :    /dev/kfd"}},
		{"a machine with none", "none", accel.Match{Class: "03"}, nil},
		{"a machine with none, by path", "none", accel.Match{Paths: []string{"/dev/nvidia*"}}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			host, _ := machine(t, tc.machine)
			devices, err := host.Find(tc.match)
			if diff := cmp.Diff(tc.want, found(devices)); err != nil || diff != "" {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestFind_NVIDIAGPUs(t *testing.T) {
	host, files := machine(t, "eight-h200")
	devices, err := host.Find(accel.Match{Class: "0302", Vendor: "10de"})
	if err != nil || len(devices) != 8 {
		t.Fatalf("%v: %+v", err, devices)
	}
	for i, bus := range []string{"1b", "43", "52", "61", "9d", "c3", "d1", "df"} {
		want := accel.Device{PCIBusID: "0000:" + bus + ":00.0", Class: "030200", Vendor: "10de", ID: "2335", Driver: "nvidia",
			DriverVersion: "570.086.15", Model: "NVIDIA H200", Nodes: []string{"/dev/nvidia" + string(rune('0'+i))}}
		if diff := cmp.Diff(want, devices[i]); diff != "" {
			t.Errorf("GPU %d (-want +got):\n%s", i, diff)
		}
	}
	// By path they are the same devices: not nvidiactl, which is none's.
	byPath, err := host.Find(accel.Match{Paths: []string{"/dev/nvidia[0-9]*"}})
	if diff := cmp.Diff(devices, byPath); err != nil || diff != "" {
		t.Errorf("by path: %v (-PCI +path):\n%s", err, diff)
	}
	// A GPU without its node is still found.
	delete(files, "dev/nvidia3")
	devices, err = host.Find(accel.Match{Class: "0302"})
	if err != nil || len(devices) != 8 || len(devices[3].Nodes) != 0 {
		t.Errorf("%v: %+v", err, devices)
	}
}

func TestTree_roundTrip(t *testing.T) {
	for _, name := range []string{"eight-h200", "render-nodes"} {
		host, files := machine(t, name)
		dir := t.TempDir()
		if err := fstree.Write(files, dir); err != nil {
			t.Fatal(err)
		}
		var text strings.Builder
		if err := fstree.Record(dir, &text); err != nil {
			t.Fatal(err)
		}
		again, err := fstree.Parse(strings.NewReader(text.String()))
		if err != nil {
			t.Fatal(err)
		}
		recorded := accel.Host{
			Sys:  fstree.Sub(again, "sys"),
			Proc: fstree.Sub(again, "proc"),
			Dev:  host.Dev,
		} // nodes are not made in a directory
		for _, class := range []string{"03", "12"} {
			want, err := host.Find(accel.Match{Class: class})
			got, err2 := recorded.Find(accel.Match{Class: class})
			if diff := cmp.Diff(want, got); err != nil || err2 != nil || diff != "" {
				t.Errorf("%s, class %s: %v %v (-machine +recorded):\n%s", name, class, err, err2, diff)
			}
		}
	}
}

func TestHost_Watch_reportsDeviceNodeChanges(t *testing.T) {
	dev := t.TempDir()
	noticed := make(chan struct{}, 100)
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	host := accel.HostAt("/sys", "/proc", dev, "/sys/fs/cgroup")
	matches := []accel.Match{{Class: "03"}, {Paths: []string{"/dev/npu/[0-9]*", "/dev/deep/*/node"}}}
	go func() { ended <- host.Watch(ctx, matches, func() { noticed <- struct{}{} }) }()
	expectChange := func(event string) {
		t.Helper()
		select {
		case <-noticed:
		case <-time.After(10 * time.Second):
			t.Fatalf("Watch did not report: %s", event)
		}
	}
	expectChange("the state before the watch")
	for _, step := range []struct {
		node string
		do   func(string) error
	}{
		{"dri", func(p string) error { return os.Mkdir(p, 0o700) }},
		{"dri/card0", func(p string) error { return os.WriteFile(p, nil, 0o600) }},
		{"npu", func(p string) error { return os.Mkdir(p, 0o700) }},
		{"npu/0", func(p string) error { return os.WriteFile(p, nil, 0o600) }},
		{"npu/0", os.Remove},
	} {
		if err := step.do(filepath.Join(dev, step.node)); err != nil {
			t.Fatal(err)
		}
		expectChange(step.node)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// The kernel loses events while the plugin is busy. The watch must not end.
func TestHost_Watch_continuesAfterOverflow(t *testing.T) {
	text, err := os.ReadFile("/proc/sys/fs/inotify/max_queued_events")
	if err != nil {
		t.Fatal(err)
	}
	queued, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || queued > 100_000 {
		t.Skipf("the kernel queues %s events (error %v), more than this test creates", text, err)
	}
	dev, ended := t.TempDir(), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	noticed := make(chan struct{}) // until it is received from, the watch does not read events
	host := accel.HostAt("/sys", "/proc", dev, "/sys/fs/cgroup")
	go func() {
		ended <- host.Watch(ctx, []accel.Match{{Class: "03"}}, func() {
			select {
			case noticed <- struct{}{}:
			case <-ctx.Done():
			}
		})
	}()
	<-noticed          // the state before the watch
	for range queued { // two events each, because the watch has read some of them
		path := filepath.Join(dev, "node")
		if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Remove(path)); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 * queued { // more than the events in the queue
		select {
		case <-noticed:
			continue
		case err := <-ended:
			t.Fatalf("the watch ended with %v", err)
		case <-time.After(time.Second):
		}
		break
	}
	if err := os.Mkdir(filepath.Join(dev, "dri"), 0o700); err != nil {
		t.Fatal(err)
	}
	select {
	case <-noticed:
	case <-time.After(10 * time.Second):
		t.Error("the watch does not report changes after the kernel has lost events")
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func FuzzFind(f *testing.F) {
	f.Add("DEVNAME=dri/card0\n", "Device Minor: 0\n", "/dev/nvidia*")
	f.Add("DEVNAME=../../etc/passwd", "Device Minor: /../../etc", "/dev/[")
	f.Fuzz(func(t *testing.T, uevent, information, pattern string) {
		files := fstest.MapFS{
			"sys/bus/pci/devices/0000:00:01.0/class":            {Data: []byte("0x030200")},
			"sys/bus/pci/devices/0000:00:01.0/drm/card0/uevent": {Data: []byte(uevent)},
			"proc/driver/nvidia/gpus/0000:00:01.0/information":  {Data: []byte(information)},
			"dev/dri/card0": {Mode: os.ModeDevice},
			"dev/nvidia0":   {Mode: os.ModeDevice},
			"etc/passwd":    {Mode: os.ModeDevice},
		}
		host := accel.Host{Sys: fstree.Sub(files, "sys"), Proc: fstree.Sub(files, "proc"), Dev: fstree.Sub(files, "dev")}
		for _, m := range []accel.Match{{Class: "03"}, {Paths: []string{pattern}}} {
			devices, err := host.Find(m)
			if err != nil {
				continue
			}
			for _, d := range devices {
				for _, node := range d.Nodes {
					if !slices.Contains([]string{"/dev/dri/card0", "/dev/nvidia0"}, node) {
						t.Errorf("%q is not a device node of the machine", node)
					}
				}
			}
		}
	})
}
