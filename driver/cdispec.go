// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/driver/record"
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
			args = []string{"--run-dir=" + d.options.RunDir, "--claim=" + string(uid), "--share=" + s.Name}
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

// ensureSpec writes the CDI spec of a prepared claim if it is missing or
// differs: it may lie on a tmpfs.
func (d *Driver) ensureSpec(claim *record.Claim) error {
	want, err := d.cdiDevices(claim.UID, d.resolveAll(claim.Shares))
	if err != nil {
		return err
	}
	if d.specs.Holds(string(claim.UID), want) {
		return nil
	}
	return d.specs.Write(string(claim.UID), want)
}

// preparedDevices is the answer to the kubelet: the CDI devices of each
// request.
func (d *Driver) preparedDevices(ctx context.Context, claim *record.Claim) (devices []kubeletplugin.Device) {
	for _, s := range d.resolveAll(claim.Shares) {
		device := kubeletplugin.Device{
			Requests: []string{s.Request}, PoolName: s.Pool, DeviceName: s.Device,
			CDIDeviceIDs: []string{d.specs.ID(s.Name)}, Metadata: d.metadataOf(ctx, claim.UID, s),
		}
		if s.ShareID != "" {
			device.ShareID = &s.ShareID
		}
		devices = append(devices, device)
	}
	return devices
}
