// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fstree represents the parts of /sys, /proc, and /dev that describe a machine's devices as one text file.
// Tests can then run device discovery for machines that the test environment does not have. Each line is one of
//
//	PATH -> TARGET      a symbolic link
//	PATH = TEXT         a file; TEXT uses the escapes of Go string literals
//	PATH c MAJOR:MINOR  a character device node
//
// Paths are relative to the machine's root. Directories are implied. Blank
// lines and lines that start with # are ignored.
package fstree

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"testing/fstest"
)

// Load parses the tree in the file at path.
func Load(path string) (fstest.MapFS, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	files, err := Parse(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return files, nil
}

// Parse reads a tree and returns it as a file system. An error names the line.
func Parse(r io.Reader) (fstest.MapFS, error) {
	files := fstest.MapFS{}
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, kind, value, err := cut(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %q: %w", n, line, err)
		}
		switch kind {
		case "->":
			files[name] = &fstest.MapFile{Mode: fs.ModeSymlink | 0o777, Data: []byte(value)}
		case "=":
			files[name] = &fstest.MapFile{Mode: 0o444, Data: []byte(value + "\n")}
		case "c":
			files[name] = &fstest.MapFile{Mode: fs.ModeDevice | fs.ModeCharDevice | 0o600, Data: []byte(value)}
		}
	}
	return files, lines.Err()
}

// cut splits a line into the path, the kind (->, =, or c), and the value with escapes resolved.
func cut(line string) (name, kind, value string, err error) {
	fields := strings.SplitN(line, " ", 3)
	if len(fields) == 2 && fields[1] == "=" {
		fields = append(fields, "")
	}
	if len(fields) != 3 || !fs.ValidPath(fields[0]) {
		return "", "", "", errors.New("want PATH -> TARGET, PATH = TEXT, or PATH c MAJOR:MINOR")
	}
	name, kind, value = fields[0], fields[1], fields[2]
	switch kind {
	case "->", "c":
	case "=":
		value, err = strconv.Unquote(`"` + strings.ReplaceAll(value, `"`, `\"`) + `"`)
	default:
		err = fmt.Errorf("unknown kind %q: want ->, =, or c", kind)
	}
	return name, kind, value, err
}

// Write creates the files and symbolic links of a tree below dir. It skips
// device nodes, which a file system mounted with nodev does not support.
func Write(files fstest.MapFS, dir string) error {
	for name, file := range files {
		at := filepath.Join(dir, name)
		if file.Mode&fs.ModeDevice != 0 {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return err
		}
		var err error
		if file.Mode&fs.ModeSymlink != 0 {
			err = os.Symlink(string(file.Data), at)
		} else {
			err = os.WriteFile(at, file.Data, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// functionFiles are the files of a PCI function's directory that Record copies.
var functionFiles = []string{"class", "vendor", "device", "numa_node", "product_name", "uevent"}

// deviceNodes are the patterns of the device nodes that Record copies.
var deviceNodes = []string{
	"dev/nvidia*", "dev/nvidia-caps/*", "dev/dri/*", "dev/accel/*", "dev/accel[0-9]*", "dev/kfd", "dev/infiniband/*",
}

// Record writes the tree of the machine with its file system at root: the PCI functions, driver files, and device nodes
// that the plugin discovers accelerators and NICs from. It skips files that the machine does not have.
func Record(root string, out io.Writer) error {
	r := recorder{root: root, out: out, modules: map[string]bool{}}
	functions, err := filepath.Glob(filepath.Join(root, "sys/bus/pci/devices/*"))
	if err != nil {
		return err
	}
	for _, f := range functions {
		r.function(f)
	}
	information, _ := filepath.Glob(filepath.Join(root, "proc/driver/nvidia/gpus/*/information"))
	for _, p := range information {
		r.file(p)
	}
	for _, pattern := range deviceNodes {
		paths, _ := filepath.Glob(filepath.Join(root, pattern))
		for _, p := range paths {
			r.node(p)
		}
	}
	return r.err
}

type recorder struct {
	root    string
	out     io.Writer
	modules map[string]bool // paths of kernel module versions already recorded
	err     error           // the first error
}

func (r *recorder) line(at, kind, value string) {
	name, err := filepath.Rel(r.root, at)
	if err == nil {
		_, err = fmt.Fprintln(r.out, name, kind, value)
	}
	if r.err == nil {
		r.err = err
	}
}

// isRecordedClass reports whether a PCI class is a network controller (02), a
// display controller (03), or a processing accelerator (12).
func isRecordedClass(class string) bool {
	return strings.HasPrefix(class, "0x02") || strings.HasPrefix(class, "0x03") || strings.HasPrefix(class, "0x12")
}

// function records the PCI function that link points to, if its class is recorded.
func (r *recorder) function(link string) {
	class, err := os.ReadFile(filepath.Join(link, "class"))
	if err != nil || !isRecordedClass(string(class)) {
		return
	}
	r.link(link)
	dir, err := filepath.EvalSymlinks(link)
	if err != nil {
		return
	}
	for _, name := range functionFiles {
		r.file(filepath.Join(dir, name))
	}
	r.link(filepath.Join(dir, "driver"))
	r.link(filepath.Join(dir, "subsystem"))
	uevents, _ := filepath.Glob(filepath.Join(dir, "*/*/uevent"))
	for _, p := range uevents {
		// Symbolic links such as driver and firmware_node lead out of the function's directory.
		info, err := os.Lstat(filepath.Dir(filepath.Dir(p)))
		if err == nil && info.IsDir() {
			r.file(p)
		}
	}
	if driver, err := os.Readlink(filepath.Join(dir, "driver")); err == nil {
		module := filepath.Join(r.root, "sys/module", strings.ReplaceAll(filepath.Base(driver), "-", "_"), "version")
		if !r.modules[module] {
			r.modules[module] = true
			r.file(module)
		}
	}
	nics, _ := filepath.Glob(filepath.Join(dir, "net/*"))
	for _, p := range nics {
		nic := filepath.Join(r.root, "sys/class/net", filepath.Base(p))
		r.link(nic)
		r.link(filepath.Join(p, "device"))
		r.file(filepath.Join(p, "speed"))
	}
}

func (r *recorder) link(at string) {
	if target, err := os.Readlink(at); err == nil {
		r.line(at, "->", target)
	}
}

func (r *recorder) file(at string) {
	raw, err := os.ReadFile(at)
	if err != nil {
		return // this machine does not have the file, or denies access
	}
	quoted := strconv.Quote(strings.TrimRight(string(raw), "\n"))
	r.line(at, "=", strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`))
}

func (r *recorder) node(at string) {
	info, err := os.Lstat(at)
	if err != nil || info.Mode()&fs.ModeDevice == 0 {
		return
	}
	if number, err := deviceNumber(info); err == nil {
		r.line(at, "c", number)
	}
}

// Sub returns the part of a tree below dir, with support for reading symbolic links.
// It panics if dir is not a valid path.
func Sub(files fstest.MapFS, dir string) fs.ReadLinkFS {
	sub, err := fs.Sub(files, path.Clean(dir))
	if err != nil {
		panic(err) // callers pass constant paths
	}
	links, ok := sub.(fs.ReadLinkFS)
	if !ok {
		panic("fs.Sub of a MapFS does not implement fs.ReadLinkFS")
	}
	return links
}
