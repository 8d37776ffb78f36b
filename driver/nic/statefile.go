// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/files"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/dhcp"
)

// stateFileVersion is the version of the file that this release writes and reads.
const stateFileVersion = 1

// stateFile is what the plugin records about the configured NICs until the node reboots, because the kernel no longer
// reports it once a NIC has lost its carrier or default route. Plugins pass it on in a file, which only the newest
// one writes.
//
// The methods are not safe for concurrent use.
type stateFile struct {
	path       string // see Options.StateFile; "" if there is no file
	failpoints failpoint.Injector

	nics map[string]nicState // by name of the interface
	// since is when the first plugin after the boot started, as a time since the boot; 0 before load.
	since time.Duration
	// saved is the content of the file, as far as this plugin has read or written it.
	saved []byte
	// unreadable is the last logged reason why the file cannot be read.
	unreadable string
}

// stateFileContent is the content of the file. The names belong to version 1 and must not change, because plugins of
// two releases use the file during an upgrade.
type stateFileContent struct {
	Version int                 `json:"version"`
	Since   int64               `json:"since"` // in milliseconds since the boot
	NICs    map[string]nicState `json:"nics"`
}

// nicState is what the plugin records about a NIC.
type nicState struct {
	Speed  uint64 `json:"speed,omitempty"`  // the last known one, in bits per second
	Uplink bool   `json:"uplink,omitempty"` // see netdev.NIC
}

// list returns the node's NICs, with what is recorded about them. It locks k.mu, but not while it lists the NICs.
func (k *Kind) list(ctx context.Context) ([]netdev.NIC, error) {
	k.mu.Lock()
	if k.devices == nil { // until the first Refresh, which writes the file
		k.stateFile.load(ctx)
		k.inventory.AddUplinks(k.stateFile.uplinks())
	}
	k.mu.Unlock()
	nics, err := k.inventory.List()
	if err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stateFile.addSpeeds(nics)
	return nics, nil
}

// saveState records what is known about the configured NICs, except NICs that may still become uplinks. The caller
// holds k.mu.
func (k *Kind) saveState(ctx context.Context, nics []netdev.NIC) {
	known := map[string]nicState{}
	isConfigured := func(name string) bool { return k.config.NetworkOf(name, false) != nil }
	for _, name := range k.inventory.Uplinks() { // also those that currently do not exist
		if isConfigured(name) {
			known[name] = nicState{Speed: k.stateFile.nics[name].Speed, Uplink: true}
		}
	}
	for _, n := range nics {
		if isConfigured(n.Name) && !k.mayBecomeUplink(n, nics) {
			known[n.Name] = nicState{Speed: cmp.Or(n.Speed, k.stateFile.nics[n.Name].Speed), Uplink: n.Uplink}
		}
	}
	k.stateFile.nics = known
	if err := k.stateFile.save(); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to write the NIC state file; retrying", "path", k.stateFile.path)
	}
}

// uplinkTime is how long the plugins wait for the first default route, from when the first plugin after the boot
// started.
const uplinkTime = time.Minute

// mayBecomeUplink reports whether it is too early to share a NIC that only a pattern names: no plugin has shared the
// NIC since the node booted, and the node does not have a default route. Nodes without one share the NIC after
// uplinkTime. The caller holds k.mu.
func (k *Kind) mayBecomeUplink(n netdev.NIC, nics []netdev.NIC) bool {
	_, known := k.stateFile.nics[n.Name]
	if known || k.stateFile.path == "" || k.config.NetworkOf(n.Name, true) != nil ||
		dhcp.SinceBoot()-k.stateFile.since >= uplinkTime ||
		slices.ContainsFunc(nics, func(n netdev.NIC) bool { return n.Uplink }) {
		return false
	}
	attached, err := k.node.HasPrograms(n.Index) // from a plugin that did not write the file
	return err != nil || !attached
}

// errIfMayBecomeUplink returns an error while mayBecomeUplink prevents sharing a device. nics are the node's NICs.
// The caller holds k.mu.
func (k *Kind) errIfMayBecomeUplink(d *device, nics []netdev.NIC) error {
	if k.mayBecomeUplink(d.nic, nics) {
		return &uplinkError{network: d.network.Name, toShare: d.nic.Name, early: true}
	}
	return nil
}

// load reads the file. It logs once why the file cannot be read: NICs are then shared as after a boot.
func (m *stateFile) load(ctx context.Context) {
	m.nics, m.saved = nil, nil
	if m.since == 0 {
		m.since = dhcp.SinceBoot()
	}
	if m.path == "" {
		return
	}
	raw, err := os.ReadFile(m.path)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	if err == nil {
		err = m.decode(raw)
	}
	if err != nil {
		if m.unreadable != err.Error() {
			klog.FromContext(ctx).Error(err, "Ignoring the unreadable NIC state file; writing a new one", "path", m.path)
		}
		m.unreadable = err.Error()
		return
	}
	m.saved = raw
}

func (m *stateFile) decode(raw []byte) error {
	var f stateFileContent
	if err := json.Unmarshal(raw, &f); err != nil {
		return err
	}
	if f.Version != stateFileVersion {
		return fmt.Errorf("the file has version %d, this plugin reads %d: did another release write it?",
			f.Version, stateFileVersion)
	}
	m.nics, m.since = f.NICs, time.Duration(f.Since)*time.Millisecond
	return nil
}

// uplinks returns the names of the NICs that are recorded as uplinks.
func (m *stateFile) uplinks() (names []string) {
	for name, n := range m.nics {
		if n.Uplink {
			names = append(names, name)
		}
	}
	return names
}

// addSpeeds sets the speed of NICs that report none to the last known one. Many drivers report none without a carrier,
// and some also during a reset or while a bond negotiates with the switch.
func (m *stateFile) addSpeeds(nics []netdev.NIC) {
	for i := range nics {
		nics[i].Speed = cmp.Or(nics[i].Speed, m.nics[nics[i].Name].Speed)
	}
}

// save writes the file unless it already has the content.
func (m *stateFile) save() error {
	raw, err := json.Marshal(stateFileContent{Version: stateFileVersion, Since: m.since.Milliseconds(), NICs: m.nics})
	if err != nil || m.path == "" || bytes.Equal(raw, m.saved) {
		return err
	}
	err = files.Replace(m.failpoints, "NIC state file", m.path, raw, files.Options{Mode: 0o600})
	if err == nil {
		m.saved = raw
	}
	return err
}

// remove removes the file, and leftovers of a plugin that was killed while writing it.
func (m *stateFile) remove() error {
	if m.path == "" {
		return nil
	}
	return errors.Join(
		files.Remove(m.failpoints, "NIC state file", m.path),
		files.Remove(m.failpoints, "unfinished NIC state file", m.path+files.TemporarySuffix),
	)
}
