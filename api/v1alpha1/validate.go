package v1alpha1

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// AllowedNetwork is what an administrator lets claims ask for, from the DriverConfig.
type AllowedNetwork struct {
	// Network is the name the administrator gave it; for messages.
	Network string
	Modes   []Mode
	Subnets []netip.Prefix
	Bursts  []Burst
	// MTU of the NIC, in bytes; 0 if not known yet.
	MTU int32
}

// Validate implements Parameters.
func (a *NetworkAttachment) Validate() field.ErrorList {
	var errs field.ErrorList
	errs = append(errs, validateName(a.InterfaceName, field.NewPath("interfaceName"))...)
	errs = append(errs, oneOf(a.Mode, field.NewPath("mode"), ModePrivate, ModeBridge)...)
	if a.Bandwidth != nil {
		errs = append(errs, oneOf(a.Bandwidth.Burst, field.NewPath("bandwidth", "burst"), BurstGuaranteed, BurstLine)...)
	}
	addresses, more := validateAddresses(a.Addresses, field.NewPath("addresses"))
	errs = append(errs, more...)
	errs = append(errs, validateMTU(a.MTU, addresses, field.NewPath("mtu"))...)
	return append(errs, validateRoutes(a.Routes, addresses, field.NewPath("routes"))...)
}

// ValidateFor checks a complete attachment against what the device's network
// allows, in addition to Validate.
func (a *NetworkAttachment) ValidateFor(allowed AllowedNetwork) field.ErrorList {
	errs := a.Validate()
	if len(errs) > 0 {
		return errs
	}
	if !slices.Contains(allowed.Modes, a.Mode) {
		errs = append(errs, field.Forbidden(field.NewPath("mode"), fmt.Sprintf("%s: network %q allows %s", a.Mode, allowed.Network, list(allowed.Modes))))
	}
	if burst := a.Bandwidth; burst != nil && !slices.Contains(allowed.Bursts, burst.Burst) {
		errs = append(errs, field.Forbidden(field.NewPath("bandwidth", "burst"), fmt.Sprintf("%s: network %q allows %s", burst.Burst, allowed.Network, list(allowed.Bursts))))
	}
	if a.MTU != nil && allowed.MTU > 0 && *a.MTU > allowed.MTU {
		errs = append(errs, field.Invalid(field.NewPath("mtu"), *a.MTU, fmt.Sprintf("must not be larger than the NIC's, %d", allowed.MTU)))
	}
	for i, text := range a.Addresses {
		address := netip.MustParsePrefix(text)
		if !slices.ContainsFunc(allowed.Subnets, func(s netip.Prefix) bool { return s.Contains(address.Addr()) && s.Bits() <= address.Bits() }) {
			errs = append(errs, field.Forbidden(field.NewPath("addresses").Index(i), fmt.Sprintf("%s: network %q allows addresses in %s", text, allowed.Network, list(allowed.Subnets))))
		}
	}
	return errs
}

func list[T any](values []T) string {
	if len(values) == 0 {
		return "none"
	}
	texts := make([]string, len(values))
	for i, v := range values {
		texts[i] = fmt.Sprint(v)
	}
	return strings.Join(texts, ", ")
}

func oneOf[T ~string](value T, path *field.Path, known ...T) field.ErrorList {
	if value == "" || slices.Contains(known, value) {
		return nil
	}
	return field.ErrorList{field.NotSupported(path, value, known)}
}

// reservedNames are links that every pod has, or that the kernel gives a meaning.
var reservedNames = []string{"lo", "eth0", "all", "default", ".", ".."}

func validateName(name string, path *field.Path) field.ErrorList {
	switch {
	case name == "":
		return nil
	case len(name) > maxName:
		return field.ErrorList{field.TooLong(path, name, maxName)}
	case slices.Contains(reservedNames, name):
		return field.ErrorList{field.Invalid(path, name, "is reserved: choose another, such as net1")}
	case strings.ContainsFunc(name, func(r rune) bool { return !validNameRune(r) }):
		return field.ErrorList{field.Invalid(path, name, "must consist of letters, digits, '.', '_' and '-'")}
	}
	return nil
}

func validNameRune(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-'
}

