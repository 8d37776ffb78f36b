// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

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

// Limits of an AcceleratorShare.
const (
	maxEnvironment = 32
	maxValueLength = 4096 // bytes
	maxDeviceNodes = 16
)

// AllowedAccelerator holds the DriverConfig's bounds for claims on a group
// of accelerators.
//
// +kubebuilder:object:generate=false
type AllowedAccelerator struct {
	// Accelerator is the name of the group, for error messages.
	Accelerator string
	// DeviceNodes lists the allowed patterns of paths (see path.Match).
	DeviceNodes []string
	// Environment lists the variables that the DriverConfig sets and that claims
	// therefore must not set.
	Environment []string
}

// Validate checks everything that does not depend on the device.
func (a *AcceleratorShare) Validate() (errs field.ErrorList) {
	environment := field.NewPath("environment")
	if len(a.Environment) > maxEnvironment {
		errs = append(errs, field.TooMany(environment, len(a.Environment), maxEnvironment))
	}
	for _, name := range slices.Sorted(maps.Keys(a.Environment)) {
		errs = append(errs, ValidateVariable(name, a.Environment[name], environment.Key(name))...)
	}
	nodes := field.NewPath("deviceNodes")
	if len(a.DeviceNodes) > maxDeviceNodes {
		errs = append(errs, field.TooMany(nodes, len(a.DeviceNodes), maxDeviceNodes))
	}
	for i, node := range a.DeviceNodes {
		errs = append(errs, ValidateDeviceNode(node, nodes.Index(i))...)
		if slices.Contains(a.DeviceNodes[:i], node) {
			errs = append(errs, field.Duplicate(nodes.Index(i), node))
		}
	}
	return errs
}

// ValidateFor checks parameters against the accelerator's bounds, in addition to Validate.
func (a *AcceleratorShare) ValidateFor(allowed AllowedAccelerator) field.ErrorList {
	errs := a.Validate()
	if len(errs) > 0 {
		return errs
	}
	for i, node := range a.DeviceNodes {
		matches := func(pattern string) bool {
			ok, err := path.Match(pattern, node)
			return ok && err == nil
		}
		if !slices.ContainsFunc(allowed.DeviceNodes, matches) {
			errs = append(errs, field.Forbidden(field.NewPath("deviceNodes").Index(i),
				fmt.Sprintf("%s: accelerator %q allows %s", node, allowed.Accelerator, list(allowed.DeviceNodes))))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(a.Environment)) {
		if slices.Contains(allowed.Environment, name) {
			errs = append(errs, field.Forbidden(field.NewPath("environment").Key(name),
				fmt.Sprintf("accelerator %q sets it for all its shares: leave it out", allowed.Accelerator)))
		}
	}
	return errs
}

// ValidateVariable checks one environment variable.
func ValidateVariable(name, value string, at *field.Path) (errs field.ErrorList) {
	for _, problem := range validation.IsCIdentifier(name) {
		errs = append(errs, field.Invalid(at, name, problem))
	}
	if strings.HasPrefix(name, EnvironmentPrefix) {
		errs = append(errs, field.Forbidden(at, "names that begin with "+EnvironmentPrefix+" are reserved for the driver"))
	}
	switch {
	case len(value) > maxValueLength:
		errs = append(errs, field.TooLong(at, "", maxValueLength))
	case strings.ContainsRune(value, 0):
		errs = append(errs, field.Invalid(at, value, "must not contain NUL"))
	}
	return errs
}

// ValidateDeviceNode checks the path of a device node.
func ValidateDeviceNode(node string, at *field.Path) field.ErrorList {
	if !strings.HasPrefix(node, "/dev/") || path.Clean(node) != node || strings.ContainsRune(node, 0) {
		return field.ErrorList{field.Invalid(at, node,
			"must be the path of a device node below /dev, such as /dev/dri/renderD128")}
	}
	return nil
}
