// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"
)

func TestSpecs_Write(t *testing.T) {
	dir := t.TempDir()
	specs, err := New(dir, t.TempDir(), "dra-shared.dev", nil)
	if err != nil {
		t.Fatal(err)
	}
	name := DeviceName("3ad9b2a4-5f24-4c4f-8c7e-2f3b1f7c9a10", "nic/fast", "11111111-2222-3333-4444-555555555555")
	device := Device{
		Name: name,
		Edits: Edits{
			Env:         []string{"A=b"},
			DeviceNodes: []string{"/dev/dri/card0"},
			Mounts: []Mount{
				{HostPath: "/run/a", ContainerPath: "/a"},
				{HostPath: "/run/b", ContainerPath: "/b", Writable: true},
			},
		},
		Hook: &Hook{Path: "/hook", Args: []string{"hook", "--share=x"}, Timeout: 90},
	}
	for range 2 {
		if err := specs.Write("3ad9b2a4", []Device{device, {Name: "other", Edits: Edits{Env: []string{"C=d"}}}}); err != nil {
			t.Fatal(err)
		}
	}
	raw, err := os.ReadFile(specs.Path("3ad9b2a4"))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"cdiVersion":"0.5.0","kind":"dra-shared.dev/share","devices":[{"name":"` + name +
		`","containerEdits":{"env":["A=b"],"deviceNodes":[{"path":"/dev/dri/card0","permissions":"rw"}],` +
		`"hooks":[{"hookName":"createRuntime","path":"/hook","args":["hook","--share=x"],"timeout":90}],` +
		`"mounts":[{"hostPath":"/run/a","containerPath":"/a","options":["rbind","rprivate","nosuid",` +
		`"nodev","ro"]},{"hostPath":"/run/b","containerPath":"/b","options":["rbind","rprivate",` +
		`"nosuid","nodev","rw"]}]}},{"name":"other","containerEdits":{"env":["C=d"]}}],` +
		`"containerEdits":{}}`
	if diff := cmp.Diff(want, string(raw)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	cache, err := cdiapi.NewCache(cdiapi.WithSpecDirs(dir), cdiapi.WithAutoRefresh(false))
	if err != nil || len(cache.GetErrors()) > 0 {
		t.Fatal(err, cache.GetErrors())
	}
	if cache.GetDevice(specs.ID(name)) == nil {
		t.Errorf("the runtime would not find %s among %v", specs.ID(name), cache.ListDevices())
	}
	spec, err := specs.read("3ad9b2a4")
	if diff := cmp.Diff([]string{name, "other"}, spec.devices); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

func TestSpecs_Remove(t *testing.T) {
	specs, err := New(t.TempDir(), t.TempDir(), "dra-shared.dev", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := specs.Write("uid", []Device{{Name: "d", Edits: Edits{Env: []string{"A=b"}}}}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := specs.Remove("uid"); err != nil {
			t.Fatal(err)
		}
	}
	if spec, err := specs.read("uid"); err != nil || spec.devices != nil {
		t.Errorf("%v %v", spec.devices, err)
	}
}

func TestSpecs_Write_refusesInvalidSpecs(t *testing.T) {
	specs, err := New(t.TempDir(), t.TempDir(), "dra-shared.dev", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := specs.Write("uid", []Device{{Name: "no spaces", Edits: Edits{Env: []string{"A=b"}}}}); err == nil {
		t.Error("written")
	}
	if err := specs.Write("uid", []Device{{Name: "d", Edits: Edits{Env: []string{"no-equals-sign"}}}}); err == nil {
		t.Error("written")
	}
}

// Other programs write to the directory as well.
func TestSpecs_Holds(t *testing.T) {
	dir := t.TempDir()
	specs, err := New(dir, t.TempDir(), "dra-shared.dev", nil)
	if err != nil {
		t.Fatal(err)
	}
	hook := &Hook{Path: "/hook", Args: []string{"hook"}}
	devices := []Device{{Name: "d", Edits: Edits{Env: []string{"A=b"}}, Hook: hook}}
	if specs.Holds("uid", devices) {
		t.Error("Holds is true before the spec is written")
	}
	if err := specs.Write("uid", devices); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/vendor.com-gpu.json", []byte("not a spec"), 0o600); err != nil {
		t.Fatal(err)
	}
	if !specs.Holds("uid", devices) || specs.Holds("uid", []Device{{Name: "other"}}) {
		t.Error("Holds is not true for exactly the devices that were written")
	}
	if hooks, err := specs.Hooks(); err != nil || !hooks["/hook"] || len(hooks) != 1 {
		t.Errorf("Hooks: got %v, %v, want the hook that was written", hooks, err)
	}
	for name, change := range map[string]func() error{
		"overwritten": func() error { return os.WriteFile(specs.Path("uid"), []byte("{}"), 0o600) },
		"removed":     func() error { return os.Remove(specs.Path("uid")) },
	} {
		if err := specs.Write("uid", devices); err != nil {
			t.Fatal(err)
		}
		if err := change(); err != nil {
			t.Fatal(err)
		}
		if specs.Holds("uid", devices) {
			t.Errorf("Holds is true for a spec that was %s", name)
		}
	}
	if err := specs.Write("other", devices); err != nil {
		t.Fatal(err)
	}
	uids, err := specs.List()
	if err != nil || !slices.Contains(uids, "other") || slices.Contains(uids, "vendor.com-gpu") {
		t.Errorf("List: got %q, %v", uids, err)
	}
}
