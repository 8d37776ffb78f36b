package v1alpha1

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// Accelerator is a group of accelerators and the rules for sharing them. A
// device belongs to the first group that matches it.
type Accelerator struct {
	// Name of the group, a DNS label; published as the attribute "accelerator".
	Name string `json:"name"`

	// Match says which devices of a node these are.
	Match Match `json:"match"`

	// Exclusive publishes the devices as dedicated: each goes to one claim.
	Exclusive bool `json:"exclusive,omitempty"`

	Capacities `json:",inline"`

	// Edits are what containers with a share find beside its device nodes.
	Edits Edits `json:"edits,omitempty"`

	// Allow is what claims may ask for.
	Allow AcceleratorAllow `json:"allow,omitempty"`
}

// Match says which devices are meant: those for which all that is given holds.
type Match struct {
	// PCIClass is the class code of PCI devices, in hexadecimal digits, or
	// how it begins: 0302 (3D controller), 12 (processing accelerator), ...
	PCIClass string `json:"pciClass,omitempty"`
	// Vendor and Device are PCI IDs, four hexadecimal digits each.
	Vendor string `json:"vendor,omitempty"`
	Device string `json:"device,omitempty"`
	// DevicePaths are patterns of device nodes (/dev/npu[0-9]*). Together
	// with PCI criteria they say which nodes of the matching devices count;
	// alone, each matching node is a device, and those of one PCI device are
	// one.
	DevicePaths []string `json:"devicePaths,omitempty"`
}

// OnPCI tells whether only PCI devices can match.
func (m Match) OnPCI() bool { return m.PCIClass != "" || m.Vendor != "" || m.Device != "" }

// AcceleratorAllow is what claims may ask for.
type AcceleratorAllow struct {
	// DeviceNodes are patterns of further device nodes; default: none.
	DeviceNodes []string `json:"deviceNodes,omitempty"`
}

// Allowed is what claims may ask for of the accelerators.
func (a *Accelerator) Allowed() params.AllowedAccelerator {
	return params.AllowedAccelerator{Accelerator: a.Name, DeviceNodes: a.Allow.DeviceNodes,
		Environment: slices.Sorted(maps.Keys(a.Edits.Environment))}
}

// Fabric is a device that spans nodes: the links among accelerators of a rack,
// a slice of a torus. The controller publishes it; each node prepares its own
// part.
type Fabric struct {
	// Name of the fabric, a DNS label; the device's name, and the attribute
	// "fabric".
	Name string `json:"name"`

	// NodeSelector are the labels of the nodes that are on the fabric.
	NodeSelector map[string]string `json:"nodeSelector"`

	// Attributes are published with the device, as strings.
	Attributes map[string]string `json:"attributes,omitempty"`

	// Exclusive publishes the fabric as dedicated: it goes to one claim.
	Exclusive bool `json:"exclusive,omitempty"`

	// Groups is how many claims the fabric serves at once: one for each group of
	// pods, however many pods that has. Default: any number.
	Groups int `json:"groups,omitempty"`

	Capacities `json:",inline"`

	// Edits are what containers find beside the membership file.
	Edits Edits `json:"edits,omitempty"`
}

var hexadecimal = regexp.MustCompile("^[0-9a-fA-F]+$")

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

func (m Match) validate(at *field.Path) (errs field.ErrorList) {
	if !m.OnPCI() && len(m.DevicePaths) == 0 {
		errs = append(errs, field.Required(at, "give pciClass, vendor and device, or devicePaths"))
	}
	for name, id := range map[string]string{"vendor": m.Vendor, "device": m.Device} {
		if id != "" && (len(id) != 4 || !hexadecimal.MatchString(id)) {
			errs = append(errs, field.Invalid(at.Child(name), id, "must be four hexadecimal digits, such as 10de"))
		}
	}
	if m.PCIClass != "" && (len(m.PCIClass) > 6 || len(m.PCIClass)%2 != 0 || !hexadecimal.MatchString(m.PCIClass)) {
		errs = append(errs, field.Invalid(at.Child("pciClass"), m.PCIClass, "must be two, four or six hexadecimal digits, such as 0302"))
	}
	for i, pattern := range m.DevicePaths {
		errs = append(errs, validatePattern(pattern, at.Child("devicePaths").Index(i))...)
	}
	return errs
}

func validatePattern(pattern string, at *field.Path) field.ErrorList {
	if _, err := path.Match(pattern, ""); err != nil || !strings.HasPrefix(pattern, "/dev/") || path.Clean(pattern) != pattern {
		return field.ErrorList{field.Invalid(at, pattern, "must be a path below /dev or a pattern of paths, such as /dev/npu[0-9]*")}
	}
	return nil
}

func (f *Fabric) validate(at *field.Path) (errs field.ErrorList) {
	selector := at.Child("nodeSelector")
	if len(f.NodeSelector) == 0 {
		errs = append(errs, field.Required(selector, "give the labels of the nodes that are on the fabric"))
	}
	for _, name := range slices.Sorted(maps.Keys(f.NodeSelector)) {
		for _, problem := range validation.IsQualifiedName(name) {
			errs = append(errs, field.Invalid(selector, name, problem))
		}
		for _, problem := range validation.IsValidLabelValue(f.NodeSelector[name]) {
			errs = append(errs, field.Invalid(selector.Key(name), f.NodeSelector[name], problem))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.Attributes)) {
		errs = append(errs, f.validateAttribute(name, at.Child("attributes").Key(name))...)
	}
	if f.Groups < 0 {
		errs = append(errs, field.Invalid(at.Child("groups"), f.Groups, "must not be negative; leave it out for any number"))
	}
	if f.Groups > 0 && f.Exclusive {
		errs = append(errs, field.Forbidden(at.Child("groups"), "an exclusive fabric goes to one claim"))
	}
	if _, taken := f.Capacity["groups"]; taken {
		errs = append(errs, field.Forbidden(at.Child("capacity").Key("groups"), "say groups: <number> beside capacity"))
	}
	errs = append(errs, f.Capacities.validate(at, f.Exclusive)...)
	return append(errs, f.Edits.validate(at.Child("edits"), append(f.variables(), shareVariables...))...)
}

// ownAttributes are those that the driver gives a fabric.
var ownAttributes = []string{"kind", "fabric"}

// maxAttribute is the API's limit for a string attribute, in characters.
const maxAttribute = 64

func (f *Fabric) validateAttribute(name string, at *field.Path) (errs field.ErrorList) {
	errs = append(errs, validateIdentifier(name, at)...)
	if slices.Contains(ownAttributes, name) {
		errs = append(errs, field.Forbidden(at, "the driver sets it"))
	}
	if value := f.Attributes[name]; value == "" || len(value) > maxAttribute {
		errs = append(errs, field.Invalid(at, value, fmt.Sprintf("must have 1 to %d characters", maxAttribute)))
	}
	return errs
}
