// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package initramfs

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestWriter(t *testing.T) {
	source := t.TempDir()
	if err := os.WriteFile(filepath.Join(source, "tool"), []byte("abc"), 0o755); err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	w := NewWriter(&archive)
	w.Directory("/dev")
	w.Directory("dev")
	w.CopyTree("bin", source)
	w.Symlink("sbin/modprobe", "../bin/tool")
	w.File("/etc/passwd", 0o644, []byte("root"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"40755 dev ", "40755 bin ", "100755 bin/tool abc", "40755 sbin ", "120777 sbin/modprobe ../bin/tool",
		"40755 etc ", "100644 etc/passwd root", "0 TRAILER!!! ",
	}
	if diff := cmp.Diff(want, list(t, archive.Bytes())); diff != "" {
		t.Errorf("entries of the archive: (-want +got)\n%s", diff)
	}
}

func TestWriter_Close_returnsFirstError(t *testing.T) {
	w := NewWriter(&bytes.Buffer{})
	w.CopyFile("missing", filepath.Join(t.TempDir(), "missing"))
	w.File("later", 0o644, nil)
	if err := w.Close(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want an error that the file does not exist", err)
	}
}

// list reads an archive as the kernel does, and returns mode, name, and content of
// each entry.
func list(t *testing.T, archive []byte) (entries []string) {
	t.Helper()
	field := func(i int) int {
		raw, err := hex.DecodeString(string(archive[6+8*i : 6+8*i+8]))
		if err != nil {
			t.Fatal(err)
		}
		return int(raw[0])<<24 | int(raw[1])<<16 | int(raw[2])<<8 | int(raw[3])
	}
	align := func(n int) int { return (n + 3) &^ 3 }
	for len(archive) > 0 {
		if !bytes.HasPrefix(archive, []byte("070701")) {
			t.Fatalf("entry %d begins with %.6q, not with the magic number", len(entries), archive)
		}
		mode, size, nameSize := field(1), field(6), field(11)
		name := strings.TrimSuffix(string(archive[110:110+nameSize]), "\x00")
		archive = archive[align(110+nameSize):]
		entries = append(entries, strings.Join([]string{octal(mode), name, string(archive[:size])}, " "))
		archive = archive[align(size):]
	}
	return entries
}

func octal(mode int) string {
	if mode == 0 {
		return "0"
	}
	return strings.TrimPrefix(octal(mode>>3), "0") + string(rune('0'+mode&7))
}
