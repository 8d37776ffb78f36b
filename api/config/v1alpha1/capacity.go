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
)

// CapacityMemory is the capacity that is a device's own memory, in bytes.
const CapacityMemory = "memory"

// GrantVariable is how the name of the variable ends that tells containers what
// is granted of a capacity.
func GrantVariable(capacity string) string {
	if capacity == CapacityMemory {
		capacity += "_bytes"
	}
	return strings.ToUpper(capacity)
}

// Capacities are what shares of a device consume. A device without any can be
// shared without limit.
type Capacities struct {
	// Capacity is how much there is of what on each device, by name: memory
	// (bytes), compute, ...
	Capacity map[string]resource.Quantity `json:"capacity,omitempty"`

	// Policy is how a capacity is requested. A share that asks for nothing of
	// a capacity without a policy gets all of it (KEP-5075).
	Policy map[string]CapacityPolicy `json:"policy,omitempty"`
}

// CapacityPolicy is how a capacity is requested (KEP-5075,
// CapacityRequestPolicy): one of values, or at least min, at most max, and min
// plus a multiple of step. Requests are rounded up. Fractions of one in min,
// max or step need Kubernetes 1.37.
type CapacityPolicy struct {
	// Default is what a share gets that asks for none. Zero is fine.
	Default *resource.Quantity `json:"default"`
	// Values that can be requested, in ascending order, at most 10.
	Values []resource.Quantity `json:"values,omitempty"`

	Min  *resource.Quantity `json:"min,omitempty"`
	Max  *resource.Quantity `json:"max,omitempty"`
	Step *resource.Quantity `json:"step,omitempty"`
}

const (
	maxCapacities = 16 // the API has room for 32 capacities and attributes of a device
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
			errs = append(errs, field.Invalid(path, name, fmt.Sprintf("has the same variable in the environment as %s, %s", other, variable)))
		}
		byVariable[variable] = name
		if slices.Contains(shareVariables, name) || name == VariablePCIBusID {
			errs = append(errs, field.Invalid(path, name, "is the name of a variable of every share: choose another"))
		}
		if value := c.Capacity[name]; value.Sign() <= 0 || value.CmpInt64(math.MaxInt64) > 0 {
			errs = append(errs, field.Invalid(path, value.String(), "must be more than zero, and less than 8Ei"))
		} else if _, whole := value.AsInt64(); name == CapacityMemory && !whole {
			errs = append(errs, field.Invalid(path, value.String(), "must be a whole number of bytes, such as 16Gi"))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Policy)) {
		path := at.Child("policy").Key(name)
		capacity, ok := c.Capacity[name]
		switch {
		case exclusive:
			errs = append(errs, field.Forbidden(path, "an exclusive device is not requested in parts"))
		case !ok:
			errs = append(errs, field.Invalid(path, name, "is not a capacity: give it in capacity too"))
		default:
			errs = append(errs, c.Policy[name].validate(capacity, path)...)
		}
	}
	return errs
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

// validate refuses what the API server would refuse: with it, the whole slice
// would be (resource.k8s.io/v1, validateRequestPolicy).
func (p CapacityPolicy) validate(capacity resource.Quantity, at *field.Path) (errs field.ErrorList) {
	if p.Default == nil {
		return field.ErrorList{field.Required(at.Child("default"), "what does a share get that asks for none? Zero is fine")}
	}
	named := map[string]*resource.Quantity{"default": p.Default, "min": p.Min, "max": p.Max, "step": p.Step}
	for i := range p.Values {
		named[fmt.Sprintf("values[%d]", i)] = &p.Values[i]
	}
	for _, name := range slices.Sorted(maps.Keys(named)) {
		q := named[name]
		if q != nil && (q.Sign() < 0 || q.Cmp(capacity) > 0) {
			errs = append(errs, field.Invalid(at.Child(name), q.String(), fmt.Sprintf("must be between 0 and the capacity, %s", capacity.String())))
		} else if q != nil && !milli(*q) {
			errs = append(errs, field.Invalid(at.Child(name), q.String(), "must be a whole number, or one of thousandths up to 9P"))
		}
	}
	switch {
	case len(errs) > 0:
		return errs
	case len(p.Values) > 0 && (p.Min != nil || p.Max != nil || p.Step != nil):
		return field.ErrorList{field.Forbidden(at.Child("values"), "exclude min, max and step: give the ones or the others")}
	case len(p.Values) > 0:
		return p.validateValues(at)
	case p.Min == nil:
		return field.ErrorList{field.Required(at.Child("min"), "give min, with max and step or without, or values")}
	default:
		return p.validateRange(capacity, at)
	}
}

func (p CapacityPolicy) validateValues(at *field.Path) (errs field.ErrorList) {
	if len(p.Values) > maxValues {
		errs = append(errs, field.TooMany(at.Child("values"), len(p.Values), maxValues))
	}
	for i := 1; i < len(p.Values); i++ {
		if p.Values[i].Cmp(p.Values[i-1]) <= 0 {
			errs = append(errs, field.Invalid(at.Child("values").Index(i), p.Values[i].String(), "must be more than the one before"))
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
		case p.Step != nil && p.Step.Sign() > 0 && (q.MilliValue()-p.Min.MilliValue())%p.Step.MilliValue() != 0:
			errs = append(errs, field.Invalid(at.Child(name), q.String(), fmt.Sprintf("must be min, %s, plus a multiple of step, %s", p.Min, p.Step)))
		}
	}
	if p.Max != nil && p.Default.Cmp(*p.Max) > 0 {
		errs = append(errs, field.Invalid(at.Child("default"), p.Default.String(), fmt.Sprintf("must not be more than max, %s", p.Max)))
	}
	if p.Step == nil {
		return errs
	}
	next := p.Min.DeepCopy()
	next.Add(*p.Step)
	if p.Step.Sign() == 0 || next.Cmp(capacity) > 0 {
		errs = append(errs, field.Invalid(at.Child("step"), p.Step.String(), fmt.Sprintf("must be more than zero, and min plus step at most the capacity, %s", capacity.String())))
	}
	return errs
}

// milli tells whether a quantity can be counted in thousandths, as the
// scheduler does where one is a fraction.
func milli(q resource.Quantity) bool {
	return q.Cmp(*resource.NewMilliQuantity(q.MilliValue(), q.Format)) == 0
}

// variables that a text may have about these capacities.
func (c Capacities) variables() (names []string) {
	for _, name := range slices.Sorted(maps.Keys(c.Capacity)) {
		for _, suffix := range CapacitySuffixes {
			names = append(names, name+suffix)
		}
	}
	return names
}
