// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package lock provides mutual exclusion between plugins, and between goroutines of one
// plugin. Two plugins run during a rolling update; they use common lock files (flock).
// The kernel releases a lock when its process exits, even after a crash.
package lock

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// Dir is a directory of lock files, on a filesystem that a reboot clears. The files are empty.
type Dir string

// buckets is the number of lock files that plugins of earlier releases use for all keys together. They lock a key's
// bucket exclusively; this release takes a shared lock on it, so only plugins of earlier releases wait.
const buckets = 64

// Path returns the path of the plugins' lock directory below their run directory.
func Path(runDir string) string { return filepath.Join(runDir, "locks") }

// Open opens the directory, and creates it if it does not exist. It creates all bucket files, so the directory does
// not grow with the keys.
func Open(path string) (Dir, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return "", fmt.Errorf("open the lock directory: %w", err)
	}
	for i := range uint32(buckets) {
		f, err := os.OpenFile(filepath.Join(path, bucketFile(i)), os.O_RDONLY|os.O_CREATE, 0o600)
		if err == nil {
			err = f.Close()
		}
		if err != nil {
			return "", fmt.Errorf("open the lock directory: %w", err)
		}
	}
	return Dir(path), nil
}

// Key waits for the lock of a key and returns the function that releases it. It gives up when ctx ends, and returns
// the cause. A caller must not hold two keys. The key's file exists only while the lock is held.
func (d Dir) Key(ctx context.Context, key string) (release func(), err error) {
	releaseBucket, err := d.acquireContext(ctx, bucket(key), unix.LOCK_SH)
	if err != nil {
		return nil, err
	}
	releaseKey, err := d.acquireContext(ctx, keyFile(key), unix.LOCK_EX)
	if err != nil {
		releaseBucket()
		return nil, err
	}
	return func() {
		releaseKey()
		releaseBucket()
	}, nil
}

// keyPrefix is the name prefix of keys' lock files.
const keyPrefix = "key-"

// keyFile returns the name of a key's lock file. Keys may contain characters that file names may not.
func keyFile(key string) string {
	h := fnv.New64a()
	_, _ = h.Write([]byte(key)) // never fails
	return fmt.Sprintf("%s%016x", keyPrefix, h.Sum64())
}

// bucket returns the name of a key's lock file in earlier releases.
func bucket(key string) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key)) // never fails
	return bucketFile(h.Sum32() % buckets)
}

func bucketFile(number uint32) string { return fmt.Sprintf("%02x", number) }

// Named waits for the lock of a name and returns the function that releases it.
func (d Dir) Named(name string) (release func(), err error) {
	return d.acquire(name, unix.LOCK_EX, nil)
}

// NamedContext is like Named, but gives up when ctx ends, and returns the cause.
func (d Dir) NamedContext(ctx context.Context, name string) (release func(), err error) {
	return d.acquireContext(ctx, name, unix.LOCK_EX)
}

// acquireContext is like acquire, but gives up when ctx ends, and returns the cause.
func (d Dir) acquireContext(ctx context.Context, name string, how int) (release func(), err error) {
	if release, err := d.acquire(name, how|unix.LOCK_NB, nil); !errors.Is(err, unix.EWOULDBLOCK) {
		return release, err
	}
	type result struct {
		release func()
		err     error
	}
	acquired := make(chan result, 1)
	go func() { // flock waits without regard to ctx
		release, err := d.acquire(name, how, ctx.Done())
		acquired <- result{release, err}
	}()
	select {
	case r := <-acquired:
		if !errors.Is(r.err, errAbandoned) {
			return r.release, r.err
		}
	case <-ctx.Done():
		go func() {
			if r := <-acquired; r.err == nil {
				r.release()
			}
		}()
	}
	return nil, fmt.Errorf("wait for the lock %s: %w", name, context.Cause(ctx))
}

// TryNamed acquires a name's lock if it is free, and reports whether it was.
func (d Dir) TryNamed(name string) (release func(), ok bool, err error) {
	release, err = d.acquire(name, unix.LOCK_EX|unix.LOCK_NB, nil)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, false, nil
	}
	return release, err == nil, err
}

// Remove removes a lock's file. The caller must hold the lock and no longer need it: waiting callers create another
// file.
func (d Dir) Remove(name string) { _ = os.Remove(filepath.Join(string(d), name)) }

// errAbandoned reports that the caller no longer waits for the lock.
var errAbandoned = errors.New("the caller no longer waits")

// acquire opens and locks a lock's file. It does not create files after abandoned was closed. The function that
// releases a key's lock removes its file.
func (d Dir) acquire(name string, how int, abandoned <-chan struct{}) (release func(), err error) {
	for {
		select {
		case <-abandoned:
			return nil, errAbandoned
		default:
		}
		f, err := d.lockFile(name, how)
		if err != nil {
			return nil, err
		}
		if d.isFile(f, name) {
			return func() {
				if strings.HasPrefix(name, keyPrefix) {
					d.Remove(name)
				}
				_ = f.Close() // closing the last descriptor releases the lock
			}, nil
		}
		_ = f.Close() // the last holder removed the file after it was opened here
	}
}

// isFile reports whether f is still the lock's file.
func (d Dir) isFile(f *os.File, name string) bool {
	own, err := f.Stat()
	if err != nil {
		return false
	}
	current, err := os.Stat(filepath.Join(string(d), name))
	return err == nil && os.SameFile(own, current)
}

// lockFile opens a lock's file, creates it if it does not exist, and locks it.
func (d Dir) lockFile(name string, how int) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(string(d), name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := files.Flock(f, how); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
	}
	return f, nil
}
