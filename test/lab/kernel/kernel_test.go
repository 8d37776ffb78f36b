// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNewest(t *testing.T) {
	names := []string{
		"linux-image-6.1.0-9-cloud-amd64", "linux-image-6.1.0-10-cloud-amd64", "linux-image-6.1.0-10-amd64",
		"linux-image-6.1.0-10-rt-amd64", "linux-image-6.1.0-11-cloud-amd64-dbg",
		"linux-image-6.12-cloud-amd64", "linux-image-6.12.9+deb12-cloud-amd64", "linux-image-6.12.100+deb12-cloud-amd64",
		"linux-image-6.12.100+deb12-amd64", "linux-image-6.12.100+deb12-cloud-amd64-unsigned",
		"linux-image-6.17.13+deb13+1-cloud-amd64",
	}
	for _, tc := range []struct{ selector, want string }{
		{"6.1", "linux-image-6.1.0-10-cloud-amd64"},
		{"6.1-amd64", "linux-image-6.1.0-10-amd64"},
		{"6.12", "linux-image-6.12.100+deb12-cloud-amd64"},
		{"6.12-rt-amd64", ""},
		{"6.17", "linux-image-6.17.13+deb13+1-cloud-amd64"},
		{"linux-image-6.1.0-9-cloud-amd64", "linux-image-6.1.0-9-cloud-amd64"},
		{"linux-image-6.1.0", ""},
	} {
		if got := newest(tc.selector, names); got != tc.want {
			t.Errorf("newest package for %s: got %q, want %q", tc.selector, got, tc.want)
		}
	}
}

func TestFetch_rejectsSelector(t *testing.T) {
	for _, selector := range []string{"", "6", "6.12.1", "newest", "6.12-../x", "linux-image-amd64"} {
		_, err := Fetch(t.Context(), selector, t.TempDir())
		if err == nil || !strings.Contains(err.Error(), "want a series") {
			t.Errorf("kernel %q: got %v, want an error that names the forms of a selector", selector, err)
		}
	}
}

func TestFromCache_choosesNewestCompleteKernel(t *testing.T) {
	cache := t.TempDir()
	for _, name := range []string{"linux-image-6.1.0-9-cloud-amd64_6.1.1-1", "linux-image-6.1.0-12-cloud-amd64_6.1.4-1"} {
		boot := filepath.Join(cache, name, "boot")
		if err := os.MkdirAll(boot, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(boot, "vmlinuz-"+name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	k, err := fromCache("6.1", cache)
	if err != nil {
		t.Fatal(err)
	}
	if want := "linux-image-6.1.0-12-cloud-amd64_6.1.4-1"; k.Release != want {
		t.Errorf("release: got %s, want %s", k.Release, want)
	}
	if _, err := fromCache("6.12", cache); err == nil {
		t.Error("a series that the cache lacks: got no error")
	}
}

func TestResolve(t *testing.T) {
	const dep = `kernel/net/sched/sch_htb.ko.xz:
kernel/drivers/net/ipvlan/ipvlan.ko.xz: kernel/net/a.ko.xz kernel/net/b.ko.xz
kernel/net/a.ko.xz: kernel/net/b.ko.xz
kernel/net/b.ko.xz:
kernel/drivers/virtio-net.ko: kernel/net/b.ko.xz
`
	for _, tc := range []struct {
		name     string
		patterns []string
		want     []string
	}{
		{"what a module needs comes first", []string{"ipvlan"},
			[]string{"kernel/net/b.ko.xz", "kernel/net/a.ko.xz", "kernel/drivers/net/ipvlan/ipvlan.ko.xz"}},
		{"a pattern", []string{"sch_*"}, []string{"kernel/net/sched/sch_htb.ko.xz"}},
		{"hyphens are underscores", []string{"virtio_net"}, []string{"kernel/net/b.ko.xz", "kernel/drivers/virtio-net.ko"}},
		{"no match", []string{"netdevsim"}, nil},
	} {
		got, err := resolve(dep, tc.patterns)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", tc.name, diff)
		}
	}
	if _, err := resolve("no colon\n", nil); err == nil {
		t.Error("a line without a colon: got no error")
	}
}
