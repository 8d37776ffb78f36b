// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package bpffs_test

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/bpffs"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.Root) }

func TestMount(t *testing.T) {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := bpffs.Check(dir); !errors.Is(err, bpffs.ErrNotMounted) {
		t.Fatalf("Check of another file system: %v, want ErrNotMounted", err)
	}
	if mounted, err := bpffs.Mount(dir); err != nil || !mounted {
		t.Fatalf("Mount: %t, %v, want true", mounted, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := bpffs.Check(dir); err != nil {
		t.Error(err)
	}
	if mounted, err := bpffs.Mount(dir); err != nil || mounted {
		t.Errorf("second Mount: %t, %v, want false", mounted, err)
	}
}

func TestCheck_missingDirectory(t *testing.T) {
	err := bpffs.Check(t.TempDir() + "/missing")
	if !errors.Is(err, os.ErrNotExist) || errors.Is(err, bpffs.ErrNotMounted) {
		t.Errorf("%v, want a missing directory, which Mount cannot repair", err)
	}
}
