// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// Fabric is a device that spans several nodes, such as a rack's accelerator interconnect. The controller publishes it
// once per cluster, and each node's plugin prepares the containers there.
type Fabric struct {
	// Name is the name of the fabric, a DNS label. It is also the name of the device,
	// and it is published as the attribute fabric.
	Name string `json:"name"`

	// NodeSelector holds the labels of the nodes connected to the fabric. A node must have all of them.
	NodeSelector map[string]string `json:"nodeSelector"`

	// Attributes holds attributes that are published with the device, as strings of 1
	// to 64 characters. A name is a C identifier of at most 32 characters, and not
	// kind or fabric.
	Attributes map[string]string `json:"attributes,omitempty"`

	// Exclusive makes the fabric a device that only one claim can use at a time. The
	// default is false.
	Exclusive bool `json:"exclusive,omitempty"`

	// Groups is the number of pod groups that can use the fabric at the same time: each claim counts once, and a
	// PodGroup's shards count once together. It is forbidden for an exclusive fabric. The default, 0, means no limit.
	Groups int32 `json:"groups,omitempty"`

	Capacities `json:",inline"`

	// Edits describes what containers with a share get in addition to the
	// FabricMembership file.
	Edits Edits `json:"edits,omitempty"`
}

// reservedAttributes are the attributes that the driver itself gives a fabric.
var reservedAttributes = []string{v1alpha1.AttributeKind, v1alpha1.AttributeFabric}

// maxAttributeLength is the API's limit for a string attribute, in characters.
const maxAttributeLength = 64

func (f *Fabric) validate(at *field.Path) (errs field.ErrorList) {
	errs = append(errs, validateNodeSelector(f.NodeSelector, at.Child("nodeSelector"))...)
	for _, name := range slices.Sorted(maps.Keys(f.Attributes)) {
		errs = append(errs, validateAttribute(name, f.Attributes[name], at.Child("attributes").Key(name))...)
	}
	if f.Groups < 0 {
		errs = append(errs, field.Invalid(at.Child("groups"), f.Groups, "must not be negative; leave it out for any number"))
	}
	if f.Groups > 0 && f.Exclusive {
		errs = append(errs, field.Forbidden(at.Child("groups"), "only one claim can use an exclusive fabric"))
	}
	if _, taken := f.Capacity[v1alpha1.CapacityGroups]; taken {
		errs = append(errs, field.Forbidden(at.Child("capacity").Key(v1alpha1.CapacityGroups),
			"set the fabric's field groups instead"))
	}
	errs = append(errs, f.Capacities.validate(at, f.Exclusive)...)
	return append(errs, f.Edits.validate(at.Child("edits"), append(f.variables(), shareVariables...))...)
}

func validateNodeSelector(selector map[string]string, at *field.Path) (errs field.ErrorList) {
	if len(selector) == 0 {
		errs = append(errs, field.Required(at, "give the labels of the nodes that are connected to the fabric"))
	}
	for _, name := range slices.Sorted(maps.Keys(selector)) {
		for _, problem := range validation.IsQualifiedName(name) {
			errs = append(errs, field.Invalid(at, name, problem))
		}
		for _, problem := range validation.IsValidLabelValue(selector[name]) {
			errs = append(errs, field.Invalid(at.Key(name), selector[name], problem))
		}
	}
	return errs
}

func validateAttribute(name, value string, at *field.Path) (errs field.ErrorList) {
	errs = append(errs, validateIdentifier(name, at)...)
	if slices.Contains(reservedAttributes, name) {
		errs = append(errs, field.Forbidden(at, "the driver sets it"))
	}
	if value == "" || len(value) > maxAttributeLength {
		errs = append(errs, field.Invalid(at, value, fmt.Sprintf("must have 1 to %d characters", maxAttributeLength)))
	}
	return errs
}
