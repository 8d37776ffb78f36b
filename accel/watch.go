// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package accel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fsnotify/fsnotify"
)

// Watch calls changed when device nodes that may match are created or removed,
// until ctx ends. It requires a Host from HostAt. It also watches directories that
// are created later.
func (h Host) Watch(ctx context.Context, matches []Match, changed func()) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch device nodes: %w: are there too many inotify instances (fs.inotify.max_user_instances)?",
			err)
	}
	defer watcher.Close()
	add := func() error { return h.addDirectories(watcher, matches) }
	if err := add(); err != nil {
		return err
	}
	changed() // for changes before the watch began
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-watcher.Errors:
			if !errors.Is(err, fsnotify.ErrEventOverflow) { // events were lost, and the watch continues
				return fmt.Errorf("watch device nodes: %w", err)
			}
		case event := <-watcher.Events:
			if event.Has(fsnotify.Write) || event.Has(fsnotify.Chmod) {
				continue
			}
		}
		if err := add(); err != nil {
			return err
		}
		changed()
	}
}

func (h Host) addDirectories(watcher *fsnotify.Watcher, matches []Match) error {
	for _, dir := range directories(matches) {
		err := watcher.Add(filepath.Join(h.dev, dir))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("watch /dev/%s: %w", dir, err)
		}
	}
	return nil
}

// directories returns the directories to watch, relative to /dev: /dev itself, where directories are created, and
// those with PCI device nodes or in the patterns.
func directories(matches []Match) []string {
	dirs := []string{"."}
	for _, m := range matches {
		if m.onPCI() {
			dirs = append(dirs, "accel", "dri")
		}
		for _, p := range m.Paths {
			dir := filepath.Dir(strings.TrimPrefix(p, "/dev/"))
			if i := strings.IndexAny(dir, `*?[\`); i >= 0 {
				dir = filepath.Dir(dir[:i] + "x") // the deepest directory without a pattern
			}
			dirs = append(dirs, dir)
		}
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}
