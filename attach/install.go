package attach

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Install copies the hook to a directory of the node and returns its path
// there, which names its content: a version that runs, or that a container's
// CDI spec names, is never overwritten.
func Install(source, dir string) (string, error) {
	content, err := os.ReadFile(source)
	if err != nil {
		return "", fmt.Errorf("read the hook: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(dir, &stat); err != nil {
		return "", fmt.Errorf("look at %s: %w", dir, err)
	}
	if stat.Flags&unix.ST_NOEXEC != 0 {
		return "", fmt.Errorf("%s is mounted noexec: the runtime could not run the hook; choose another directory (--hook-dir)", dir)
	}
	path := filepath.Join(dir, fmt.Sprintf("dra-shared-hook-%x", sha256.Sum256(content))[:len("dra-shared-hook-")+16])
	if there, err := os.ReadFile(path); err == nil && bytes.Equal(there, content) {
		return path, nil
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	return path, writeExecutable(path, content)
}

func writeExecutable(path string, content []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".installing-")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = errors.Join(f.Chmod(0o755), f.Sync())
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("install the hook: %w", err), os.Remove(f.Name()))
	}
	return nil
}
