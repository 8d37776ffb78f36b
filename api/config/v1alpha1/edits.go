package v1alpha1

import (
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"

	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// Edits are what the runtime puts into containers that have a share. The
// values of variables and all paths are texts with variables, ${name}; $$ is a
// dollar sign.
type Edits struct {
	// Environment: values by name.
	Environment map[string]string `json:"environment,omitempty"`
	// DeviceNodes below /dev, beside those of the device itself.
	DeviceNodes []string `json:"deviceNodes,omitempty"`
	// Mounts of the node's files and directories.
	Mounts []Mount `json:"mounts,omitempty"`
}

// Mount of a file or directory of the node.
type Mount struct {
	// HostPath and ContainerPath are absolute.
	HostPath      string `json:"hostPath"`
	ContainerPath string `json:"containerPath"`
	// Writable: containers may write to it.
	Writable bool `json:"writable,omitempty"`
}

// Variables of every share.
const (
	VariableShare    = "share"    // the share's name, unique on the node
	VariableRequest  = "request"  // of the claim
	VariableDevice   = "device"   // its name in the ResourceSlice
	VariableNode     = "node"     // the node's name
	VariablePCIBusID = "pciBusID" // of accelerators on PCI
)

var shareVariables = []string{VariableShare, VariableRequest, VariableDevice, VariableNode}

// CapacitySuffixes make variables of a capacity's name: what is granted, as a
// decimal number, in whole Ki, Mi and Gi, and in percent of the device, each
// rounded down.
var CapacitySuffixes = []string{"", ".Ki", ".Mi", ".Gi", ".percent"}

// Expand returns the edits with the values of variables in the place of their
// names. A variable without a value is an error.
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
	out := e.each(expand)
	if len(missing) > 0 {
		return Edits{}, fmt.Errorf("no value for the variables %s: a capacity that was configured after the claim was allocated, or a device that is not on PCI?", strings.Join(missing, ", "))
	}
	return out, nil
}

// Only returns the edits whose texts have no other variables than these.
func (e Edits) Only(variables map[string]string) (out Edits) {
	can := func(texts ...string) bool {
		_, err := Edits{DeviceNodes: texts}.Expand(variables)
		return err == nil
	}
	for name, text := range e.Environment {
		if can(text) {
			if out.Environment == nil {
				out.Environment = map[string]string{}
			}
			out.Environment[name] = text
		}
	}
	for _, node := range e.DeviceNodes {
		if can(node) {
			out.DeviceNodes = append(out.DeviceNodes, node)
		}
	}
	for _, m := range e.Mounts {
		if can(m.HostPath, m.ContainerPath) {
			out.Mounts = append(out.Mounts, m)
		}
	}
	return out
}

// each applies f to all texts.
func (e Edits) each(f func(string) string) (out Edits) {
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
		out.Mounts = append(out.Mounts, Mount{HostPath: f(m.HostPath), ContainerPath: f(m.ContainerPath), Writable: m.Writable})
	}
	return out
}

// sample is a variable's value for validation: it is fine in a path and as a
// number.
const sample = "1"

func (e Edits) validate(at *field.Path, known []string) (errs field.ErrorList) {
	values := map[string]string{}
	for _, name := range known {
		values[name] = sample
	}
	for _, name := range slices.Sorted(maps.Keys(e.Environment)) {
		path := at.Child("environment").Key(name)
		errs = append(errs, validateText(e.Environment[name], values, path)...)
		errs = append(errs, params.ValidateVariable(name, "", path)...)
	}
	for i, node := range e.DeviceNodes {
		path := at.Child("deviceNodes").Index(i)
		more := validateText(node, values, path)
		if len(more) == 0 {
			more = params.ValidateDeviceNode(expanded(node, values), path)
		}
		if slices.Contains(e.DeviceNodes[:i], node) {
			more = append(more, field.Duplicate(path, node))
		}
		errs = append(errs, more...)
	}
	containerPaths := map[string]bool{}
	for i, m := range e.Mounts {
		at := at.Child("mounts").Index(i).Child("containerPath")
		if containerPaths[m.ContainerPath] {
			errs = append(errs, field.Duplicate(at, m.ContainerPath))
		}
		containerPaths[m.ContainerPath] = true
		if slices.Contains(runtimePaths, m.ContainerPath) {
			errs = append(errs, field.Forbidden(at, m.ContainerPath+" is the runtime's: mount below it, or elsewhere"))
		}
	}
	for i, m := range e.Mounts {
		for name, text := range map[string]string{"hostPath": m.HostPath, "containerPath": m.ContainerPath} {
			path := at.Child("mounts").Index(i).Child(name)
			more := validateText(text, values, path)
			if len(more) == 0 {
				more = validateMountPath(text, expanded(text, values), path)
			}
			errs = append(errs, more...)
		}
	}
	return errs
}

// runtimePaths are what a runtime mounts by itself.
var runtimePaths = []string{"/dev", "/proc", "/sys", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}

func expanded(text string, values map[string]string) string {
	return os.Expand(text, func(name string) string { return values[name] })
}

// validateText checks that a text has only variables that there are, and each
// in braces: a name without would take in what follows.
func validateText(text string, known map[string]string, at *field.Path) (errs field.ErrorList) {
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
				return field.ErrorList{field.Invalid(at, text, fmt.Sprintf("has the variable %q; there are %s", name, strings.Join(slices.Sorted(maps.Keys(known)), ", ")))}
			}
			rest = rest[end+1:]
		}
	}
}

func validateMountPath(text, expanded string, at *field.Path) field.ErrorList {
	if !path.IsAbs(expanded) || path.Clean(expanded) != expanded || expanded == "/" || strings.ContainsRune(expanded, 0) {
		return field.ErrorList{field.Invalid(at, text, "must be an absolute path without .., such as /run/mps")}
	}
	return nil
}
