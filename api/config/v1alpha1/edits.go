// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// Edits describes what the container runtime adds to containers with a share. All values and paths can contain
// variables, written as ${name}; $$ stands for a dollar sign. Each share has the variables share, request, device,
// and node; a share of a PCI device also has pciBusID. For each capacity, there are variables with the granted
// amount: its name alone for the decimal number, with the suffixes .Ki, .Mi, and .Gi for whole units, and with the
// suffix .percent for the percentage of the device, each rounded down.
type Edits struct {
	// Environment holds environment variables by name. A name is a C identifier that does not start with DRA_SHARED_.
	// Claims cannot set these variables.
	Environment map[string]string `json:"environment,omitempty"`

	// DeviceNodes lists paths of additional device nodes below /dev.
	DeviceNodes []string `json:"deviceNodes,omitempty"`

	// Mounts lists files and directories on the node to mount.
	Mounts []Mount `json:"mounts,omitempty"`
}

// Mount is a bind mount of a file or directory on the node.
type Mount struct {
	// HostPath is the absolute path on the node.
	HostPath string `json:"hostPath"`

	// ContainerPath is the absolute path in the container. It must not be a path
	// that the container runtime mounts, such as /dev or /etc/hosts.
	ContainerPath string `json:"containerPath"`

	// Writable permits containers to write to the mount. The default is false.
	Writable bool `json:"writable,omitempty"`
}

// Variables in every share's edits.
const (
	VariableShare    = "share"    // the name of the share, unique on the node
	VariableRequest  = "request"  // the name of the request in the claim
	VariableDevice   = "device"   // the name of the device in the ResourceSlice
	VariableNode     = "node"     // the name of the node
	VariablePCIBusID = "pciBusID" // the PCI address, for accelerators on PCI only
)

var shareVariables = []string{VariableShare, VariableRequest, VariableDevice, VariableNode}

// capacitySuffixes lists what follows a capacity's name in its variables' names: nothing for the granted amount as a
// decimal number, .Ki, .Mi, and .Gi for whole units, and .percent for the percentage of the device, each rounded
// down.
var capacitySuffixes = []string{"", ".Ki", ".Mi", ".Gi", ".percent"}

// Expand returns the edits with variables replaced with their values. The error lists the variables without a value.
func (e Edits) Expand(variables map[string]string) (Edits, error) {
	var missing []string
	expand := func(text string) string {
		return os.Expand(text, func(name string) string {
			if name == "$" {
				return name
			}
			value, ok := variables[name]
			if !ok && !slices.Contains(missing, name) {
				missing = append(missing, name)
			}
			return value
		})
	}
	expanded := e.mapTexts(expand)
	if len(missing) > 0 {
		return Edits{}, fmt.Errorf("no value for the variables %s: "+
			"was a capacity configured after the claim was allocated, or is the device not on PCI?", strings.Join(missing, ", "))
	}
	return expanded, nil
}

// Only returns the edits that use only these variables.
func (e Edits) Only(variables map[string]string) (out Edits) {
	expandable := func(texts ...string) bool {
		_, err := Edits{DeviceNodes: texts}.Expand(variables)
		return err == nil
	}
	for name, text := range e.Environment {
		if expandable(text) {
			if out.Environment == nil {
				out.Environment = map[string]string{}
			}
			out.Environment[name] = text
		}
	}
	for _, node := range e.DeviceNodes {
		if expandable(node) {
			out.DeviceNodes = append(out.DeviceNodes, node)
		}
	}
	for _, m := range e.Mounts {
		if expandable(m.HostPath, m.ContainerPath) {
			out.Mounts = append(out.Mounts, m)
		}
	}
	return out
}

// mapTexts returns the edits with f applied to all values and paths.
func (e Edits) mapTexts(f func(string) string) (out Edits) {
	for _, name := range slices.Sorted(maps.Keys(e.Environment)) {
		if out.Environment == nil {
			out.Environment = map[string]string{}
		}
		out.Environment[name] = f(e.Environment[name])
	}
	for _, node := range e.DeviceNodes {
		out.DeviceNodes = append(out.DeviceNodes, f(node))
	}
	for _, m := range e.Mounts {
		mount := Mount{HostPath: f(m.HostPath), ContainerPath: f(m.ContainerPath), Writable: m.Writable}
		out.Mounts = append(out.Mounts, mount)
	}
	return out
}

