// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

const (
	// maxShares is the number of class numbers available for one NIC's shares.
	maxShares = 3000
	// maxOverhead is the largest overhead, in bytes. No encapsulation adds more to a frame.
	maxOverhead = 256
	// maxResourceName is the API's limit for the value of an attribute, in characters.
	maxResourceName = 64
	// minRate is the smallest rate in bits per second: the kernel counts bytes.
	minRate = 8
	// maxVLAN is the largest VLAN ID (IEEE 802.1Q).
	maxVLAN = 4094
)

// Validate checks a DriverConfig with defaults. Each error names the field, its
// value, and what is expected.
func (c *DriverConfig) Validate() (errs field.ErrorList) {
	networks, accelerators, fabrics := nameSet{}, nameSet{}, nameSet{}
	for i := range c.Networks {
		at := field.NewPath("networks").Index(i)
		errs = append(errs, networks.add(c.Networks[i].Name, at)...)
		errs = append(errs, c.Networks[i].validate(at)...)
	}
	for i := range c.Accelerators {
		at := field.NewPath("accelerators").Index(i)
		errs = append(errs, accelerators.add(c.Accelerators[i].Name, at)...)
		errs = append(errs, c.Accelerators[i].validate(at)...)
	}
	for i := range c.Fabrics {
		at := field.NewPath("fabrics").Index(i)
		errs = append(errs, fabrics.add(c.Fabrics[i].Name, at)...)
		errs = append(errs, c.Fabrics[i].validate(at)...)
	}
	return errs
}

// nameSet holds the names of a list's elements.
type nameSet map[string]bool

// add checks a name, and that no earlier element has it.
func (s nameSet) add(name string, at *field.Path) (errs field.ErrorList) {
	for _, problem := range validation.IsDNS1123Label(name) {
		errs = append(errs, field.Invalid(at.Child("name"), name, problem))
	}
	if s[name] {
		errs = append(errs, field.Duplicate(at.Child("name"), name))
	}
	s[name] = true
	return errs
}

func (n *Network) validate(at *field.Path) (errs field.ErrorList) {
	if len(n.Interfaces) == 0 {
		errs = append(errs, field.Required(at.Child("interfaces"), "name at least one NIC or a pattern of names"))
	}
	for i, pattern := range n.Interfaces {
		if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
			errs = append(errs, field.Invalid(at.Child("interfaces").Index(i), pattern,
				"must be a name or a pattern of names, such as eth1 or ens*f0"))
		}
	}
	if n.ResourceName != "" {
		errs = append(errs, validateResourceName(n.ResourceName, at.Child("resourceName"))...)
	}
	if *n.Shares < 1 || *n.Shares > maxShares {
		errs = append(errs, field.Invalid(at.Child("shares"), *n.Shares, fmt.Sprintf("must be between 1 and %d", maxShares)))
	}
	if n.Overhead < 0 || n.Overhead > maxOverhead {
		errs = append(errs, field.Invalid(at.Child("overhead"), n.Overhead,
			fmt.Sprintf("must be between 0 and %d bytes", maxOverhead)))
	}
	errs = append(errs, n.validateEnums(at)...)
	errs = append(errs, n.validateAllow(at)...)
	errs = append(errs, n.validateRates(at)...)
	return append(errs, n.Policy.validate(at.Child("policy"))...)
}

func (n *Network) validateEnums(at *field.Path) (errs field.ErrorList) {
	errs = append(errs, validateEnum(n.Enforcement, at.Child("enforcement"), EnforcementShape, EnforcementNone)...)
	errs = append(errs, validateEnum(n.Identity, at.Child("identity"), IdentityEnforce, IdentityAudit, IdentityOff)...)
	errs = append(errs, validateEnum(n.DuplicateAddressDetection, at.Child("duplicateAddressDetection"),
		DuplicateAddressReport, DuplicateAddressRefuse, DuplicateAddressOff)...)
	errs = append(errs, validateEnum(n.Shaping, at.Child("shaping"), ShapingSingleQueue, ShapingMultiQueue)...)
	if n.Shaping == ShapingMultiQueue && slices.Contains(n.Allow.Burst, v1alpha1.BurstLine) {
		errs = append(errs, field.Forbidden(at.Child("shaping"), "MultiQueue: shares cannot borrow bandwidth: "+
			"remove Line from allow.burst"))
	}
	errs = append(errs, validateEnum(n.LinkDown, at.Child("linkDown"), TaintNone, TaintNoSchedule, TaintNoExecute)...)
	return errs
}

// validateAllow validates allow, and the fields that depend on it.
func (n *Network) validateAllow(at *field.Path) (errs field.ErrorList) {
	errs = append(errs, n.Allow.validate(at.Child("allow"))...)
	for i, family := range n.DHCP {
		if !slices.Contains(n.Allow.DHCP, family) {
			errs = append(errs, field.Forbidden(at.Child("dhcp").Index(i), fmt.Sprintf(
				"%s: not in allow.dhcp: add it there", family)))
		}
	}
	switch node := at.Child("allow", "node"); {
	case !n.Allow.Node:
	case !slices.Contains(n.Allow.Modes, v1alpha1.ModeBridge):
		errs = append(errs, field.Forbidden(node,
			"only links with the mode Bridge reach the node, and allow.modes does not have it: add Bridge to allow.modes"))
	case n.Enforcement == EnforcementNone:
		errs = append(errs, field.Forbidden(node, "requires enforcement Shape: without it, the kernel switches the frames"))
	}
	return errs
}

