// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach/install"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// hookInstaller keeps the hook installed.
type hookInstaller struct {
	installation *install.Installation // nil if another program installs the hook
	path         string
	warnings     *warnings
	degradations *degradations
}

// install installs the hook and checks that it can run. This plugin must have
// taken over (see handover): otherwise a stopping plugin could remove the hook again.
func (h *hookInstaller) install(ctx context.Context) error {
	if h.installation == nil {
		return nil
	}
	if _, err := h.installation.Install(); err != nil {
		return err
	}
	return h.installation.Try(ctx)
}

// check returns an error if the runtime cannot run the hook.
func (h *hookInstaller) check() error {
	if h.installation == nil {
		return nil
	}
	return h.installation.Check()
}

// ensure installs the hook again if it was removed or changed. Without it, no
// container with a share starts. It reports whether it installed the hook.
func (h *hookInstaller) ensure(ctx context.Context) (installed bool) {
	found := h.check()
	if found == nil {
		// An earlier attempt, or another program, has ended the problem.
		h.warnings.end(v1alpha1.EventReasonHookMissing, "", v1alpha1.EventReasonHookInstalled, "the hook is installed")
		return false
	}
	logger := klog.FromContext(ctx)
	logger.Error(found, "The hook is missing or changed; reinstalling it")
	if _, err := h.installation.Install(); err != nil {
		logger.Error(err, "Failed to install the hook; retrying")
		h.warnings.warn(v1alpha1.EventReasonHookMissing, "", "containers with shares cannot start: "+err.Error())
		return false
	}
	h.warnings.warn(v1alpha1.EventReasonHookMissing, "", "containers with shares could not start: "+found.Error()+
		": does another program delete or change files in "+filepath.Dir(h.path)+"?")
	logger.Info("Reinstalled the hook", "path", h.path)
	h.warnings.end(v1alpha1.EventReasonHookMissing, "", v1alpha1.EventReasonHookInstalled, "the hook is installed again")
	return true
}

// watch installs the hook again, until ctx ends, as soon as it is removed.
func (h *hookInstaller) watch(ctx context.Context) error {
	if h.installation == nil {
		return nil
	}
	watcher, err := fsnotify.NewWatcher()
	watching := err == nil
	if watching {
		defer watcher.Close()
	} else {
		h.degradations.report(ctx, v1alpha1.DegradedHookNotWatched,
			"a removed hook is installed again up to "+resyncInterval.String()+" later", err)
		watcher = &fsnotify.Watcher{} // its nil channels never receive
	}
	tick := time.NewTicker(resyncInterval)
	defer tick.Stop()
	for {
		if watching {
			// The watch ended if the directory was removed.
			if err := watcher.Add(filepath.Dir(h.path)); err != nil {
				klog.FromContext(ctx).V(4).Info("Cannot watch the hook's directory yet", "err", err)
			}
		}
		if h.ensure(ctx) {
			continue
		}
		if !waitForChange(ctx, watcher, tick.C) {
			return nil
		}
	}
}

// waitForChange waits until the hook may have changed, or tick has an element. It returns false after ctx has ended.
func waitForChange(ctx context.Context, watcher *fsnotify.Watcher, tick <-chan time.Time) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-tick:
			return true
		case event := <-watcher.Events:
			// A failed installation creates and removes such a file, and would otherwise be repeated immediately.
			if !strings.HasSuffix(event.Name, files.TemporarySuffix) {
				return true
			}
		case err := <-watcher.Errors:
			klog.FromContext(ctx).Error(err, "Failed to watch the hook")
			return true
		}
	}
}
