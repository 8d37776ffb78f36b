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

// claimSpecs are the CDI specs of claims. It computes what they contain.
type claimSpecs struct {
	*cdi.Specs
	runDir string
	hook   *hookInstaller
}

// devices returns the CDI devices of a claim, one per share.
func (c *claimSpecs) devices(uid types.UID, shares []share) (devices []cdi.Device, err error) {
	for _, s := range shares {
		device := cdi.Device{Name: s.Name}
		if s.kind != nil {
			if device.Edits, err = s.kind.Edits(s.Share); err != nil {
				return nil, shareError(s.Share, err)
			}
		}
		args := device.Edits.Hook
		if s.attacher != nil {
			args = append([]string{"--run-dir=" + c.runDir, "--claim=" + string(uid), "--share=" + s.Name}, args...)
		}
		if len(args) > 0 {
			device.Hook = &cdi.Hook{
				Path:    c.hook.path,
				Timeout: hookTimeout,
				Args:    append([]string{"dra-shared-hook"}, args...),
			}
		}
		devices = append(devices, device)
	}
	return devices, nil
}

// write writes the CDI spec of a claim.
func (c *claimSpecs) write(uid types.UID, shares []share) error {
	devices, err := c.devices(uid, shares)
	if err != nil {
		return err
	}
	if err := c.Write(string(uid), devices); err != nil {
		return fmt.Errorf("write CDI spec: %w", err)
	}
	return nil
}

// ensure writes the CDI spec of a prepared claim if the existing one is missing or unreadable,
// or names a hook that no longer exists. The spec of a claim that another release prepared stays
// unchanged: both plugins of a rolling update run this.
func (c *claimSpecs) ensure(uid types.UID, shares []share) error {
	want, err := c.devices(uid, shares)
	if err != nil || c.has(uid, want) {
		return err
	}
	return c.Write(string(uid), want)
}

// has reports whether the CDI spec of a prepared claim with the wanted devices can be used.
func (c *claimSpecs) has(uid types.UID, want []cdi.Device) bool {
	return c.Holds(string(uid), want) && c.hasHook(uid)
}

// hasHook reports whether the hook that a claim's spec names exists. A missing hook of this
// release counts as present, because the plugin installs it again.
func (c *claimSpecs) hasHook(uid types.UID) bool {
	if c.hook.installation == nil {
		return true
	}
	hooks, err := c.HooksOf(string(uid))
	return err == nil && !slices.ContainsFunc(hooks, func(path string) bool {
		if path == c.hook.path {
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
			CDIDeviceIDs: []string{d.specs.ID(s.Name)}, Metadata: d.deviceMetadata.describe(ctx, uid, s, nil),
		}
		if s.ShareID != "" {
			device.ShareID = &s.ShareID
		}
		devices = append(devices, device)
	}
	return devices
}
