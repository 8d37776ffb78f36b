// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	Main()
	os.Exit(m.Run())
}

func TestConfiguration(t *testing.T) {
	for command, want := range map[string]struct {
		path  string
		whole bool
	}{
		"runc --root /r create --bundle /b --pid-file /p id": {"/b/config.json", true},
		"runc run -b /b id":                {"/b/config.json", true},
		"runc exec --process /p/1.json id": {"/p/1.json", false},
		"runc exec -p /p/1.json id":        {"/p/1.json", false},
		"runc delete --bundle /b id":       {},
		"runc state id":                    {},
		"runc":                             {},
	} {
		path, whole := configuration(strings.Fields(command))
		if path != want.path || whole != want.whole {
			t.Errorf("%s: got %q, %t; want %q, %t", command, path, whole, want.path, want.whole)
		}
	}
}

func TestAdapt(t *testing.T) {
	const added = " CAP_PERFMON CAP_BPF CAP_CHECKPOINT_RESTORE"
	all := strings.Join(capabilityNames, " ")
	for name, test := range map[string]struct{ own, set, want string }{
		"unprivileged": {all, "CAP_CHOWN CAP_KILL", "CAP_CHOWN CAP_KILL"},
		"privileged, from an old daemon": {
			all, "CAP_SYS_ADMIN CAP_SYS_RESOURCE", "CAP_SYS_ADMIN CAP_SYS_RESOURCE" + added,
		},
		"privileged, from a new daemon": {all, "CAP_SYS_ADMIN" + added, "CAP_SYS_ADMIN" + added},
		"this machine lacks a capability": {
			"CAP_SYS_ADMIN CAP_BPF", "CAP_SYS_ADMIN CAP_SYS_RESOURCE", "CAP_SYS_ADMIN CAP_BPF",
		},
		"empty": {all, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			process := map[string]any{
				"args": []string{"x"}, "capabilities": map[string]any{"bounding": strings.Fields(test.set)},
			}
			for _, whole := range []bool{true, false} {
				config := process
				if whole {
					config = map[string]any{"process": process, "root": map[string]any{"path": "/r"}}
				}
				raw, err := json.Marshal(config)
				if err != nil {
					t.Fatal(err)
				}
				adapted, err := adapt(raw, whole, strings.Fields(test.own))
				if err != nil {
					t.Fatal(err)
				}
				type processOf struct {
					Args         []string
					Capabilities struct{ Bounding []string }
				}
				var got struct {
					processOf
					Process processOf
					Root    struct{ Path string }
				}
				if err := json.Unmarshal(adapted, &got); err != nil {
					t.Fatal(err)
				}
				p := got.processOf
				if whole {
					p = got.Process
				}
				if want := strings.Fields(test.want); !slices.Equal(p.Capabilities.Bounding, want) {
					t.Errorf("whole configuration %t: got %q, want %q", whole, p.Capabilities.Bounding, want)
				}
				if !slices.Equal(p.Args, []string{"x"}) || whole && got.Root.Path != "/r" {
					t.Errorf("whole configuration %t: other fields changed: %s", whole, adapted)
				}
			}
		})
	}
}

func TestAdapt_withoutProcess(t *testing.T) {
	if _, err := adapt([]byte(`{"root": {}}`), true, nil); err == nil {
		t.Error("a configuration without a process: got no error")
	}
}

func TestCapabilityNames_areInOrder(t *testing.T) {
	for name, number := range map[string]int{
		"CAP_CHOWN": unix.CAP_CHOWN, "CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN, "CAP_SYS_RESOURCE": unix.CAP_SYS_RESOURCE,
		"CAP_PERFMON": unix.CAP_PERFMON, "CAP_BPF": unix.CAP_BPF, "CAP_CHECKPOINT_RESTORE": unix.CAP_CHECKPOINT_RESTORE,
	} {
		if capabilityNames[number] != name {
			t.Errorf("capability %d: got %s, want %s", number, capabilityNames[number], name)
		}
	}
	if len(capabilityNames) != unix.CAP_LAST_CAP+1 {
		t.Errorf("got %d names, want %d", len(capabilityNames), unix.CAP_LAST_CAP+1)
	}
}
