// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package vminit

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"os/exec"

	"github.com/dra-shared/dra-driver-shared/test/lab/initramfs"
)

// Archive is the initramfs of a guest. Files can be added to it.
type Archive struct {
	*initramfs.Writer
	file   *os.File
	buffer *bufio.Writer
}

// NewArchive creates the file of an initramfs with what every guest has: this
// program as process 1, busybox for the commands that the kernel and the tests run,
// the modules in the directory modules, and the job.
func NewArchive(file string, job Job, modules string) (*Archive, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return nil, errors.New("busybox is missing: install the Debian package busybox-static")
	}
	raw, err := json.Marshal(job)
	if err != nil {
		return nil, err
	}
	f, err := os.Create(file)
	if err != nil {
		return nil, err
	}
	buffer := bufio.NewWriterSize(f, 1<<20)
	a := &Archive{Writer: initramfs.NewWriter(buffer), file: f, buffer: buffer}
	for _, dir := range []string{"dev", "proc", "sys", "tmp", "run", "etc", "root", OverlayDir} {
		a.Directory(dir)
	}
	a.CopyFile("init", self)
	a.CopyFile("bin/busybox", busybox)
	a.Symlink("sbin/modprobe", "../bin/busybox")
	a.File("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\n"))
	a.File("etc/group", 0o644, []byte("root:x:0:\n"))
	// Tests create their own links; these modules create some when they are loaded.
	a.File("etc/modprobe.conf", 0o644, []byte("options bonding max_bonds=0\noptions dummy numdummies=0\n"))
	a.CopyTree("lib/modules", modules)
	a.File(jobFile, 0o644, raw)
	return a, nil
}

// Close completes the archive and returns the first error.
func (a *Archive) Close() error {
	return errors.Join(a.Writer.Close(), a.buffer.Flush(), a.file.Close())
}
