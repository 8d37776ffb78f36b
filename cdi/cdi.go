// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cdi writes the CDI spec of a claim. The spec has one device per share,
// which makes the container runtime run the driver's hook and set environment
// variables that report the grant.
//
// There is one spec file per claim, validated by the CDI library, and a directory of the files that its devices
// mount. Runtimes cache specs and reread them only for an unknown device. Therefore, a device name contains the
// claim's UID and is never reused.
package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// Device is the CDI device of one share.
type Device struct {
	Name string
	Edits
	Hook *Hook // nil if the device does not need a hook
}

// Edits describes what a device adds to a container.
type Edits struct {
	Env         []string `json:"env,omitempty"`         // NAME=value
	DeviceNodes []string `json:"deviceNodes,omitempty"` // paths, the same on the node and in the container
	Mounts      []Mount  `json:"mounts,omitempty"`
	Files       []File   `json:"files,omitempty"`
	// Hook contains arguments of the driver's hook, without the program name. For a device that is attached to pods,
	// they are added to the driver's; for another device, they are all arguments, and without them, the device does not
	// have a hook.
	Hook []string `json:"hook,omitempty"`
}

// File is a file that exists for one share. Containers cannot write to it.
type File struct {
	ContainerPath string `json:"containerPath"`
	Content       string `json:"content"`
}

// Mount is a bind mount of a file or directory on the node.
type Mount struct {
	HostPath      string `json:"hostPath"`
	ContainerPath string `json:"containerPath"`
	Writable      bool   `json:"writable,omitempty"`
}

// Hook is a program that the runtime runs before the container starts.
type Hook struct {
	Path    string
	Args    []string // including the program name
	Timeout int      // seconds
}

// Specs is the directory of spec files that the runtime reads.
type Specs struct {
	dir        string
	files      string
	driver     string
	failpoints failpoint.Injector

	specs *files.Directory[written]
}

// FilesDir returns the directory of the files that specs mount, below a plugin's directory.
func FilesDir(pluginDir string) string { return filepath.Join(pluginDir, "files") }

// New returns the specs of a driver in a directory. The files that they mount are
// in filesDir.
func New(dir, filesDir, driver string, failpoints failpoint.Injector) (*Specs, error) {
	s := &Specs{dir: dir, files: filesDir, driver: driver, failpoints: failpoints}
	s.specs = files.NewDirectory(dir, s.prefix(), suffix, readSpec) // dir also contains the specs of other drivers
	return s, s.MakeDirs()
}

// MakeDirs creates the directories of the specs and files again if they were removed.
func (s *Specs) MakeDirs() error {
	for _, d := range []string{s.dir, s.files} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return fmt.Errorf("open CDI directory: %w", err)
		}
	}
	return nil
}

// class is the devices' CDI class.
const class = "share"

// Kind returns the devices' CDI kind: vendor/class.
func (s *Specs) Kind() string { return s.driver + "/" + class }

// ID returns the qualified name that the kubelet passes to the runtime for a device.
func (s *Specs) ID(device string) string { return parser.QualifiedName(s.driver, class, device) }

// DeviceName returns the name of a share's device: the claim's UID, the request
// with its subrequest, and the share's ID.
func DeviceName(claimUID, request, shareID string) string {
	name := claimUID + "-" + strings.ReplaceAll(request, "/", ".")
	if shareID != "" {
		name += "-" + shareID
	}
	return name
}

// prefix and suffix are the parts of a spec file's name around the claim's UID.
func (s *Specs) prefix() string { return cdiapi.GenerateTransientSpecName(s.driver, class, "") }

const suffix = ".json"

func (s *Specs) name(claimUID string) string { return s.prefix() + claimUID + suffix }

// Path returns the path of a claim's spec file.
func (s *Specs) Path(claimUID string) string { return filepath.Join(s.dir, s.name(claimUID)) }

// Unfinished returns the paths of specs that a process was writing when it was killed, or is writing.
func (s *Specs) Unfinished() ([]string, error) { return files.Unfinished(s.dir, s.prefix()) }

// Write writes a claim's files and then its spec, and replaces existing ones.
func (s *Specs) Write(claimUID string, devices []Device) error {
	for _, d := range devices {
		for i, f := range d.Files {
			path := s.file(claimUID, d, i)
			err := s.failpoints.Do("make directory of files", func() error { return os.MkdirAll(filepath.Dir(path), 0o755) })
			if err == nil {
				err = files.Rewrite(s.failpoints, "file", path, []byte(f.Content), files.Options{Mode: 0o644})
			}
			if err != nil {
				return fmt.Errorf("write the file that a CDI device mounts at %s: %w", f.ContainerPath, err)
			}
		}
	}
	spec := &specs.Spec{Kind: s.Kind()}
	for _, d := range devices {
		edits := d.containerEdits()
		for i, f := range d.Files {
			edits.Mounts = append(
				edits.Mounts,
				&specs.Mount{HostPath: s.file(claimUID, d, i), ContainerPath: f.ContainerPath, Options: mountOptions(false)},
			)
		}
		if d.Hook != nil {
			edits.Hooks = []*specs.Hook{
				{HookName: cdiapi.CreateRuntimeHook, Path: d.Hook.Path, Args: d.Hook.Args, Timeout: &d.Hook.Timeout},
			}
		}
		spec.Devices = append(spec.Devices, specs.Device{Name: d.Name, ContainerEdits: edits})
	}
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return fmt.Errorf("CDI spec of claim %s: %w", claimUID, err)
	}
	spec.Version = version
	raw, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	// The library's own function leaves a temporary file behind if the disk is
	// full (v1.1.1).
	accept := func(path string) error { _, err := cdiapi.ReadSpec(path, 0); return err }
	if err := files.Replace(s.failpoints, "CDI spec", s.Path(claimUID), raw, files.Options{Mode: 0o644,
		Check: accept}); err != nil {
		return fmt.Errorf("write CDI spec of claim %s: %w", claimUID, err)
	}
	return nil
}

