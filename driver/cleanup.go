// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/attach/install"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/files"
	"github.com/dra-shared/dra-driver-shared/internal/probe"
)

// cleanup restores the node to the state before the driver was installed, if no
// claim holds a share: this was the node's last plugin, and the driver may be about
// to be removed. If it is not removed, the next plugin sets up its state within
// milliseconds. While claims hold shares, all state stays: their pods continue to
// run with their limits.
func (d *Driver) cleanup(ctx context.Context) {
	logger := klog.FromContext(ctx)
	claims, err := filepath.Glob(filepath.Join(record.Dir(d.options.PluginDir), "*.json"))
	attached, listErr := d.records.attachments.List()
	if err = errors.Join(err, listErr); err != nil {
		logger.Error(err, "Failed to read the records; skipping cleanup")
		return
	}
	if len(claims)+len(attached) > 0 {
		logger.Info(
			"Claims still have shares; keeping the state of the node",
			"claimCount",
			len(claims),
			"attachmentCount",
			len(attached),
		)
		return
	}
	err = errors.Join(d.cleanupKinds(ctx), d.removeHooks())
	d.removeEmptyDirs()
	if err != nil {
		logger.Error(err, "Failed to clean up the node")
		return
	}
	logger.Info("No prepared claims remain; restored the node's original state")
}

func (d *Driver) cleanupKinds(ctx context.Context) (failed error) {
	for _, cleaner := range kindsOf[Cleaner](d.kinds) {
		failed = errors.Join(failed, cleaner.Cleanup(ctx))
	}
	return failed
}

func (d *Driver) removeHooks() error {
	hooks, failed := install.Hooks(filepath.Dir(d.options.Hook))
	for _, hook := range hooks {
		failed = errors.Join(failed, files.Remove(d.options.Failpoints, "hook", hook))
	}
	return failed
}

// removeEmptyDirs removes the driver's directories. A directory that contains
// other files, or is a mount point, stays.
func (d *Driver) removeEmptyDirs() {
	o := d.options
	for _, dir := range []string{
		filepath.Dir(o.Hook), record.Dir(o.PluginDir), cdi.FilesDir(o.PluginDir), filepath.Join(o.PluginDir, metadataDir),
		attach.SocketDir(o.RunDir), probe.Dir(o.RunDir), attach.RecordsDir(o.RunDir),
	} {
		_ = os.Remove(dir)
	}
}
