// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"context"
	"testing"

	"github.com/fsnotify/fsnotify"

	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// An installation that fails creates and removes a temporary file. If that counted as a change, the plugin would
// install the hook without a pause.
func TestWaitForChange_ignoresTemporaryFiles(t *testing.T) {
	for name, want := range map[string]bool{"hook": true, "hook" + files.TemporarySuffix: false} {
		watcher := &fsnotify.Watcher{Events: make(chan fsnotify.Event)}
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			watcher.Events <- fsnotify.Event{Name: name, Op: fsnotify.Create}
			cancel()
		}()
		if got := driver.WaitForChange(ctx, watcher, nil); got != want {
			t.Errorf("WaitForChange returned %t after %s was created, want %t", got, name, want)
		}
		cancel()
	}
}
