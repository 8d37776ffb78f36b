// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package files

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Directory keeps the parsed files of a directory in memory. The files are authoritative: other processes may change
// them. At each call, the Directory asks the kernel (inotify) which files have changed, and reads only those, so a
// call sees every change that was complete when it began. It is safe for concurrent use.
type Directory[T any] struct {
	path           string
	prefix, suffix string
	parse          func(path string) (T, error)
	list           func(path string) ([]os.DirEntry, error) // os.ReadDir, except in tests

	mu      sync.Mutex
	changes changes
	files   []*parsed[T] // by name
	// unread are the names of files that could not be read, such as for lack of descriptors. Each call tries again.
	unread map[string]bool
}

// parsed is the result of parsing a file. It is not modified.
type parsed[T any] struct {
	name  string
	file  fileID
	value T
	err   error
}

// fileID identifies the content of a file that is replaced, never modified.
type fileID struct {
	inode   uint64
	size    int64
	changed syscall.Timespec
}

// ErrUnlisted means that a directory could not be listed, so it is unknown which files it has.
var ErrUnlisted = errors.New("the directory cannot be listed")

// NewDirectory returns the Directory at path with the files that have the given name prefix and suffix. parse reads a
// file. NewDirectory does not access the disk; the first call to Each or Get does. A missing directory counts as
// empty.
func NewDirectory[T any](path, prefix, suffix string, parse func(path string) (T, error)) *Directory[T] {
	return &Directory[T]{
		path: path, prefix: prefix, suffix: suffix, parse: parse, list: os.ReadDir,
		changes: changes{fd: -1}, unread: map[string]bool{},
	}
}

// Path returns the path of a file.
func (d *Directory[T]) Path(name string) string { return filepath.Join(d.path, name) }

// Each calls do for the files with names that begin with prefix, in name order, with the result of parsing them. do
// must not modify the value. Each returns ErrUnlisted if the directory cannot be read.
func (d *Directory[T]) Each(prefix string, do func(name string, value T, err error)) error {
	files, err := d.current(prefix)
	for _, f := range files {
		do(f.name, f.value, f.err)
	}
	return err
}

// Get returns the result of parsing one file; ok is false if it does not exist. The caller
// must not modify the value.
func (d *Directory[T]) Get(name string) (value T, ok bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.changes.fd < 0 {
		d.changes.open(d.path)
		if d.changes.fd < 0 { // without inotify, read only this file
			d.read(name)
		} else {
			err = d.readAll()
		}
	} else {
		err = d.update()
	}
	if err != nil {
		return value, false, err
	}
	i, ok := d.find(name)
	if !ok {
		return value, false, nil
	}
	return d.files[i].value, true, d.files[i].err
}

// current returns the files with names that begin with prefix.
func (d *Directory[T]) current(prefix string) ([]*parsed[T], error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.update(); err != nil {
		return nil, err
	}
	first, _ := d.find(prefix)
	files := d.files[first:]
	end := slices.IndexFunc(files, func(f *parsed[T]) bool { return !strings.HasPrefix(f.name, prefix) })
	if end < 0 {
		end = len(files)
	}
	return slices.Clone(files[:end]), nil
}

// find returns a file's position, or where it belongs.
func (d *Directory[T]) find(name string) (i int, ok bool) {
	return slices.BinarySearchFunc(d.files, name, func(f *parsed[T], name string) int {
		return strings.Compare(f.name, name)
	})
}

// update reads the files that have changed. The caller holds d.mu.
func (d *Directory[T]) update() error {
	changed, all := d.changes.next(d.path)
	if all {
		return d.readAll()
	}
	for name := range d.unread {
		changed = append(changed, name)
	}
	for _, name := range changed {
		if d.includes(name) {
			d.read(name)
		}
	}
	return nil
}

// includes reports whether a file of that name is one of the Directory's.
func (d *Directory[T]) includes(name string) bool {
	return strings.HasPrefix(name, d.prefix) && strings.HasSuffix(name, d.suffix)
}

