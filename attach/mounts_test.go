// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The node mounts a directory noexec, which the plugin's own mount of it does not show.
func TestCheckMount_onNode(t *testing.T) {
	// The fields are those of proc(5): IDs, device, root, mount point, options, and the file system.
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
		"another directory":               {root + mount("2", dir+"-other", "rw,noexec"), ""},
		"option of the file system":       {root + "2 1 8:2 / " + dir + " rw - ext4 /dev/sda2 rw,noexec\n", ""},
		"file that does not list mounts":  {"no mounts\n", "on the node"},
		"file that this kernel shortened": {root + "2 1\n", "on the node"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "mountinfo")
			if err := os.WriteFile(file, []byte(tc.mounts), 0o600); err != nil {
				t.Fatal(err)
			}
			err := checkMount(dir, file)
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("checkMount of %s: %v, want an error that contains %q\n%s", dir, err, tc.want, tc.mounts)
			}
		})
	}
	if err := checkMount(dir, filepath.Join(dir, "absent")); err == nil {
		t.Error("checkMount with a file that does not exist: nil, want an error")
	}
}
