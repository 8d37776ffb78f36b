// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"os"
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
	names, err := specs.Read("3ad9b2a4")
	if diff := cmp.Diff([]string{name, "other"}, names); err != nil || diff != "" {
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
	if names, err := specs.Read("uid"); err != nil || names != nil {
		t.Errorf("%v %v", names, err)
	}
}

func TestSpecs_Write_refuses_invalid_specs(t *testing.T) {
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
