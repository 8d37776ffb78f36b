package v1alpha1

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// Defaults and limits of a Network.
const (
	defaultShares = 128
	maxShares     = 3000 // class numbers on one NIC
)

// Defaults of a Policy.
const (
	defaultBandwidth = 100_000_000
	defaultMin       = 10_000_000
	defaultStep      = 10_000_000
)

// Load reads a DriverConfig from YAML or JSON, strictly, fills in defaults and
// validates it. The error names every field that is wrong, and what would be right.
func Load(raw []byte) (*DriverConfig, error) {
	asJSON, err := yaml.YAMLToJSONStrict(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Kind, err)
	}
	var c DriverConfig
	strict, err := json.UnmarshalStrict(asJSON, &c)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Kind, err)
	}
	if c.APIVersion != APIVersion || c.Kind != Kind {
		return nil, fmt.Errorf("apiVersion %q, kind %q: want %q, %q", c.APIVersion, c.Kind, APIVersion, Kind)
	}
	if len(strict) > 0 {
		texts := make([]string, len(strict))
		for i, err := range strict {
			texts[i] = err.Error()
		}
		return nil, fmt.Errorf("%s: %s", Kind, strings.Join(texts, "; "))
	}
	for i := range c.Networks {
		setDefaults(&c.Networks[i])
	}
	if errs := validate(&c); len(errs) > 0 {
		return nil, fmt.Errorf("%s: %w", Kind, errs.ToAggregate())
	}
	return &c, nil
}

func setDefaults(n *Network) {
	if n.Enforcement == "" {
		n.Enforcement = EnforcementShape
	}
	if n.LinkDown == "" {
		n.LinkDown = TaintNoSchedule
	}
	if n.Shares == nil {
		shares := int32(defaultShares)
		n.Shares = &shares
	}
	if n.Allow.Modes == nil {
		n.Allow.Modes = []params.Mode{params.ModePrivate}
	}
	if n.Allow.Burst == nil {
		n.Allow.Burst = []params.Burst{params.BurstGuaranteed}
	}
	quantity := func(q **resource.Quantity, value int64) {
		if *q == nil {
			*q = resource.NewQuantity(value, resource.DecimalSI)
		}
	}
	quantity(&n.Policy.Min, defaultMin)
	quantity(&n.Policy.Step, defaultStep)
	quantity(&n.Policy.Default, max(defaultBandwidth, n.Policy.Min.Value()))
}

func validate(c *DriverConfig) (errs field.ErrorList) {
	networks, accelerators, fabrics := names{}, names{}, names{}
	for i := range c.Networks {
		at := field.NewPath("networks").Index(i)
		errs = append(errs, networks.validate(c.Networks[i].Name, at)...)
		errs = append(errs, c.Networks[i].validate(at)...)
	}
	for i := range c.Accelerators {
		at := field.NewPath("accelerators").Index(i)
		errs = append(errs, accelerators.validate(c.Accelerators[i].Name, at)...)
		errs = append(errs, c.Accelerators[i].validate(at)...)
	}
	for i := range c.Fabrics {
		at := field.NewPath("fabrics").Index(i)
		errs = append(errs, fabrics.validate(c.Fabrics[i].Name, at)...)
		errs = append(errs, c.Fabrics[i].validate(at)...)
	}
	return errs
}

// names that a list has so far.
type names map[string]bool

func (n names) validate(name string, at *field.Path) (errs field.ErrorList) {
	for _, problem := range validation.IsDNS1123Label(name) {
		errs = append(errs, field.Invalid(at.Child("name"), name, problem))
	}
	if n[name] {
		errs = append(errs, field.Duplicate(at.Child("name"), name))
	}
	n[name] = true
	return errs
}

