// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package initramfs writes archives that the Linux kernel unpacks as its first
// file system: the "newc" format of cpio, as described in
// Documentation/driver-api/early-userspace/buffer-format.rst of Linux.
package initramfs

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
)

// Writer writes an archive. All files belong to root. The first error ends the
// archive; Close returns it.
type Writer struct {
	w     io.Writer
	inode int
	dirs  map[string]bool
	err   error
}

// NewWriter returns a Writer that writes to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w, dirs: map[string]bool{"": true}} }

// Types of a file in the archive, as in stat(2).
const (
	typeDirectory = 0o040000
	typeRegular   = 0o100000
	typeSymlink   = 0o120000
)

// File adds a regular file and its parent directories.
func (w *Writer) File(name string, mode fs.FileMode, data []byte) {
	w.parents(name)
	w.entry(name, typeRegular|uint32(mode.Perm()), data)
}

// Symlink adds a symbolic link and its parent directories.
func (w *Writer) Symlink(name, target string) {
	w.parents(name)
	w.entry(name, typeSymlink|0o777, []byte(target))
}

// Directory adds a directory and its parents, unless it is already there.
func (w *Writer) Directory(name string) {
	name = clean(name)
	if w.dirs[name] {
		return
	}
	w.parents(name)
	w.dirs[name] = true
	w.entry(name, typeDirectory|0o755, nil)
}

// CopyFile adds a file of this machine.
func (w *Writer) CopyFile(name, source string) {
	info, err := os.Stat(source)
	if err != nil {
		w.fail(err)
		return
	}
	data, err := os.ReadFile(source)
	if err != nil {
		w.fail(err)
		return
	}
	w.File(name, info.Mode(), data)
}

// CopyTree adds the regular files of a directory of this machine below name.
func (w *Writer) CopyTree(name, source string) {
	err := filepath.WalkDir(source, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		relative, err := filepath.Rel(source, file)
		if err != nil {
			return err
		}
		w.CopyFile(path.Join(name, relative), file)
		return w.err
	})
	if err != nil {
		w.fail(err)
	}
}

// Close ends the archive and returns the first error.
func (w *Writer) Close() error {
	w.entry("TRAILER!!!", 0, nil)
	return w.err
}

func (w *Writer) fail(err error) {
	if w.err == nil {
		w.err = err
	}
}

func (w *Writer) parents(name string) {
	w.Directory(path.Dir(clean(name)))
}

func clean(name string) string { return path.Clean(path.Join("/", name))[1:] }

// entry writes a header of thirteen 8-digit hexadecimal fields after the magic
// number, the name, and the data. The name and the data are each padded to a
// multiple of 4 bytes from the start of the entry.
func (w *Writer) entry(name string, mode uint32, data []byte) {
	if w.err != nil {
		return
	}
	if name != "TRAILER!!!" {
		name = clean(name)
	}
	if name == "" {
		return // the root directory exists
	}
	w.inode++
	const links, none = 1, 0
	header := "070701"
	for _, field := range []int{
		w.inode, int(mode), none, none, links, none, len(data), none, none, none, none, len(name) + 1, none,
	} {
		header += fmt.Sprintf("%08X", field)
	}
	header += name + "\x00"
	for _, part := range [][]byte{[]byte(header), padding(len(header)), data, padding(len(data))} {
		if _, err := w.w.Write(part); err != nil {
			w.fail(err)
			return
		}
	}
}

// padding returns the zeros that follow length bytes.
func padding(length int) []byte { return make([]byte, -length&3) }
