// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/dhcp"
)

// newStateFile returns a state file that has the content, or without a file if that is "".
func newStateFile(t *testing.T, content string) *stateFile {
	t.Helper()
	m := &stateFile{path: filepath.Join(t.TempDir(), "nics.json")}
	if content != "" {
		if err := os.WriteFile(m.path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func TestStateFile_load(t *testing.T) {
	known := map[string]nicState{"nic0": {Speed: 10e9}, "nic1": {Uplink: true}}
	for name, tc := range map[string]struct {
		content string
		want    map[string]nicState
		logged  string // "" if nothing
	}{
		"no file": {"", nil, ""},
		"written": {`{"version":1,"nics":{"nic0":{"speed":10000000000},"nic1":{"uplink":true}}}`, known, ""},
		"unknown fields": {
			`{"version":1,"a":1,"nics":{"nic0":{"speed":10000000000,"b":2},"nic1":{"uplink":true}}}`, known, ""},
		"a newer version": {`{"version":2,"nics":{"nic0":{"speed":1}}}`, nil, "did another release write it?"},
		"no version":      {`{}`, nil, "the file has version 0"},
		"corrupt":         {`{"version":1,"ni`, nil, "unexpected end of JSON input"},
		"wrong type":      {`{"version":1,"nics":{"nic0":{"speed":"fast"}}}`, nil, "cannot unmarshal string"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newStateFile(t, tc.content)
			logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
			ctx := klog.NewContext(t.Context(), logger)
			m.load(ctx)
			m.load(ctx)
			if diff := cmp.Diff(tc.want, m.nics); diff != "" {
				t.Errorf("NICs (-want +got):\n%s", diff)
			}
			sink, ok := logger.GetSink().(ktesting.Underlier)
			if !ok {
				t.Fatal("the logger has no buffer")
			}
			log, want := sink.GetBuffer().Data(), 1
			if tc.logged == "" {
				want = 0
			}
			if len(log) != want || want > 0 && !strings.Contains(log[0].Err.Error(), tc.logged) {
				t.Errorf("log %+v, want %d entries with %q", log, want, tc.logged)
			}
		})
	}
}

func TestStateFile_save(t *testing.T) {
	m, writes := newStateFile(t, "corrupt"), 0
	m.failpoints = func(name string, operation func() error) error {
		if name == "write NIC state file" {
			writes++
		}
		return operation()
	}
	save := func(speed uint64) {
		t.Helper()
		m.nics = map[string]nicState{"nic0": {Speed: speed}}
		if err := m.save(); err != nil {
			t.Fatal(err)
		}
	}
	save(10e9)
	save(10e9)
	save(1e9)
	next := &stateFile{path: m.path, failpoints: m.failpoints}
	next.load(t.Context())
	if diff := cmp.Diff(m.nics, next.nics); diff != "" {
		t.Errorf("the next plugin reads (-want +got):\n%s", diff)
	}
	if err := next.save(); err != nil || writes != 2 {
		t.Errorf("got error %v and %d writes, want one for each content", err, writes)
	}
	if err := next.remove(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(m.path); !os.IsNotExist(err) {
		t.Errorf("after the file was removed, stat returned %v", err)
	}
}

func TestStateFile_addSpeeds(t *testing.T) {
	m := stateFile{nics: map[string]nicState{"nic0": {Speed: 10e9}, "nic1": {}}}
	for name, tc := range map[string]struct {
		nic  netdev.NIC
		want uint64
	}{
		"without a carrier":          {netdev.NIC{Name: "nic0"}, 10e9},
		"the NIC reports its speed":  {netdev.NIC{Name: "nic0", Speed: 1e9}, 1e9},
		"with a carrier":             {netdev.NIC{Name: "nic0", Carrier: true}, 10e9},
		"its speed was never known":  {netdev.NIC{Name: "nic1"}, 0},
		"the NIC has not been there": {netdev.NIC{Name: "nic2"}, 0},
	} {
		nics := []netdev.NIC{tc.nic}
		if m.addSpeeds(nics); nics[0].Speed != tc.want {
			t.Errorf("%s: speed %d, want %d", name, nics[0].Speed, tc.want)
		}
	}
}

func TestKind_saveState(t *testing.T) {
	k := newKind(t, Options{
		Config:    load(t, `[{name: a, interfaces: ["nic*"], bandwidth: 1G}]`),
		StateFile: newStateFile(t, "").path,
	})
	k.stateFile.since = dhcp.SinceBoot()
	nics := []netdev.NIC{
		{Name: "nic0", Carrier: true}, {Name: "nic2", Speed: 25e9}, {Name: "nic3"}, {Name: "eno2", Speed: 1e9},
	}
	before := map[string]nicState{"nic0": {Speed: 10e9}, "nic1": {Speed: 1e9}, "nic9": {Speed: 1e9}}
	expect := func(condition string, want map[string]nicState) {
		t.Helper()
		k.stateFile.nics = before
		k.saveState(t.Context(), nics)
		if diff := cmp.Diff(want, k.stateFile.nics); diff != "" {
			t.Errorf("%s, recorded NICs (-want +got):\n%s", condition, diff)
		}
	}
	nic0 := nicState{Speed: 10e9} // it has a carrier, but no speed yet
	expect("before it is known whether they are uplinks", map[string]nicState{"nic0": nic0})
	k.stateFile.since -= uplinkTime
	k.inventory.AddUplinks([]string{"nic1", "eno1"})
	expect("afterwards", map[string]nicState{
		"nic0": nic0,
		"nic1": {Speed: 1e9, Uplink: true}, // it currently does not exist
		"nic2": {Speed: 25e9},
		"nic3": {},
	})
}

func TestKind_mayBecomeUplink(t *testing.T) {
	c := load(t, `[{name: a, interfaces: ["nic*", exact0], bandwidth: 1G}]`)
	nics := []netdev.NIC{{Name: "exact0"}, {Name: "nic0"}, {Name: "nic1"}}
	for name, tc := range map[string]struct {
		change func(k *Kind, nics []netdev.NIC)
		want   []string
	}{
		"after a boot":         {func(*Kind, []netdev.NIC) {}, []string{"nic0", "nic1"}},
		"after an hour":        {func(k *Kind, _ []netdev.NIC) { k.stateFile.since -= time.Hour }, nil},
		"with a default route": {func(_ *Kind, nics []netdev.NIC) { nics[2].Uplink = true }, nil},
		"one was known before": {
			func(k *Kind, _ []netdev.NIC) { k.stateFile.nics = map[string]nicState{"nic0": {}} }, []string{"nic1"}},
		"nothing can be passed on": {func(k *Kind, _ []netdev.NIC) { k.stateFile.path = "" }, nil},
	} {
		k, nics := newKind(t, Options{Config: c, StateFile: "/run/nics.json"}), slices.Clone(nics)
		k.stateFile.since = dhcp.SinceBoot()
		tc.change(k, nics)
		var got []string
		for _, n := range nics {
			if k.mayBecomeUplink(n, nics) {
				got = append(got, n.Name)
			}
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %v, want %v", name, got, tc.want)
		}
	}
}
