package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

// askRegistered is how often the helper is asked whether the kubelet has
// registered the plugin: it tells nobody by itself.
const askRegistered = 50 * time.Millisecond

// readyFile says that a plugin instance serves kubelet and hooks.
func readyFile(runDir, instance string) string { return filepath.Join(runDir, "ready", instance) }

// Ready returns nil if that plugin instance serves the kubelet and hooks. It is
// for another process, a probe: during a rolling update the old plugin must
// not end before the new one can do its work.
func Ready(runDir, instance string) error {
	_, err := os.Stat(readyFile(runDir, instance))
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("plugin %s is not registered with the kubelet yet", instance)
	}
	return err
}

// clearReady removes what a killed process of this pod has left.
func (d *Driver) clearReady() error {
	err := os.Remove(readyFile(d.options.RunDir, d.options.Instance))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// announce says so while it is so.
func (d *Driver) announce(ctx context.Context, helper *kubeletplugin.Helper) {
	file := readyFile(d.options.RunDir, d.options.Instance)
	tick := time.NewTicker(askRegistered)
	defer tick.Stop()
	for {
		if s := helper.RegistrationStatus(); s != nil && s.PluginRegistered {
			break
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
	logger := klog.FromContext(ctx)
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, nil, 0o600)); err != nil {
		logger.Error(err, "Say that the plugin is ready")
		return
	}
	logger.Info("Ready: registered with the kubelet")
	<-ctx.Done()
	if err := os.Remove(file); err != nil {
		logger.Error(err, "Take back that the plugin is ready")
	}
}