func validateAddresses(texts []string, path *field.Path) (addresses []netip.Prefix, errs field.ErrorList) {
	if len(texts) > maxAddresses {
		return nil, field.ErrorList{field.TooMany(path, len(texts), maxAddresses)}
	}
	for i, text := range texts {
		p, err := netip.ParsePrefix(text)
		switch {
		case err != nil:
			errs = append(errs, field.Invalid(path.Index(i), text, "must be an address with its prefix length, such as 10.20.0.5/24 or fd00::5/64"))
			continue
		case !hostAddress(p):
			errs = append(errs, field.Invalid(path.Index(i), text, "must be a host's address, not a network's, a broadcast, multicast, loopback or link-local one"))
			continue
		case slices.ContainsFunc(addresses, func(other netip.Prefix) bool { return other.Addr() == p.Addr() }):
			errs = append(errs, field.Duplicate(path.Index(i), text))
			continue
		}
		addresses = append(addresses, p)
	}
	return addresses, errs
}

func hostAddress(p netip.Prefix) bool {
	a := p.Addr()
	if a.Is4In6() || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.IsLinkLocalUnicast() || p.Bits() == 0 {
		return false
	}
	if p.Bits() >= a.BitLen()-1 { // point to point (RFC 3021, RFC 6164), or a single host
		return true
	}
	return a != p.Masked().Addr() && (a.Is6() || p.Contains(a.Next()))
}

func validateMTU(mtu *int32, addresses []netip.Prefix, path *field.Path) field.ErrorList {
	if mtu == nil {
		return nil
	}
	if *mtu < minMTU || *mtu > maxMTU {
		return field.ErrorList{field.Invalid(path, *mtu, fmt.Sprintf("must be between %d and %d", minMTU, maxMTU))}
	}
	if *mtu < minMTUIPv6 && slices.ContainsFunc(addresses, func(p netip.Prefix) bool { return p.Addr().Is6() }) {
		return field.ErrorList{field.Invalid(path, *mtu, fmt.Sprintf("must be at least %d with an IPv6 address", minMTUIPv6))}
	}
	return nil
}

func validateRoutes(routes []Route, addresses []netip.Prefix, path *field.Path) (errs field.ErrorList) {
	if len(routes) > maxRoutes {
		return field.ErrorList{field.TooMany(path, len(routes), maxRoutes)}
	}
	seen := map[netip.Prefix]bool{}
	for i, r := range routes {
		destination, err := netip.ParsePrefix(r.Destination)
		if err != nil {
			errs = append(errs, field.Invalid(path.Index(i).Child("destination"), r.Destination, "must be a network, such as 10.30.0.0/16"))
			continue
		}
		if destination != destination.Masked() || destination.Addr().Is4In6() {
			errs = append(errs, field.Invalid(path.Index(i).Child("destination"), r.Destination, fmt.Sprintf("has bits beyond its prefix length: want %s", destination.Masked())))
			continue
		}
		if seen[destination] {
			errs = append(errs, field.Duplicate(path.Index(i).Child("destination"), r.Destination))
		}
		seen[destination] = true
		errs = append(errs, validateGateway(r.Gateway, destination, addresses, path.Index(i).Child("gateway"))...)
	}
	return errs
}

func validateGateway(text string, destination netip.Prefix, addresses []netip.Prefix, path *field.Path) field.ErrorList {
	if text == "" {
		return nil
	}
	gateway, err := netip.ParseAddr(text)
	if err != nil || gateway.Zone() != "" {
		return field.ErrorList{field.Invalid(path, text, "must be an address, such as 10.20.0.1")}
	}
	if gateway.Is4() != destination.Addr().Is4() {
		return field.ErrorList{field.Invalid(path, text, fmt.Sprintf("is not of the same IP family as the destination %s", destination))}
	}
	onLink := func(p netip.Prefix) bool { return p.Contains(gateway) && p.Addr() != gateway }
	if !gateway.IsLinkLocalUnicast() && !slices.ContainsFunc(addresses, onLink) {
		return field.ErrorList{field.Invalid(path, text, "must be on the network of one of the addresses, and not one of them")}
	}
	return nil
}
