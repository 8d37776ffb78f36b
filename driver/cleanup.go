package driver

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// leave gives the node back as it was, if this was the last plugin on it and no
// claim has a share here: it may be that the driver is being removed. If it is
// not, the next plugin makes anew what it needs, within milliseconds. As long
// as there are shares everything stays: pods run on, held to their grants.
func (d *Driver) leave(ctx context.Context) {
	logger := klog.FromContext(ctx)
	if len(d.succession.others(true))+len(d.succession.others(false)) > 0 {
		return
	}
	claims, err := filepath.Glob(filepath.Join(d.options.PluginDir, "claims", "*.json"))
	attached, listErr := d.attachments.List()
	if err = errors.Join(err, listErr); err != nil {
		logger.Error(err, "Whether claims have shares here cannot be told: all stays")
		return
	}
	if len(claims)+len(attached) > 0 {
		logger.Info("Claims have shares here: all that holds them to their grants stays", "claims", len(claims), "attached", len(attached))
		return
	}
	var failed error
	for _, k := range d.options.Kinds {
		failed = errors.Join(failed, k.Leave(ctx))
	}
	hooks, err := attach.Hooks(filepath.Dir(d.options.Hook))
	failed = errors.Join(failed, err)
	for _, hook := range hooks {
		failed = errors.Join(failed, files.Remove(d.options.Failpoints, "hook", hook, false))
	}
	// Directories go if nothing of anybody is in them; mount points stay.
	for _, dir := range []string{filepath.Dir(d.options.Hook), filepath.Join(d.options.PluginDir, "claims"), filepath.Join(d.options.PluginDir, "files"), filepath.Join(d.options.PluginDir, metadataDir), attach.SocketDir(d.options.RunDir), healthDir(d.options.RunDir), filepath.Join(d.options.RunDir, "attached")} {
		_ = os.Remove(dir)
	}
	if failed != nil {
		logger.Error(failed, "Give the node back as it was")
		return
	}
	logger.Info("No claim has a share here, and no other plugin runs: the node is as it was")
}