// sampleValue stands for the value of every variable during validation. It is valid
// both in a path and as a number.
const sampleValue = "1"

// validate checks the edits for shares that have the known variables.
func (e Edits) validate(at *field.Path, known []string) (errs field.ErrorList) {
	values := map[string]string{}
	for _, name := range known {
		values[name] = sampleValue
	}
	for _, name := range slices.Sorted(maps.Keys(e.Environment)) {
		path := at.Child("environment").Key(name)
		errs = append(errs, validateText(e.Environment[name], values, path)...)
		errs = append(errs, v1alpha1.ValidateVariable(name, "", path)...)
	}
	errs = append(errs, e.validateDeviceNodes(at.Child("deviceNodes"), values)...)
	return append(errs, e.validateMounts(at.Child("mounts"), values)...)
}

func (e Edits) validateDeviceNodes(at *field.Path, values map[string]string) (errs field.ErrorList) {
	for i, node := range e.DeviceNodes {
		path := at.Index(i)
		if textErrs := validateText(node, values, path); len(textErrs) > 0 {
			errs = append(errs, textErrs...)
		} else {
			errs = append(errs, v1alpha1.ValidateDeviceNode(expandText(node, values), path)...)
		}
		if slices.Contains(e.DeviceNodes[:i], node) {
			errs = append(errs, field.Duplicate(path, node))
		}
	}
	return errs
}

// runtimePaths are the paths that a container runtime mounts itself.
var runtimePaths = []string{"/dev", "/proc", "/sys", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}

func (e Edits) validateMounts(at *field.Path, values map[string]string) (errs field.ErrorList) {
	containerPaths := map[string]bool{}
	for i, m := range e.Mounts {
		path := at.Index(i).Child("containerPath")
		if containerPaths[m.ContainerPath] {
			errs = append(errs, field.Duplicate(path, m.ContainerPath))
		}
		containerPaths[m.ContainerPath] = true
		if slices.Contains(runtimePaths, m.ContainerPath) {
			errs = append(errs, field.Forbidden(path,
				"the container runtime mounts "+m.ContainerPath+": choose a path below it, or another"))
		}
		errs = append(errs, validateMountPath(m.HostPath, values, at.Index(i).Child("hostPath"))...)
		errs = append(errs, validateMountPath(m.ContainerPath, values, path)...)
	}
	return errs
}

func expandText(text string, values map[string]string) string {
	return os.Expand(text, func(name string) string { return values[name] })
}

// validateText checks that all variables in a text are known, and that their names
// are in braces: without braces, the name would extend into the text that follows.
func validateText(text string, known map[string]string, at *field.Path) field.ErrorList {
	rest := text
	for {
		i := strings.IndexByte(rest, '$')
		if i < 0 {
			return nil
		}
		rest = rest[i+1:]
		end := strings.IndexByte(rest, '}')
		switch {
		case strings.HasPrefix(rest, "$"):
			rest = rest[1:]
		case !strings.HasPrefix(rest, "{") || end < 0:
			return field.ErrorList{field.Invalid(at, text, "must have variables as ${name}, and $$ for a dollar sign")}
		default:
			name := rest[1:end]
			if _, ok := known[name]; !ok {
				return field.ErrorList{field.Invalid(at, text, fmt.Sprintf("has the unknown variable %q; known variables are %s",
					name, strings.Join(slices.Sorted(maps.Keys(known)), ", ")))}
			}
			rest = rest[end+1:]
		}
	}
}

func validateMountPath(text string, values map[string]string, at *field.Path) field.ErrorList {
	if errs := validateText(text, values, at); len(errs) > 0 {
		return errs
	}
	expanded := expandText(text, values)
	if !path.IsAbs(expanded) || path.Clean(expanded) != expanded || expanded == "/" || strings.ContainsRune(expanded, 0) {
		return field.ErrorList{field.Invalid(at, text, "must be an absolute path without .., such as /run/mps")}
	}
	return nil
}