// readAll reads the directory, and the files that were not read before. If it fails, it closes d.changes, because
// later events do not name the files that it missed: the next call rereads the directory.
func (d *Directory[T]) readAll() error {
	entries, err := d.list(d.path) // sorted
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		d.changes.close()
		return fmt.Errorf("%w: %w", ErrUnlisted, err)
	}
	d.files = slices.DeleteFunc(d.files, func(f *parsed[T]) bool {
		_, listed := slices.BinarySearchFunc(entries, f.name, func(e os.DirEntry, name string) int {
			return strings.Compare(e.Name(), name)
		})
		return !listed
	})
	for _, e := range entries {
		if d.includes(e.Name()) {
			d.read(e.Name())
		}
	}
	return nil
}

// read reads a file unless it is unchanged since the last read, and forgets it if it no longer exists.
func (d *Directory[T]) read(name string) {
	i, known := d.find(name)
	read := &parsed[T]{name: name}
	path := d.Path(name)
	var stat syscall.Stat_t
	if read.err = syscall.Stat(path, &stat); read.err == nil {
		read.file = fileID{stat.Ino, stat.Size, stat.Ctim}
		if known && d.files[i].err == nil && d.files[i].file == read.file {
			return
		}
		read.value, read.err = d.parse(path)
	}
	delete(d.unread, name)
	if errno := syscall.Errno(0); errors.As(read.err, &errno) && errno != syscall.ENOENT {
		d.unread[name] = true
	}
	switch exists := !errors.Is(read.err, os.ErrNotExist); {
	case exists && known:
		d.files[i] = read
	case exists:
		d.files = slices.Insert(d.files, i, read)
	case known:
		d.files = slices.Delete(d.files, i, i+1)
	}
}

// changes finds a directory's changed files.
type changes struct {
	fd   int // of inotify; -1 if there is none
	stop runtime.Cleanup
	buf  []byte
	// unavailable makes open do nothing, in tests.
	unavailable bool
}

// watched are the events of inotify that announce a change.
const watched = unix.IN_CREATE | unix.IN_CLOSE_WRITE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_DELETE |
	unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

// next returns the names of the files that have changed since the last call. all reports whether any
// file may have changed: at the first call, after the kernel dropped events, after the directory
// was replaced, and at each call if this process cannot use inotify.
func (c *changes) next(dir string) (names []string, all bool) {
	if c.fd < 0 {
		c.open(dir)
		return nil, true
	}
	seen := map[string]bool{}
	for {
		n, err := unix.Read(c.fd, c.buf)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return names, false
		case err != nil || !c.parse(c.buf[:n], func(name string) {
			if !seen[name] {
				seen[name], names = true, append(names, name)
			}
		}):
			c.close()
			c.open(dir)
			return nil, true
		}
	}
}

// parse calls changed with the name of each changed file in a buffer of events. It returns false if files that the
// events do not name may have changed.
func (c *changes) parse(events []byte, changed func(name string)) bool {
	for len(events) >= unix.SizeofInotifyEvent {
		e := (*unix.InotifyEvent)(unsafe.Pointer(&events[0])) // struct inotify_event
		end := unix.SizeofInotifyEvent + int(e.Len)
		if e.Mask&(unix.IN_Q_OVERFLOW|unix.IN_IGNORED|unix.IN_DELETE_SELF|unix.IN_MOVE_SELF) != 0 || end > len(events) {
			return false
		}
		changed(unix.ByteSliceToString(events[unix.SizeofInotifyEvent:end]))
		events = events[end:]
	}
	return true
}

// open watches the directory, if possible.
func (c *changes) open(dir string) {
	if c.unavailable {
		return
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return // such as EMFILE: the user has too many instances
	}
	if _, err := unix.InotifyAddWatch(fd, dir, watched); err != nil {
		_ = unix.Close(fd)
		return
	}
	c.fd = fd
	if c.buf == nil {
		c.buf = make([]byte, 16<<10)
	}
	c.stop = runtime.AddCleanup(c, func(fd int) { _ = unix.Close(fd) }, fd)
}

func (c *changes) close() {
	if c.fd < 0 {
		return
	}
	c.stop.Stop()
	_ = unix.Close(c.fd)
	c.fd = -1
}
