// Package fstree keeps what /sys, /proc and /dev of a machine say about its
// devices as one text, so that discovery can be tested on machines that are not
// there. A line is one of
//
//	PATH -> TARGET      a symbolic link
//	PATH = TEXT         a file (Go's escapes in TEXT)
//	PATH c MAJOR:MINOR  a device node
//
// with paths relative to the machine's root. Directories are implied.
package fstree

import (
	"bufio"
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

// Load reads a tree from a file.
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

// Parse reads a tree as a file system.
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

func cut(line string) (name, kind, value string, err error) {
	fields := strings.SplitN(line, " ", 3)
	if len(fields) == 2 && fields[1] == "=" {
		fields = append(fields, "")
	}
	if len(fields) != 3 || !fs.ValidPath(fields[0]) {
		return "", "", "", fmt.Errorf("want PATH -> TARGET, PATH = TEXT or PATH c MAJOR:MINOR")
	}
	name, kind, value = fields[0], fields[1], fields[2]
	switch kind {
	case "->", "c":
	case "=":
		value, err = strconv.Unquote(`"` + strings.ReplaceAll(value, `"`, `\"`) + `"`)
	default:
		err = fmt.Errorf("%q is none of -> = c", kind)
	}
	return name, kind, value, err
}

// Write makes the tree's files and links below a directory. Device nodes are
// left out: they need a file system that allows them.
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

// read are the files of a PCI function that a tree keeps.
var read = []string{"class", "vendor", "device", "numa_node", "product_name", "uevent"}

// Record writes what a machine says of those PCI functions and nodes that
// accelerators and NICs are found by.
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
	for _, pattern := range []string{"dev/nvidia*", "dev/nvidia-caps/*", "dev/dri/*", "dev/accel/*", "dev/accel[0-9]*", "dev/kfd", "dev/infiniband/*"} {
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
	modules map[string]bool // whose versions are recorded
	err     error
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

// function records a display, network or accelerator function: the classes 02,
// 03 and 12.
func (r *recorder) function(link string) {
	class, err := os.ReadFile(filepath.Join(link, "class"))
	if err != nil || !strings.HasPrefix(string(class), "0x02") && !strings.HasPrefix(string(class), "0x03") && !strings.HasPrefix(string(class), "0x12") {
		return
	}
	r.link(link)
	dir, err := filepath.EvalSymlinks(link)
	if err != nil {
		return
	}
	for _, name := range read {
		r.file(filepath.Join(dir, name))
	}
	r.link(filepath.Join(dir, "driver"))
	r.link(filepath.Join(dir, "subsystem"))
	uevents, _ := filepath.Glob(filepath.Join(dir, "*/*/uevent"))
	for _, p := range uevents {
		subsystem := filepath.Dir(filepath.Dir(p))
		if info, err := os.Lstat(subsystem); err == nil && info.IsDir() { // driver, firmware_node, ... are links to elsewhere
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
		return // this machine does not say
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

// Sub is fs.Sub for a tree: what a machine has below one of its directories.
func Sub(files fstest.MapFS, dir string) fs.ReadLinkFS {
	sub, err := fs.Sub(files, path.Clean(dir))
	if err != nil {
		panic(err) // the name is a constant
	}
	links, ok := sub.(fs.ReadLinkFS)
	if !ok {
		panic("a MapFS has links")
	}
	return links
}