func (n *Network) validate(at *field.Path) (errs field.ErrorList) {
	if len(n.Interfaces) == 0 {
		errs = append(errs, field.Required(at.Child("interfaces"), "name at least one NIC or a pattern of names"))
	}
	for i, pattern := range n.Interfaces {
		if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
			errs = append(errs, field.Invalid(at.Child("interfaces").Index(i), pattern, "must be a name or a pattern of names, such as eth1 or ens*f0"))
		}
	}
	if *n.Shares < 1 || *n.Shares > maxShares {
		errs = append(errs, field.Invalid(at.Child("shares"), *n.Shares, fmt.Sprintf("must be between 1 and %d", maxShares)))
	}
	if !slices.Contains([]Enforcement{EnforcementShape, EnforcementNone}, n.Enforcement) {
		errs = append(errs, field.NotSupported(at.Child("enforcement"), n.Enforcement, []Enforcement{EnforcementShape, EnforcementNone}))
	}
	if effects := []TaintEffect{TaintNone, TaintNoSchedule, TaintNoExecute}; !slices.Contains(effects, n.LinkDown) {
		errs = append(errs, field.NotSupported(at.Child("linkDown"), n.LinkDown, effects))
	}
	errs = append(errs, n.Allow.validate(at.Child("allow"))...)
	errs = append(errs, positive(n.Bandwidth, at.Child("bandwidth"))...)
	errs = append(errs, positive(n.Reserve, at.Child("reserve"))...)
	if n.Bandwidth != nil && n.Reserve != nil && n.Reserve.Cmp(*n.Bandwidth) >= 0 {
		errs = append(errs, field.Invalid(at.Child("reserve"), n.Reserve.String(), fmt.Sprintf("must be less than bandwidth, %s", n.Bandwidth)))
	}
	return append(errs, n.Policy.validate(at.Child("policy"))...)
}

func (a Allow) validate(at *field.Path) (errs field.ErrorList) {
	for i, m := range a.Modes {
		if m != params.ModePrivate && m != params.ModeBridge {
			errs = append(errs, field.NotSupported(at.Child("modes").Index(i), m, []params.Mode{params.ModePrivate, params.ModeBridge}))
		}
	}
	for i, b := range a.Burst {
		if b != params.BurstGuaranteed && b != params.BurstLine {
			errs = append(errs, field.NotSupported(at.Child("burst").Index(i), b, []params.Burst{params.BurstGuaranteed, params.BurstLine}))
		}
	}
	for i, s := range a.Subnets {
		if _, err := netip.ParsePrefix(s); err != nil {
			errs = append(errs, field.Invalid(at.Child("subnets").Index(i), s, "must be a network, such as 10.20.0.0/16"))
		}
	}
	return errs
}

func (p Policy) validate(at *field.Path) (errs field.ErrorList) {
	errs = append(errs, positive(p.Default, at.Child("default"))...)
	errs = append(errs, positive(p.Min, at.Child("min"))...)
	errs = append(errs, positive(p.Step, at.Child("step"))...)
	if len(errs) > 0 {
		return errs
	}
	if p.Default.Cmp(*p.Min) < 0 {
		errs = append(errs, field.Invalid(at.Child("default"), p.Default.String(), fmt.Sprintf("must not be less than min, %s", p.Min)))
	} else if beyond := p.Default.Value() - p.Min.Value(); beyond%p.Step.Value() != 0 {
		errs = append(errs, field.Invalid(at.Child("default"), p.Default.String(), fmt.Sprintf("must be min, %s, plus a multiple of step, %s", p.Min, p.Step)))
	}
	return errs
}

// positive accepts whole bits per second. A fraction ("100m" for "100M") is
// a slip of the shift key that would grant next to nothing.
func positive(q *resource.Quantity, at *field.Path) field.ErrorList {
	if q == nil {
		return nil
	}
	if value, ok := q.AsInt64(); !ok || value < 8 {
		return field.ErrorList{field.Invalid(at, q.String(), "must be a whole number of bits per second, at least 8, such as 100M or 10G")}
	}
	return nil
}

// Allowed is what claims may ask for on a NIC of the network. mtu is the
// NIC's, in bytes.
func (n *Network) Allowed(mtu int32) params.AllowedNetwork {
	allowed := params.AllowedNetwork{Network: n.Name, Modes: n.Allow.Modes, Bursts: n.Allow.Burst, MTU: mtu}
	for _, s := range n.Allow.Subnets {
		if p, err := netip.ParsePrefix(s); err == nil { // validated by Load
			allowed.Subnets = append(allowed.Subnets, p.Masked())
		}
	}
	return allowed
}

// NetworkOf returns the network that a NIC belongs to, nil if it is not ours.
func (c *DriverConfig) NetworkOf(nic string, hasDefaultRoute bool) *Network {
	for i := range c.Networks {
		for _, pattern := range c.Networks[i].Interfaces {
			if pattern == nic {
				return &c.Networks[i]
			}
			if match, err := path.Match(pattern, nic); err == nil && match && !hasDefaultRoute {
				return &c.Networks[i]
			}
		}
	}
	return nil
}
