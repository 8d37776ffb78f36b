// Package files changes files so that whoever reads them, also after a crash,
// sees the old content or the new, never half of one.
package files

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
)

// TemporarySuffix is that of files that are being written. One that stays has
// been left by a process that was killed; the next write of the file that it
// was to become replaces it.
const TemporarySuffix = ".writing"

// Options of Replace.
type Options struct {
	Mode os.FileMode
	// Durable: what is written outlives a crash of the node (fsync of file
	// and directory).
	Durable bool
	// Check refuses what was written, before anybody else can see it. Optional.
	Check func(path string) error
}

// Replace writes a file. what names it in steps. One writer at a time.
func Replace(failpoints failpoint.Injector, what, path string, content []byte, o Options) error {
	temporary := path + TemporarySuffix
	err := failpoints.Do("write "+what, func() error { return write(temporary, content, o) })
	if err == nil && o.Check != nil {
		err = o.Check(temporary)
	}
	if err == nil {
		err = failpoints.Do("rename "+what, func() error { return os.Rename(temporary, path) })
	}
	if err != nil {
		if removeErr := os.Remove(temporary); !errors.Is(removeErr, os.ErrNotExist) {
			err = errors.Join(err, removeErr)
		}
		return describe(err)
	}
	if !o.Durable {
		return nil
	}
	return syncDir(filepath.Dir(path))
}

func write(path string, content []byte, o Options) error {
	// O_TRUNC: a process that was killed may have left one.
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, o.Mode)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil && o.Durable {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// Rewrite changes a file that others may have mounted: what they see is the
// file itself, not its name. One that has that content already is left alone;
// one that does not exist is made as by Replace. A crash may leave half of the
// content.
func Rewrite(failpoints failpoint.Injector, what, path string, content []byte, o Options) error {
	old, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return Replace(failpoints, what, path, content, o)
	}
	if err != nil || bytes.Equal(old, content) {
		return err
	}
	return describe(failpoints.Do("rewrite "+what, func() error {
		f, err := os.OpenFile(path, os.O_WRONLY, o.Mode)
		if err != nil {
			return err
		}
		_, err = f.WriteAt(content, 0)
		if err == nil {
			err = f.Truncate(int64(len(content)))
		}
		return errors.Join(err, f.Close())
	}))
}

// Remove removes a file, durably if it has to be. It is no error if there is
// none.
func Remove(failpoints failpoint.Injector, what, path string, durable bool) error {
	err := failpoints.Do("remove "+what, func() error { return os.Remove(path) })
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil || !durable {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// syncDir makes a directory's entries durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func describe(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w: free some space (or inodes) on the node; nothing was changed, and it is tried again", err)
	case errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w: the node's file system has become read-only: see its kernel log", err)
	default:
		return err
	}
}
