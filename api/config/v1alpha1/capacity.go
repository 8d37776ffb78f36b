// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// GrantVariable returns the last part of the name of the environment variable with a capacity's granted amount.
func GrantVariable(capacity string) string {
	if capacity == v1alpha1.CapacityMemory {
		return v1alpha1.EnvironmentMemory
	}
	return strings.ToUpper(capacity)
}

// Capacities describes how shares consume a device's capacities. A device without capacities can have any number of
// shares.
type Capacities struct {
	// Capacity holds the total amount of each capacity of one device, by name, at
	// most 16. A name is a C identifier of at most 32 characters. The capacity memory
	// is in bytes; the units of other capacities, such as compute, are up to the
	// administrator. An amount is more than 0 and less than 8Ei.
	Capacity map[string]resource.Quantity `json:"capacity,omitempty"`

	// Policy sets the amounts of a capacity that claims can request, by name. Without a policy, a claim that does not
	// request the capacity gets all of it (KEP-5075). Policies are forbidden for exclusive devices.
	Policy map[string]CapacityPolicy `json:"policy,omitempty"`
}

// CapacityPolicy sets the amounts of a capacity that claims can request (KEP-5075,
// CapacityRequestPolicy): either values, or a range with min and optionally max and
// step. The scheduler rounds requests up to the next valid amount. All amounts lie
// between 0 and the capacity. Fractions of 1 in min, max, or step require
// Kubernetes 1.37.
type CapacityPolicy struct {
	// Default is the amount for a claim that does not request the capacity. It must
	// be one of values, or in the range. It can be 0.
	Default *resource.Quantity `json:"default"`

	// Values lists the amounts that claims can request, in ascending order, at most
	// 10.
	Values []resource.Quantity `json:"values,omitempty"`

	// Min is the smallest amount of the range.
	Min *resource.Quantity `json:"min,omitempty"`

	// Max is the largest amount of the range. The default is the capacity.
	Max *resource.Quantity `json:"max,omitempty"`

	// Step is the difference between the amounts of the range. By default, every
	// amount in the range is valid.
	Step *resource.Quantity `json:"step,omitempty"`
}

const (
	maxCapacities = 16 // resource.k8s.io/v1 allows 32 capacities and attributes of a device together
	maxValues     = 10 // resource.k8s.io/v1, CapacityRequestPolicyDiscreteMaxOptions
	maxIdentifier = 32 // resource.k8s.io/v1, DeviceMaxIDLength
)

func (c Capacities) validate(at *field.Path, exclusive bool) (errs field.ErrorList) {
	if len(c.Capacity) > maxCapacities {
		errs = append(errs, field.TooMany(at.Child("capacity"), len(c.Capacity), maxCapacities))
	}
	byVariable := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(c.Capacity)) {
		path := at.Child("capacity").Key(name)
		errs = append(errs, validateIdentifier(name, path)...)
		variable := GrantVariable(name)
		if other, taken := byVariable[variable]; taken {
			errs = append(errs, field.Invalid(path, name,
				fmt.Sprintf("maps to the same environment variable as %s (%s): choose another name", other, variable)))
		}
		byVariable[variable] = name
		if slices.Contains(shareVariables, name) || name == VariablePCIBusID {
			errs = append(errs, field.Invalid(path, name, "is reserved: every share has a variable with this name"))
		}
		errs = append(errs, validateAmount(name, c.Capacity[name], path)...)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Policy)) {
		path := at.Child("policy").Key(name)
		capacity, ok := c.Capacity[name]
		switch {
		case exclusive:
			errs = append(errs, field.Forbidden(path, "claims cannot request parts of an exclusive device"))
		case !ok:
			errs = append(errs, field.Invalid(path, name, "is not a capacity: add it to capacity"))
		default:
			errs = append(errs, c.Policy[name].validate(capacity, path)...)
		}
	}
	return errs
}

func validateAmount(name string, amount resource.Quantity, at *field.Path) field.ErrorList {
	if amount.Sign() <= 0 || amount.CmpInt64(math.MaxInt64) > 0 {
		return field.ErrorList{field.Invalid(at, amount.String(), "must be more than zero, and less than 8Ei")}
	}
	if _, whole := amount.AsInt64(); name == v1alpha1.CapacityMemory && !whole {
		return field.ErrorList{field.Invalid(at, amount.String(), "must be a whole number of bytes, such as 16Gi")}
	}
	return nil
}

// validateIdentifier checks the name of a capacity or an attribute.
func validateIdentifier(name string, at *field.Path) (errs field.ErrorList) {
	for _, problem := range validation.IsCIdentifier(name) {
		errs = append(errs, field.Invalid(at, name, problem))
	}
	if len(name) > maxIdentifier {
		errs = append(errs, field.TooLong(at, name, maxIdentifier))
	}
	return errs
}

