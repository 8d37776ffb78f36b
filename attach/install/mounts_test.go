// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The node mounts a directory noexec, which the plugin's own mount of it does not show.
func TestCheckMount_onNode(t *testing.T) {
	// The fields follow proc(5): IDs, device, root, mount point, options, and the file system.
	const root = "1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
	dir := t.TempDir()
	mount := func(id, mountPoint, options string) string {
		return id + " 1 8:2 / " + mountPoint + " " + options + " shared:2 - ext4 /dev/sda2 rw\n"
	}
	parent := filepath.Dir(dir)
	for name, tc := range map[string]struct{ mounts, want string }{
		"root only":                       {root, ""},
		"noexec":                          {root + mount("2", dir, "rw,noexec"), dir + " is mounted noexec"},
		"noexec above":                    {root + mount("2", parent, "rw,noexec,relatime"), parent + " is mounted noexec"},
		"executable below noexec":         {root + mount("3", dir, "rw") + mount("2", parent, "rw,noexec"), ""},
		"covered by an executable mount":  {root + mount("2", dir, "rw,noexec") + mount("3", dir, "rw"), ""},
		"another name that begins alike":  {root + mount("2", dir[:len(dir)-1], "rw,noexec"), ""},
		"another directory":               {root + mount("2", dir+"-other", "rw,noexec"), ""},
		"option of the file system":       {root + "2 1 8:2 / " + dir + " rw - ext4 /dev/sda2 rw,noexec\n", ""},
		"file that does not list mounts":  {"no mounts\n", "on the node"},
		"file that this kernel shortened": {root + "2 1\n", "on the node"},
	} {
		t.Run(name, func(t *testing.T) { testCheckMount(t, dir, tc.mounts, tc.want) })
	}
	if err := checkMount(dir, filepath.Join(dir, "absent")); err == nil {
		t.Error("checkMount with a file that does not exist: nil, want an error")
	}
}

// testCheckMount checks dir with the mounts of a node. want is a part of the error; "" is none.
func testCheckMount(t *testing.T, dir, mounts, want string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "mountinfo")
	if err := os.WriteFile(file, []byte(mounts), 0o600); err != nil {
		t.Fatal(err)
	}
	err := checkMount(dir, file)
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("checkMount of %s: %v, want an error that contains %q\n%s", dir, err, want, mounts)
	}
}

// On the node, a part of the path is a symbolic link to a directory below /data. In the container of the plugin, the
// runtime has resolved it.
func TestCheckMount_symlinkOnNode(t *testing.T) {
	dir := t.TempDir()
	own, err := mountLocationOf(dir)
	if err != nil || own.path == "" {
		t.Fatalf("place of %s: %+v, %v", dir, own, err)
	}
	// mount returns a mount of the file system of dir that shows its directory root at mountPoint.
	mount := func(root, mountPoint, options string) string {
		return fmt.Sprintf("3 1 %d:%d %s %s %s shared:3 - ext4 /dev/sdb1 rw\n", own.major, own.minor, root, mountPoint,
			options)
	}
	path := func(options string) string { // of the file system that has the symbolic link
		return "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n" +
			"2 1 8:2 / " + filepath.Dir(dir) + " " + options + " - ext4 /dev/sda2 rw\n"
	}
	bound := "/data" + own.path
	for name, tc := range map[string]struct{ mounts, want string }{
		"noexec where the link is":    {path("rw,noexec") + mount("/", "/data", "rw"), ""},
		"noexec where the link leads": {path("rw") + mount("/", "/data", "rw,noexec"), "/data is mounted noexec"},
		"a part of the file system":   {path("rw") + mount(filepath.Dir(own.path), "/data", "rw,noexec"), "/data is"},
		"executable bind mount": {
			path("rw") + mount("/", "/data", "rw,noexec") + mount(own.path, bound, "rw"), "",
		},
		"noexec bind mount": {
			path("rw") + mount("/", "/data", "rw") + mount(own.path, bound, "rw,noexec"), bound + " is mounted noexec",
		},
		"another part of the file system": {path("rw") + mount("/other", "/data", "rw,noexec"), ""},
		"executable at another path":      {path("rw") + mount("/", "/a", "rw,noexec") + mount("/", "/b", "rw"), ""},
	} {
		t.Run(name, func(t *testing.T) { testCheckMount(t, dir, tc.mounts, tc.want) })
	}
}