// validateRates validates the rates, and that reserve and forwarded leave some bandwidth for shares.
func (n *Network) validateRates(at *field.Path) (errs field.ErrorList) {
	errs = append(errs, validateRate(n.Bandwidth, at.Child("bandwidth"))...)
	errs = append(errs, validateRate(n.Reserve, at.Child("reserve"))...)
	errs = append(errs, validateRate(n.Multicast, at.Child("multicast"))...)
	if n.Forwarded != nil && !n.Forwarded.IsZero() {
		errs = append(errs, validateRate(n.Forwarded, at.Child("forwarded"))...)
	}
	switch withForwarded := sum(n.Reserve, n.Forwarded); {
	case n.Bandwidth == nil:
	case n.Reserve != nil && n.Reserve.Cmp(*n.Bandwidth) >= 0:
		errs = append(errs, field.Invalid(at.Child("reserve"), n.Reserve.String(),
			fmt.Sprintf("must be less than bandwidth, %s", n.Bandwidth)))
	case withForwarded.Cmp(*n.Bandwidth) >= 0:
		errs = append(errs, field.Invalid(at.Child("forwarded"), n.Forwarded.String(),
			fmt.Sprintf("must, together with reserve, be less than bandwidth, %s", n.Bandwidth)))
	}
	return errs
}

func validateResourceName(name string, at *field.Path) (errs field.ErrorList) {
	for _, message := range validation.IsQualifiedName(name) {
		errs = append(errs, field.Invalid(at, name, message))
	}
	if !strings.Contains(name, "/") || len(name) > maxResourceName {
		errs = append(errs, field.Invalid(at, name, fmt.Sprintf(
			"must have a prefix, such as in example.com/storage, and at most %d characters", maxResourceName)))
	}
	return errs
}

// sum returns the sum of quantities, where nil counts as 0.
func sum(quantities ...*resource.Quantity) (total resource.Quantity) {
	for _, q := range quantities {
		if q != nil {
			total.Add(*q)
		}
	}
	return total
}

func (a Allow) validate(at *field.Path) (errs field.ErrorList) {
	for i, mode := range a.Modes {
		errs = append(errs, validateEnum(mode, at.Child("modes").Index(i), v1alpha1.ModePrivate, v1alpha1.ModeBridge)...)
	}
	for i, burst := range a.Burst {
		errs = append(errs, validateEnum(burst, at.Child("burst").Index(i), v1alpha1.BurstGuaranteed, v1alpha1.BurstLine)...)
	}
	for i, subnet := range a.Subnets {
		if _, err := netip.ParsePrefix(subnet); err != nil {
			errs = append(errs, field.Invalid(at.Child("subnets").Index(i), subnet, "must be a network, such as 10.20.0.0/16"))
		}
	}
	for i, address := range a.Addresses {
		if _, err := ParseAddressOrNetwork(address); err != nil {
			errs = append(errs, field.Invalid(at.Child("addresses").Index(i), address,
				"must be an address or a network, such as 10.20.0.9 or 10.20.9.0/24"))
		}
	}
	for i, mac := range a.MACs {
		if parsed, err := net.ParseMAC(mac); err != nil || len(parsed) != 6 || parsed[0]&1 != 0 {
			errs = append(errs, field.Invalid(at.Child("macs").Index(i), mac,
				"must be the MAC address of one link, such as 00:00:5e:00:01:07"))
		}
	}
	for i, vlan := range a.VLANs {
		if vlan < 1 || vlan > maxVLAN {
			errs = append(errs, field.Invalid(at.Child("vlans").Index(i), vlan,
				fmt.Sprintf("must be between 1 and %d", maxVLAN)))
		}
	}
	for i, family := range a.DHCP {
		errs = append(errs, validateEnum(family, at.Child("dhcp").Index(i), v1alpha1.IPv4)...)
	}
	for i, name := range a.Sysctls {
		errs = append(errs, v1alpha1.ValidateSysctlName(name, at.Child("sysctls").Index(i))...)
	}
	return errs
}

// ParseAddressOrNetwork parses an IP address, or a network in CIDR notation.
func ParseAddressOrNetwork(text string) (netip.Prefix, error) {
	if address, err := netip.ParseAddr(text); err == nil {
		return address.Prefix(address.BitLen())
	}
	return netip.ParsePrefix(text)
}

// validateEnum checks that a value is one of the known values.
func validateEnum[T ~string](value T, at *field.Path, known ...T) field.ErrorList {
	if slices.Contains(known, value) {
		return nil
	}
	return field.ErrorList{field.NotSupported(at, value, known)}
}

func (p Policy) validate(at *field.Path) (errs field.ErrorList) {
	errs = append(errs, validateRate(p.Default, at.Child("default"))...)
	errs = append(errs, validateRate(p.Min, at.Child("min"))...)
	errs = append(errs, validateRate(p.Step, at.Child("step"))...)
	if len(errs) > 0 {
		return errs
	}
	if p.Default.Cmp(*p.Min) < 0 {
		return field.ErrorList{field.Invalid(at.Child("default"), p.Default.String(),
			fmt.Sprintf("must not be less than min, %s", p.Min))}
	}
	if excess := p.Default.Value() - p.Min.Value(); excess%p.Step.Value() != 0 {
		return field.ErrorList{field.Invalid(at.Child("default"), p.Default.String(),
			fmt.Sprintf("must be min, %s, plus a multiple of step, %s", p.Min, p.Step))}
	}
	return nil
}

// validateRate checks that a rate, if set, is a whole number of bits per second. It refuses fractions because they
// result from a lowercase suffix: 100m is 0.1 bit/s, but 100M is meant.
func validateRate(q *resource.Quantity, at *field.Path) field.ErrorList {
	if q == nil {
		return nil
	}
	if value, whole := q.AsInt64(); !whole || value < minRate {
		return field.ErrorList{field.Invalid(at, q.String(),
			fmt.Sprintf("must be a whole number of bits per second, at least %d, such as 100M or 10G", minRate))}
	}
	return nil
}