// validate refuses values that the API server refuses (resource.k8s.io/v1, validateRequestPolicy): one invalid policy
// would make it refuse all devices in the ResourceSlice.
func (p CapacityPolicy) validate(capacity resource.Quantity, at *field.Path) (errs field.ErrorList) {
	if p.Default == nil {
		return field.ErrorList{field.Required(at.Child("default"),
			"must be set: the amount for claims that do not request the capacity; 0 is valid")}
	}
	if errs := p.validateAmounts(capacity, at); len(errs) > 0 {
		return errs
	}
	hasRange := p.Min != nil || p.Max != nil || p.Step != nil
	switch {
	case len(p.Values) > 0 && hasRange:
		return field.ErrorList{field.Forbidden(at.Child("values"), "give either values or min, max, and step")}
	case len(p.Values) > 0:
		return p.validateValues(at)
	case p.Min == nil:
		return field.ErrorList{field.Required(at.Child("min"), "give min, optionally with max and step, or values")}
	default:
		return p.validateRange(capacity, at)
	}
}

// validateAmounts checks each amount of a policy on its own.
func (p CapacityPolicy) validateAmounts(capacity resource.Quantity, at *field.Path) (errs field.ErrorList) {
	amounts := map[string]*resource.Quantity{"default": p.Default, "min": p.Min, "max": p.Max, "step": p.Step}
	for i := range p.Values {
		amounts[fmt.Sprintf("values[%d]", i)] = &p.Values[i]
	}
	for _, name := range slices.Sorted(maps.Keys(amounts)) {
		q := amounts[name]
		switch {
		case q == nil:
		case q.Sign() < 0 || q.Cmp(capacity) > 0:
			errs = append(errs, field.Invalid(at.Child(name), q.String(),
				fmt.Sprintf("must be between 0 and the capacity, %s", capacity.String())))
		case !isMilli(*q):
			errs = append(errs, field.Invalid(at.Child(name), q.String(),
				"must be a whole number, or a multiple of 1m of at most 9P"))
		}
	}
	return errs
}

func (p CapacityPolicy) validateValues(at *field.Path) (errs field.ErrorList) {
	if len(p.Values) > maxValues {
		errs = append(errs, field.TooMany(at.Child("values"), len(p.Values), maxValues))
	}
	for i := 1; i < len(p.Values); i++ {
		if p.Values[i].Cmp(p.Values[i-1]) <= 0 {
			errs = append(errs, field.Invalid(at.Child("values").Index(i), p.Values[i].String(),
				"must be more than the value before it"))
		}
	}
	if !slices.ContainsFunc(p.Values, func(v resource.Quantity) bool { return v.Cmp(*p.Default) == 0 }) {
		errs = append(errs, field.Invalid(at.Child("default"), p.Default.String(), "must be one of values"))
	}
	return errs
}

func (p CapacityPolicy) validateRange(capacity resource.Quantity, at *field.Path) (errs field.ErrorList) {
	for name, q := range map[string]*resource.Quantity{"default": p.Default, "max": p.Max} {
		switch {
		case q == nil:
		case q.Cmp(*p.Min) < 0:
			errs = append(errs, field.Invalid(at.Child(name), q.String(), fmt.Sprintf("must not be less than min, %s", p.Min)))
		case !p.isOnStep(*q):
			errs = append(errs, field.Invalid(at.Child(name), q.String(),
				fmt.Sprintf("must be min, %s, plus a multiple of step, %s", p.Min, p.Step)))
		}
	}
	if p.Max != nil && p.Default.Cmp(*p.Max) > 0 {
		errs = append(errs, field.Invalid(at.Child("default"), p.Default.String(),
			fmt.Sprintf("must not be more than max, %s", p.Max)))
	}
	if p.Step == nil {
		return errs
	}
	next := p.Min.DeepCopy()
	next.Add(*p.Step)
	if p.Step.Sign() == 0 || next.Cmp(capacity) > 0 {
		errs = append(errs, field.Invalid(at.Child("step"), p.Step.String(),
			fmt.Sprintf("must be more than zero, and min plus step at most the capacity, %s", capacity.String())))
	}
	return errs
}

// isOnStep reports whether an amount is min plus a multiple of step.
func (p CapacityPolicy) isOnStep(q resource.Quantity) bool {
	if p.Step == nil || p.Step.Sign() <= 0 {
		return true
	}
	return (q.MilliValue()-p.Min.MilliValue())%p.Step.MilliValue() == 0
}

// isMilli reports whether a quantity is a multiple of 1m that fits an int64: the scheduler calculates in that unit as
// soon as one of the amounts is a fraction.
func isMilli(q resource.Quantity) bool {
	return q.Cmp(*resource.NewMilliQuantity(q.MilliValue(), q.Format)) == 0
}

// variables returns the names of the variables for these capacities in edits.
func (c Capacities) variables() (names []string) {
	for _, name := range slices.Sorted(maps.Keys(c.Capacity)) {
		for _, suffix := range capacitySuffixes {
			names = append(names, name+suffix)
		}
	}
	return names
}
