package v1alpha1

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// AcceleratorShare says what a container finds beside a share of an
// accelerator. Every field is optional. What a claim says is added to what the
// DeviceClass says.
type AcceleratorShare struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`

	// Environment of the containers that have the share: at most 32 variables.
	// Where class and claim both set one, the claim's value counts.
	Environment map[string]string `json:"environment,omitempty"`

	// DeviceNodes are further device nodes that the containers get, as paths
	// below /dev: at most 16, of those that the DriverConfig allows.
	DeviceNodes []string `json:"deviceNodes,omitempty"`
}

func (*AcceleratorShare) kind() string { return AcceleratorShareKind }

// Limits of an AcceleratorShare.
const (
	maxEnvironment = 32
	maxValue       = 4096 // bytes of a variable's value
	maxDeviceNodes = 16
)

// MergeAcceleratorShares adds what a claim says to what came before (a
// DeviceClass, an earlier configuration). Both may be nil.
func MergeAcceleratorShares(base, over *AcceleratorShare) *AcceleratorShare {
	m := &AcceleratorShare{APIVersion: APIVersion, Kind: AcceleratorShareKind}
	for _, a := range []*AcceleratorShare{base, over} {
		if a == nil {
			continue
		}
		if len(a.Environment) > 0 && m.Environment == nil {
			m.Environment = map[string]string{}
		}
		maps.Copy(m.Environment, a.Environment)
		for _, node := range a.DeviceNodes {
			if !slices.Contains(m.DeviceNodes, node) {
				m.DeviceNodes = append(m.DeviceNodes, node)
			}
		}
	}
	return m
}

// Validate implements Parameters.
func (a *AcceleratorShare) Validate() (errs field.ErrorList) {
	at := field.NewPath("environment")
	if len(a.Environment) > maxEnvironment {
		errs = append(errs, field.TooMany(at, len(a.Environment), maxEnvironment))
	}
	for _, name := range slices.Sorted(maps.Keys(a.Environment)) {
		errs = append(errs, ValidateVariable(name, a.Environment[name], at.Key(name))...)
	}
	at = field.NewPath("deviceNodes")
	if len(a.DeviceNodes) > maxDeviceNodes {
		errs = append(errs, field.TooMany(at, len(a.DeviceNodes), maxDeviceNodes))
	}
	for i, node := range a.DeviceNodes {
		errs = append(errs, ValidateDeviceNode(node, at.Index(i))...)
		if slices.Contains(a.DeviceNodes[:i], node) {
			errs = append(errs, field.Duplicate(at.Index(i), node))
		}
	}
	return errs
}

// AllowedAccelerator is what an administrator lets claims ask for, from the
// DriverConfig.
type AllowedAccelerator struct {
	// Accelerator is the name the administrator gave it; for messages.
	Accelerator string
	// DeviceNodes are patterns of paths, as of path.Match.
	DeviceNodes []string
	// Environment is what the administrator sets; claims do not.
	Environment []string
}

// ValidateFor checks against what the accelerator allows, in addition to
// Validate.
func (a *AcceleratorShare) ValidateFor(allowed AllowedAccelerator) field.ErrorList {
	errs := a.Validate()
	if len(errs) > 0 {
		return errs
	}
	for i, node := range a.DeviceNodes {
		matches := func(pattern string) bool { ok, err := path.Match(pattern, node); return ok && err == nil }
		if !slices.ContainsFunc(allowed.DeviceNodes, matches) {
			errs = append(errs, field.Forbidden(field.NewPath("deviceNodes").Index(i),
				fmt.Sprintf("%s: accelerator %q allows %s", node, allowed.Accelerator, list(allowed.DeviceNodes))))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(a.Environment)) {
		if slices.Contains(allowed.Environment, name) {
			errs = append(errs, field.Forbidden(field.NewPath("environment").Key(name), fmt.Sprintf("accelerator %q sets it for all its shares: leave it out", allowed.Accelerator)))
		}
	}
	return errs
}

// ValidateVariable checks one variable of an environment.
func ValidateVariable(name, value string, at *field.Path) (errs field.ErrorList) {
	for _, problem := range validation.IsCIdentifier(name) {
		errs = append(errs, field.Invalid(at, name, problem))
	}
	if strings.HasPrefix(name, EnvironmentPrefix) {
		errs = append(errs, field.Forbidden(at, "names that begin with "+EnvironmentPrefix+" are the driver's"))
	}
	switch {
	case len(value) > maxValue:
		errs = append(errs, field.TooLong(at, "", maxValue))
	case strings.ContainsRune(value, 0):
		errs = append(errs, field.Invalid(at, value, "must not contain NUL"))
	}
	return errs
}

// ValidateDeviceNode checks the path of a device node.
func ValidateDeviceNode(node string, at *field.Path) field.ErrorList {
	if !strings.HasPrefix(node, "/dev/") || path.Clean(node) != node || strings.ContainsRune(node, 0) {
		return field.ErrorList{field.Invalid(at, node, "must be the path of a device node below /dev, such as /dev/dri/renderD128")}
	}
	return nil
}
