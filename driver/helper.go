// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"path/filepath"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// helper is the helper of package kubeletplugin, which serves the kubelet and publishes devices. The driver serves
// hooks shortly before the helper starts: attaching waits for the helper while holding the claim's lock.
type helper struct {
	*kubeletplugin.Helper // nil until started is closed
	started               chan struct{}
}

func newHelper() *helper { return &helper{started: make(chan struct{})} }

// set completes the helper once it has started.
func (h *helper) set(started *kubeletplugin.Helper) {
	h.Helper = started
	close(h.started)
}

// isStarted reports whether the helper has started.
func (h *helper) isStarted() bool {
	select {
	case <-h.started:
		return true
	default:
		return false
	}
}

// kubeletSocket returns the path of the socket where the helper serves the kubelet. The helper chooses the name.
func (o Options) kubeletSocket() string {
	name := "dra.sock"
	if o.RollingUpdate {
		name = "dra-" + o.Instance + ".sock"
	}
	return filepath.Join(o.PluginDir, name)
}
