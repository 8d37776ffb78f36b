// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/cdi"
)

// hookTimeout is the runtime's limit for one run of the hook, in seconds. The
// hook itself gives up earlier and reports the reason.
var hookTimeout = int(attach.DefaultWait.Seconds()) + 30

// cdiDevices returns the CDI devices of a claim, one per share.
func (d *Driver) cdiDevices(uid types.UID, shares []share) (devices []cdi.Device, err error) {
	for _, s := range shares {
		device := cdi.Device{Name: s.Name}
		if s.kind != nil {
			if device.Edits, err = s.kind.Edits(s.Share); err != nil {
				return nil, shareError(s.Share, err)
			}
		}
		args := device.Edits.Hook
		if s.attacher != nil {
			args = append([]string{"--run-dir=" + d.options.RunDir, "--claim=" + string(uid), "--share=" + s.Name}, args...)
		}
		if len(args) > 0 {
			device.Hook = &cdi.Hook{
				Path:    d.options.Hook,
				Timeout: hookTimeout,
				Args:    append([]string{"dra-shared-hook"}, args...),
			}
		}
		devices = append(devices, device)
	}
	return devices, nil
}

// writeSpec writes the CDI spec of a claim.
func (d *Driver) writeSpec(uid types.UID, shares []share) error {
	devices, err := d.cdiDevices(uid, shares)
	if err != nil {
		return err
	}
	if err := d.specs.Write(string(uid), devices); err != nil {
		return fmt.Errorf("write CDI spec: %w", err)
	}
	return nil
}

// ensureSpec writes the CDI spec of a prepared claim if the existing one is missing or unreadable,
// or names a hook that no longer exists. The spec of a claim that another release prepared stays
// unchanged: both plugins of a rolling update run this.
func (d *Driver) ensureSpec(uid types.UID, shares []share) error {
	want, err := d.cdiDevices(uid, shares)
	if err != nil || d.hasSpec(uid, want) {
		return err
	}
	return d.specs.Write(string(uid), want)
}

// hasSpec reports whether the CDI spec of a prepared claim with the wanted devices can be used.
func (d *Driver) hasSpec(uid types.UID, want []cdi.Device) bool {
	return d.specs.Holds(string(uid), want) && d.hasHook(uid)
}

// hasHook reports whether the hook that a claim's spec names exists. A missing hook of this
// release counts as present, because the plugin installs it again.
func (d *Driver) hasHook(uid types.UID) bool {
	if d.options.Installation == nil {
		return true
	}
	hooks, err := d.specs.HooksOf(string(uid))
	return err == nil && !slices.ContainsFunc(hooks, func(path string) bool {
		if path == d.options.Hook {
			return false // the plugin installs it again if it is missing
		}
		_, err := os.Stat(path)
		return errors.Is(err, os.ErrNotExist)
	})
}

// preparedDevices returns the response to the kubelet: the CDI devices of each
// request.
func (d *Driver) preparedDevices(
	ctx context.Context, uid types.UID, shares []share,
) (devices []kubeletplugin.Device) {
	for _, s := range shares {
		device := kubeletplugin.Device{
			Requests: []string{s.Request}, PoolName: s.Pool, DeviceName: s.Device,
			CDIDeviceIDs: []string{d.specs.ID(s.Name)}, Metadata: d.metadataOf(ctx, uid, s, nil),
		}
		if s.ShareID != "" {
			device.ShareID = &s.ShareID
		}
		devices = append(devices, device)
	}
	return devices
}
