// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/dra-shared/dra-driver-shared/test/cluster/build"
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
		{options{Nodes: 1, Gates: "some"},
			`--gates "some": must be all, capacity, default, no-capacity, no-granular-status, workload`},
		{
			options{Nodes: 1, Gates: "default", Versions: build.Versions{Kubernetes: "1.36"}},
			`--kubernetes: version "1.36": must have the form v1.37.1`,
		},
		{
			options{Nodes: 1, Gates: "default", Versions: build.Versions{Kubelet: "v1.36"}},
			`--kubelet: version "v1.36": must have the form v1.37.1`,
		},
	} {
		if err := c.up(t.Context(), tc.o, "."); err == nil || err.Error() != tc.want {
			t.Errorf("up with %+v: got error %v, want %s", tc.o, err, tc.want)
		}
	}
}

func TestKubeletGates(t *testing.T) {
	for _, tc := range []struct {
		versions build.Versions
		want     bool
	}{
		{build.Versions{}, false},
		{build.Versions{Kubernetes: "v1.34.4"}, true},
		{build.Versions{Kubernetes: "v1.37.1", Kubelet: "v1.34.4"}, true},
		{build.Versions{Kubernetes: "v1.37.1", Kubelet: "v1.35.4"}, false},
	} {
		gates, err := kubeletGates(options{Gates: "capacity", Versions: tc.versions})
		if err != nil || gates["KubeletCrashLoopBackOffMax"] != tc.want || !gates["DRAConsumableCapacity"] {
			t.Errorf("gates of %+v: got %v and error %v, want KubeletCrashLoopBackOffMax %t and DRAConsumableCapacity",
				tc.versions, gates, err, tc.want)
		}
	}
	if featureGates["capacity"]["KubeletCrashLoopBackOffMax"] {
		t.Error("the gates of the other components have KubeletCrashLoopBackOffMax")
	}
}