// containerEdits converts edits for a spec. The runtime determines the type and numbers of a device node; containers
// may read and write the node, but not create more nodes.
func (e Edits) containerEdits() specs.ContainerEdits {
	edits := specs.ContainerEdits{Env: e.Env}
	for _, path := range e.DeviceNodes {
		edits.DeviceNodes = append(edits.DeviceNodes, &specs.DeviceNode{Path: path, Permissions: "rw"})
	}
	for _, m := range e.Mounts {
		edits.Mounts = append(
			edits.Mounts,
			&specs.Mount{HostPath: m.HostPath, ContainerPath: m.ContainerPath, Options: mountOptions(m.Writable)},
		)
	}
	return edits
}

func mountOptions(writable bool) []string {
	if writable {
		return []string{"rbind", "rprivate", "nosuid", "nodev", "rw"}
	}
	return []string{"rbind", "rprivate", "nosuid", "nodev", "ro"}
}

// file returns the path of the i-th file of a claim's device.
func (s *Specs) file(claimUID string, d Device, i int) string {
	return filepath.Join(s.files, claimUID, fmt.Sprintf("%s-%d", d.Name, i))
}

// written is the part of a spec file that the driver compares.
type written struct {
	devices []string // names
	hooks   []string // paths
}

// readSpec reads a spec file. It fails if the CDI library does not accept the spec.
func readSpec(path string) (w written, err error) {
	spec, err := cdiapi.ReadSpec(path, 0)
	if err != nil {
		return w, fmt.Errorf("read CDI spec %s: %w", path, err)
	}
	for _, d := range spec.Devices {
		w.devices = append(w.devices, d.Name)
		for _, h := range d.ContainerEdits.Hooks {
			w.hooks = append(w.hooks, h.Path)
		}
	}
	return w, nil
}

// read returns the content of a claim's spec; the zero value if the claim has no spec.
func (s *Specs) read(claimUID string) (written, error) {
	w, _, err := s.specs.Get(s.name(claimUID))
	return w, err
}

// Holds reports whether a claim's spec and files exist for these devices and the
// CDI library accepts the spec.
func (s *Specs) Holds(claimUID string, devices []Device) bool {
	spec, err := s.read(claimUID)
	if err != nil || !slices.EqualFunc(devices, spec.devices, func(d Device, name string) bool { return d.Name == name }) {
		return false
	}
	for _, d := range devices {
		for i, f := range d.Files {
			if content, err := os.ReadFile(s.file(claimUID, d, i)); err != nil || string(content) != f.Content {
				return false
			}
		}
	}
	return true
}

// List returns the UIDs of the claims that have a spec or files, readable or not.
func (s *Specs) List() (claimUIDs []string, err error) {
	listed := map[string]bool{}
	err = s.specs.Each("", func(name string, _ written, _ error) {
		listed[strings.TrimSuffix(strings.TrimPrefix(name, s.prefix()), suffix)] = true
	})
	dirs, dirsErr := os.ReadDir(s.files)
	if errors.Is(dirsErr, os.ErrNotExist) {
		dirsErr = nil
	}
	for _, dir := range dirs {
		listed[dir.Name()] = true
	}
	return slices.Sorted(maps.Keys(listed)), errors.Join(err, dirsErr)
}

// Hooks returns the paths of the hooks that the specs name. It fails if it cannot
// read a spec, because the result would be incomplete.
func (s *Specs) Hooks() (map[string]bool, error) {
	hooks := map[string]bool{}
	var failed error
	err := s.specs.Each("", func(_ string, w written, err error) {
		failed = errors.Join(failed, err)
		for _, hook := range w.hooks {
			hooks[hook] = true
		}
	})
	if err = errors.Join(err, failed); err != nil {
		return nil, err
	}
	return hooks, nil
}

// HooksOf returns the paths of the hooks that a claim's spec names; none if the claim has no spec.
// It fails if the CDI library does not accept the spec.
func (s *Specs) HooksOf(claimUID string) ([]string, error) {
	spec, err := s.read(claimUID)
	return spec.hooks, err
}

// Remove removes a claim's spec and then its files. It succeeds if there are
// none.
func (s *Specs) Remove(claimUID string) error {
	if err := files.Remove(s.failpoints, "CDI spec", s.Path(claimUID)); err != nil {
		return fmt.Errorf("remove CDI spec of claim %s: %w", claimUID, err)
	}
	dir := filepath.Join(s.files, claimUID)
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err := s.failpoints.Do("remove files", func() error { return os.RemoveAll(dir) }); err != nil {
		return fmt.Errorf("remove the files of claim %s: %w", claimUID, err)
	}
	return nil
}
