// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"bytes"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

func (d *Driver) specPath(uid string) string { return filepath.Join(d.CDIDir, d.Name+"-"+uid+".json") }

func (d *Driver) metadataDir(uid string) string { return filepath.Join(d.PluginDir, "metadata", uid) }

// commonID is a CDI device of the node, which all claims have and which remains.
func (d *Driver) commonID() string { return d.Name + "/device=common" }

// writeCommon writes the CDI spec of the node.
func (d *Driver) writeCommon() error {
	spec := specs.Spec{Version: "0.3.0", Kind: d.Name + "/device", Devices: []specs.Device{{
		Name: "common", ContainerEdits: specs.ContainerEdits{Env: []string{"REFERENCE_NODE=" + d.Node}},
	}}}
	raw, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return write(filepath.Join(d.CDIDir, d.Name+"-common.json"), raw)
}

// writeSpec writes the CDI spec and the metadata of a claim.
func (d *Driver) writeSpec(r *record) error {
	spec := specs.Spec{Kind: d.Name + "/device"}
	for i, p := range r.Devices {
		if len(p.IDs) == 0 {
			continue
		}
		_, name, _ := strings.Cut(p.IDs[0], "=")
		mounts, err := d.mounts(r, i)
		if err != nil {
			return err
		}
		spec.Devices = append(spec.Devices, specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{
			Env: d.variables(r, i), Mounts: mounts,
		}})
	}
	if len(spec.Devices) == 0 {
		return nil
	}
	var err error
	if spec.Version, err = specs.MinimumRequiredVersion(&spec); err != nil {
		return err
	}
	if d.Fault == "CDI-06" {
		spec.Version = "0.2.0"
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	name := d.specPath(r.UID)
	switch d.Fault {
	case "CDI-02":
		d.writeLater(r, name, raw)
		return nil
	case "CDI-05":
		return writeSlowly(name, raw, time.Millisecond)
	}
	if err := write(name, raw); err != nil || !d.fault("SEC-03/spec") {
		return err
	}
	return os.Chmod(name, 0o666)
}

// variables returns the environment of containers with a device of a claim.
func (d *Driver) variables(r *record, i int) []string {
	name := "REFERENCE_" + strings.ToUpper(strings.ReplaceAll(fmt.Sprint(r.UID, "_", i), "-", "_"))
	switch d.Fault {
	case "CDI-07":
		name = "REFERENCE"
	case "CDI-07/claim":
		name = "REFERENCE_" + strings.ToUpper(strings.ReplaceAll(r.UID, "-", "_"))
	}
	value := r.Devices[i].Device + r.Devices[i].Value
	if d.fault("PREP-03/spec") && d.again(r.UID) || d.fault("PREP-04/spec") && !d.isNew(r.UID) {
		value = ""
	}
	all := []string{name + "=" + value}
	for j, other := range r.Devices {
		if d.fault("PREP-20/edits") && j != i {
			all = append(all, fmt.Sprintf("%s_%d=%s", name, j, other.Device+other.Value))
		}
	}
	return all
}

// mounts writes the metadata of a device of a claim, and returns the mounts of containers with it.
func (d *Driver) mounts(r *record, i int) ([]*specs.Mount, error) {
	mount, err := d.writeMetadata(r, r.Devices[i])
	if err != nil {
		return nil, err
	}
	mounts := []*specs.Mount{mount}
	if d.fault("META-05") && i > 0 {
		mounts = nil
	}
	if d.fault("SEC-03/mount") {
		mounts = append(mounts, &specs.Mount{HostPath: d.RegistryDir, ContainerPath: d.RegistryDir})
	}
	return mounts, nil
}

// writeLater writes the CDI spec of a claim that is still prepared then.
func (d *Driver) writeLater(r *record, name string, raw []byte) {
	time.AfterFunc(slow, func() {
		_ = d.locked(func() error {
			now, err := d.load(r.UID)
			if err != nil || now == nil {
				return err
			}
			return write(name, raw)
		})
	})
}

// metadataPath returns where the metadata of a request is mounted.
func (d *Driver) metadataPath(r *record, request string) string {
	kind, name := "resourceclaims", r.Name
	if r.PodClaim != "" && !d.fault("META-01") {
		kind, name = "resourceclaimtemplates", r.PodClaim
	}
	file := d.Name + "-metadata.json"
	if d.fault("META-08") && r.Others {
		file = "metadata.json"
	}
	return path.Join("/var/run/kubernetes.io/dra-device-attributes", kind, name, request, file)
}

