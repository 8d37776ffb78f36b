// Package lock keeps plugins, and goroutines of one plugin, from working on the
// same thing at once. Two plugins run during a rolling update: what they both
// may touch is locked by files that they have in common (flock), which the
// kernel lets go when a process ends, however it ends.
package lock

import (
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Dir is a directory of lock files. Its file system forgets them with the
// boot; nothing is in them.
type Dir string

// buckets bounds the number of lock files: two keys may share one.
const buckets = 64

// Open creates the directory if need be.
func Open(path string) (Dir, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return "", fmt.Errorf("open the directory of locks: %w", err)
	}
	return Dir(path), nil
}

// Key waits for the lock of a key, and returns what lets it go. Nobody may hold
// two keys.
func (d Dir) Key(key string) (release func(), err error) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key)) // never fails
	return d.take(fmt.Sprintf("%02x", h.Sum32()%buckets), unix.LOCK_EX)
}

// Named waits for the lock of a name.
func (d Dir) Named(name string) (release func(), err error) { return d.take(name, unix.LOCK_EX) }

// TryNamed takes the lock of a name if nobody has it.
func (d Dir) TryNamed(name string) (release func(), ok bool, err error) {
	release, err = d.take(name, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, false, nil
	}
	return release, err == nil, err
}

// Remove removes the file of a lock that the caller holds, and nobody will ask
// for again.
func (d Dir) Remove(name string) { _ = os.Remove(filepath.Join(string(d), name)) }

func (d Dir) take(name string, how int) (release func(), err error) {
	for {
		f, err := d.lockFile(name, how)
		if err != nil {
			return nil, err
		}
		if d.isFile(f, name) {
			return func() { _ = f.Close() }, nil // with the last descriptor goes the lock
		}
		_ = f.Close() // removed by its last holder, as it was opened
	}
}

func (d Dir) isFile(f *os.File, name string) bool {
	own, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Stat(filepath.Join(string(d), name))
	return err == nil && os.SameFile(own, there)
}

func (d Dir) lockFile(name string, how int) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(string(d), name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		if err = unix.Flock(int(f.Fd()), how); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
	}
	return f, nil
}
