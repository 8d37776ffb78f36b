// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package files

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// testDirectory is a Directory that counts how many files it parses.
type testDirectory struct {
	*Directory[string]
	t      *testing.T
	parsed int
}

func newTestDirectory(t *testing.T) *testDirectory {
	d := &testDirectory{t: t}
	d.Directory = NewDirectory(filepath.Join(t.TempDir(), "d"), "", ".json", func(path string) (string, error) {
		d.parsed++
		raw, err := os.ReadFile(path)
		if err == nil && len(raw) == 0 {
			err = errors.New("empty")
		}
		return string(raw), err
	})
	return d
}

func (d *testDirectory) must(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *testDirectory) write(name, content string) {
	d.t.Helper()
	d.must(os.MkdirAll(d.path, 0o700))
	d.must(Replace(nil, "file", filepath.Join(d.path, name), []byte(content), Options{Mode: 0o600}))
}

// expect compares the files, in the form name=content, and how many were parsed.
func (d *testDirectory) expect(prefix string, parsed int, want ...string) {
	d.t.Helper()
	d.parsed = 0
	var got []string
	d.must(d.Each(prefix, func(name, value string, err error) {
		if err != nil {
			value = err.Error()
		}
		got = append(got, name+"="+value)
	}))
	if diff := cmp.Diff(want, got); diff != "" {
		d.t.Errorf("files (-want +got):\n%s", diff)
	}
	if d.parsed != parsed {
		d.t.Errorf("parsed %d files, want %d", d.parsed, parsed)
	}
}

func TestDirectory_Each_readsOnlyChangedFiles(t *testing.T) {
	d := newTestDirectory(t)
	d.expect("", 0) // the directory does not exist
	for _, name := range []string{"b_1", "a_1", "b_2", "c_1"} {
		d.write(name+".json", "1")
	}
	d.write("b_3.json.unreadable", "1")
	d.expect("", 4, "a_1.json=1", "b_1.json=1", "b_2.json=1", "c_1.json=1")
	d.expect("b_", 0, "b_1.json=1", "b_2.json=1")

	d.write("b_1.json", "2")
	d.must(os.Remove(filepath.Join(d.path, "a_1.json")))
	d.write("b_0.json", "1")
	d.expect("", 2, "b_0.json=1", "b_1.json=2", "b_2.json=1", "c_1.json=1")

	d.must(os.WriteFile(filepath.Join(d.path, "c_1.json"), nil, 0o600)) // in place
	d.expect("c", 1, "c_1.json=empty")
	d.expect("c", 0, "c_1.json=empty")
}

// Reading may fail for lack of resources, which no event of the file ends.
func TestDirectory_Each_readsAgainAfterSystemError(t *testing.T) {
	d := newTestDirectory(t)
	parse := d.parse
	d.parse = func(path string) (string, error) {
		d.parsed++
		return "", &os.PathError{Op: "open", Path: "a.json", Err: syscall.EMFILE}
	}
	d.write("a.json", "1")
	d.write("b.txt", "1")
	d.expect("", 1, "a.json=open a.json: too many open files")
	d.expect("", 1, "a.json=open a.json: too many open files")
	d.parse = parse
	d.expect("", 1, "a.json=1")
	d.expect("", 0, "a.json=1")
}

// A directory that could not be listed must not seem empty, or unchanged, to the next call.
func TestDirectory_Each_listsAgainAfterSystemError(t *testing.T) {
	d := newTestDirectory(t)
	d.write("a.json", "1")
	failing := func(string) ([]os.DirEntry, error) { return nil, syscall.EMFILE }
	expectFailures := func() {
		t.Helper()
		d.list = failing
		defer func() { d.list = os.ReadDir }()
		for range 2 {
			if err := d.Each("", func(string, string, error) {}); !errors.Is(err, syscall.EMFILE) {
				t.Errorf("Each returned the error %v, want %v", err, syscall.EMFILE)
			}
			if _, ok, err := d.Get("a.json"); ok || !errors.Is(err, syscall.EMFILE) {
				t.Errorf("Get returned %t and the error %v, want %v", ok, err, syscall.EMFILE)
			}
		}
	}
	expectFailures()
	d.expect("", 1, "a.json=1")
	d.must(os.Rename(d.path, d.path+".old"))
	d.write("b.json", "1")
	expectFailures()
	d.expect("", 1, "b.json=1")
}

func TestDirectory_Get(t *testing.T) {
	for name, unavailable := range map[string]bool{"with inotify": false, "without inotify": true} {
		t.Run(name, func(t *testing.T) {
			d := newTestDirectory(t)
			d.changes.unavailable = unavailable
			expect := func(want string, exists bool) {
				t.Helper()
				if got, ok, err := d.Get("a.json"); got != want || ok != exists || err != nil {
					t.Errorf("Get returned %q, %t, and error %v, want %q and %t", got, ok, err, want, exists)
				}
			}
			expect("", false)
			d.write("a.json", "1")
			d.write("a.json.json", "2")
			expect("1", true)
			d.write("a.json", "3")
			expect("3", true)
			d.must(os.Remove(filepath.Join(d.path, "a.json")))
			expect("", false)
		})
	}
}

func TestDirectory_Each_followsReplacedDirectory(t *testing.T) {
	d := newTestDirectory(t)
	d.write("a.json", "1")
	d.expect("", 1, "a.json=1")
	d.must(os.Rename(d.path, d.path+".old"))
	d.write("b.json", "1")
	d.expect("", 1, "b.json=1")
	d.must(os.RemoveAll(d.path))
	d.expect("", 0)
	d.write("c.json", "1")
	d.expect("", 1, "c.json=1")
}

func TestDirectory_Each_survivesDroppedEvents(t *testing.T) {
	raw, err := os.ReadFile("/proc/sys/fs/inotify/max_queued_events")
	if err != nil {
		t.Fatal(err)
	}
	var queue int
	if _, err := fmt.Sscan(string(raw), &queue); err != nil || queue > 1<<16 {
		t.Skipf("the kernel queues %d events (%v), too many to fill the queue", queue, err)
	}
	d := newTestDirectory(t)
	d.write("a.json", "1")
	d.expect("", 1, "a.json=1")
	for range queue {
		d.must(os.WriteFile(filepath.Join(d.path, "x"), nil, 0o600))
		d.must(os.Remove(filepath.Join(d.path, "x")))
	}
	d.write("a.json", "2")
	d.expect("", 1, "a.json=2")
}