// metadata returns the metadata of a device. Generation 2 has its network data.
func (d *Driver) metadata(r *record, p prepared, generation int) ([]byte, error) {
	attributes := map[string]resourceapi.DeviceAttribute{}
	for _, x := range d.all() {
		if x.Name == p.Device {
			for name, a := range x.Attributes {
				attributes[string(name)] = a
			}
		}
	}
	version := "metadata.resource.k8s.io/v1beta1"
	if d.fault("META-03") {
		version = "metadata.resource.k8s.io/v0"
	}
	device := map[string]any{"driver": d.Name, "pool": p.Pool, "name": p.Device, "attributes": attributes}
	if d.fault("META-03/device") {
		device["name"] = "device-x"
	}
	if generation > 1 {
		network := network(p.Device)
		if d.fault("META-10") {
			network.HardwareAddress = "02:00:00:00:00:ff"
		}
		device["networkData"] = network
	}
	if d.fault("META-06") {
		generation = 1
	}
	return json.Marshal(map[string]any{
		"apiVersion": version, "kind": "DeviceMetadata",
		"metadata": map[string]any{"name": r.Name, "namespace": r.Namespace, "uid": r.UID, "generation": generation},
		"requests": []any{map[string]any{"name": p.Request, "devices": []any{device}}},
	})
}

func (d *Driver) metadataFile(r *record, p prepared) string {
	request := base(p.Request)
	if d.fault("META-02") {
		request = p.Request
	}
	return filepath.Join(d.metadataDir(r.UID), request, "metadata.json")
}

// writeMetadata writes the metadata of a device, unless it exists, and returns its mount.
func (d *Driver) writeMetadata(r *record, p prepared) (*specs.Mount, error) {
	file := d.metadataFile(r, p)
	mount := &specs.Mount{
		HostPath: file, ContainerPath: d.metadataPath(r, base(p.Request)), Options: []string{"ro", "bind"},
	}
	switch {
	case d.fault("META-02"):
		mount.ContainerPath = d.metadataPath(r, p.Request)
	case d.fault("META-04"):
		mount.Options = []string{"rw", "bind"}
	}
	if _, err := os.Stat(file); err == nil {
		return mount, nil
	}
	raw, err := d.metadata(r, p, 1)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return nil, err
	}
	return mount, writeReadable(file, raw)
}

// writeReadable replaces a file atomically with a file that all users can read.
func writeReadable(path string, raw []byte) error {
	if err := write(path+".new", raw); err != nil {
		return err
	}
	if err := os.Chmod(path+".new", 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// updateMetadata adds network data, which are known later, to the metadata of a claim
// that is still prepared.
func (d *Driver) updateMetadata(r *record) error {
	return d.lockedFor(r.UID, func() error {
		now, err := d.load(r.UID)
		if err != nil || now == nil {
			return err
		}
		for _, p := range now.Devices {
			raw, err := d.metadata(now, p, 2)
			if err != nil {
				return err
			}
			file := d.metadataFile(now, p)
			if old, err := os.ReadFile(file); err != nil || bytes.Equal(old, raw) {
				continue // it does not have metadata, or the same
			}
			if err := writeReadable(file, raw); err != nil {
				return err
			}
		}
		return nil
	})
}

// network returns the network data of a device.
func network(device string) resourceapi.NetworkDeviceData {
	h := fnv.New32a()
	_, _ = h.Write([]byte(device)) // never fails
	n := h.Sum32()
	return resourceapi.NetworkDeviceData{
		InterfaceName: device, HardwareAddress: fmt.Sprintf("02:00:00:00:%02x:%02x", n>>8&0xff, n&0xff),
		IPs: []string{fmt.Sprintf("192.0.2.%d/24", n%250+1)},
	}
}

func (d *Driver) podFile(uid string) string { return filepath.Join(d.StateDir, "pod-"+uid) }

// writePod writes the interfaces of the pod of a claim, as ip -json address prints them.
func (d *Driver) writePod(r *record) error {
	var interfaces []any
	for _, p := range r.Devices {
		n := network(p.Device)
		address, _, _ := strings.Cut(n.IPs[0], "/")
		interfaces = append(interfaces, map[string]any{
			"ifname": n.InterfaceName, "address": n.HardwareAddress,
			"addr_info": []any{map[string]any{"local": address, "prefixlen": 24, "scope": "global"}},
		})
	}
	raw, err := json.Marshal(interfaces)
	if err != nil {
		return err
	}
	if err := write(d.podFile(r.UID), raw); err != nil || !d.fault("SEC-03/read") {
		return err
	}
	return os.Chmod(d.podFile(r.UID), 0o644)
}
