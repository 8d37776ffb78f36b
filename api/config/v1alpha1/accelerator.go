// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// Accelerator selects accelerators, and sets the rules for sharing them.
type Accelerator struct {
	// Name is the name of the entry, a DNS label. It is published as the devices' attribute accelerator.
	Name string `json:"name"`

	// Match selects the devices that the entry applies to.
	Match Match `json:"match"`

	// Exclusive makes each accelerator a device that only one claim can use at a
	// time. The default is false.
	Exclusive bool `json:"exclusive,omitempty"`

	Capacities `json:",inline"`

	// Edits describes what containers with a share get in addition to the accelerator's device nodes.
	Edits Edits `json:"edits,omitempty"`

	// Allow limits what claims can request in an AcceleratorShare.
	Allow AcceleratorAllow `json:"allow,omitempty"`
}

// Match selects devices. All fields that are set must match, and at least one must be
// set.
type Match struct {
	// PCIClass is the class code of a PCI device, or its first two or four digits, in
	// hexadecimal, such as 0302 (3D controller) or 12 (processing accelerator).
	PCIClass string `json:"pciClass,omitempty"`

	// Vendor is the PCI vendor ID, four hexadecimal digits such as 10de.
	Vendor string `json:"vendor,omitempty"`

	// Device is the PCI device ID, four hexadecimal digits such as 2335.
	Device string `json:"device,omitempty"`

	// DevicePaths lists patterns of device nodes, such as /dev/npu[0-9]*. In addition to PCI criteria, they select the
	// nodes of a device that containers get. Without PCI criteria, each matching node is a device, except that one PCI
	// device's nodes form one device.
	DevicePaths []string `json:"devicePaths,omitempty"`
}

// OnPCI reports whether only PCI devices can match.
func (m Match) OnPCI() bool { return m.PCIClass != "" || m.Vendor != "" || m.Device != "" }

// AcceleratorAllow limits what claims can request from an entry's accelerators.
type AcceleratorAllow struct {
	// DeviceNodes lists patterns of additional device nodes that claims can request, such as /dev/dri/card*. By
	// default, claims cannot request any.
	DeviceNodes []string `json:"deviceNodes,omitempty"`
}

// Allowed returns what claims can request from the accelerators.
func (a *Accelerator) Allowed() v1alpha1.AllowedAccelerator {
	return v1alpha1.AllowedAccelerator{
		Accelerator: a.Name,
		DeviceNodes: a.Allow.DeviceNodes,
		Environment: slices.Sorted(maps.Keys(a.Edits.Environment)),
	}
}

func (a *Accelerator) validate(at *field.Path) (errs field.ErrorList) {
	errs = append(errs, a.Match.validate(at.Child("match"))...)
	errs = append(errs, a.Capacities.validate(at, a.Exclusive)...)
	for i, pattern := range a.Allow.DeviceNodes {
		errs = append(errs, validatePattern(pattern, at.Child("allow", "deviceNodes").Index(i))...)
	}
	variables := slices.Clone(shareVariables)
	if a.Match.OnPCI() {
		variables = append(variables, VariablePCIBusID)
	}
	return append(errs, a.Edits.validate(at.Child("edits"), append(variables, a.variables()...))...)
}

var hexadecimal = regexp.MustCompile("^[0-9a-fA-F]+$")

func (m Match) validate(at *field.Path) (errs field.ErrorList) {
	if !m.OnPCI() && len(m.DevicePaths) == 0 {
		errs = append(errs, field.Required(at, "give pciClass, vendor and device, or devicePaths"))
	}
	for name, id := range map[string]string{"vendor": m.Vendor, "device": m.Device} {
		if id != "" && (len(id) != 4 || !hexadecimal.MatchString(id)) {
			errs = append(errs, field.Invalid(at.Child(name), id, "must be four hexadecimal digits, such as 10de"))
		}
	}
	if m.PCIClass != "" && !isPCIClass(m.PCIClass) {
		errs = append(errs, field.Invalid(at.Child("pciClass"), m.PCIClass,
			"must be two, four, or six hexadecimal digits, such as 0302"))
	}
	for i, pattern := range m.DevicePaths {
		errs = append(errs, validatePattern(pattern, at.Child("devicePaths").Index(i))...)
	}
	return errs
}

// isPCIClass reports whether a text is a class code of one, two, or three bytes.
func isPCIClass(text string) bool {
	return len(text) <= 6 && len(text)%2 == 0 && hexadecimal.MatchString(text)
}

func validatePattern(pattern string, at *field.Path) field.ErrorList {
	_, err := path.Match(pattern, "")
	if err != nil || !strings.HasPrefix(pattern, "/dev/") || path.Clean(pattern) != pattern {
		return field.ErrorList{field.Invalid(at, pattern,
			"must be a path below /dev or a pattern of paths, such as /dev/npu[0-9]*")}
	}
	return nil
}
