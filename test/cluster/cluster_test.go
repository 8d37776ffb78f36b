// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestNewCluster_directoryHiddenByNodeMounts(t *testing.T) {
	for _, dir := range []string{"/run/x", "/var/lib/x", "/var/log"} {
		if _, err := newCluster(dir); err == nil || !strings.Contains(err.Error(), "choose a directory elsewhere") {
			t.Errorf("newCluster(%q): got error %v, want one that says to choose a directory elsewhere", dir, err)
		}
	}
}

func TestNewCluster_idDependsOnDirectory(t *testing.T) {
	a, err := newCluster("/tmp/a")
	if err != nil {
		t.Fatal(err)
	}
	b, err := newCluster("/tmp/b")
	if err != nil {
		t.Fatal(err)
	}
	again, err := newCluster("/tmp/../tmp/a")
	if err != nil {
		t.Fatal(err)
	}
	if a.id == b.id || a.id != again.id {
		t.Errorf("IDs of /tmp/a, /tmp/b, /tmp/a: got %s, %s, %s; want the first and last equal, the second different",
			a.id, b.id, again.id)
	}
}

func TestCluster_up_invalidOptions(t *testing.T) {
	c, err := newCluster(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		o    options
		want string
	}{
		{options{Nodes: 3, Gates: "default"}, "--nodes 3: must be 0, 1, or 2"},
		{options{Nodes: 1, Gates: "some"}, `--gates "some": must be default, all, capacity, or no-capacity`},
		{
			options{Nodes: 1, Gates: "default", Kubernetes: "v1.35.4"},
			"--kubernetes v1.35.4: nodes run only v1.37.1: set --nodes 0",
		},
	} {
		if err := c.up(t.Context(), tc.o, "."); err == nil || err.Error() != tc.want {
			t.Errorf("up with %+v: got error %v, want %s", tc.o, err, tc.want)
		}
	}
}
