// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// Limits of a NetworkAttachment.
const (
	maxAddresses           = 16
	maxAddressPools        = 2 // IPv4 and IPv6
	maxRoutes              = 32
	maxPolicyRules         = 16
	maxNeighbors           = 64
	maxSysctls             = 16
	maxSysctlValue         = 64
	maxPriority            = 32765 // the kernel's rule for the main table has 32766
	firstKernelTable       = 253   // RT_TABLE_DEFAULT
	lastKernelTable        = 255   // RT_TABLE_LOCAL
	maxInterfaceNameLength = 15    // IFNAMSIZ - 1
	minMTU                 = 68    // RFC 791
	minMTUIPv6             = 1280  // RFC 8200
	maxMTU                 = 65535 // the largest IP packet
)

// AllowedNetwork holds the DriverConfig's bounds for claims on a network.
//
// +kubebuilder:object:generate=false
type AllowedNetwork struct {
	// Network is the name of the network, for error messages.
	Network string
	// Modes, Subnets, and Bursts list the allowed values.
	Modes   []Mode
	Subnets []netip.Prefix
	Bursts  []Burst
	// Sysctls lists the allowed kernel parameters of links.
	Sysctls []string
	// DHCP lists the IP families that claims can lease addresses in.
	DHCP []IPFamily
	// MTU is the NIC's MTU in bytes, or 0 if it is not known yet.
	MTU int32
}

// Validate checks everything that does not depend on the device.
func (a *NetworkAttachment) Validate() field.ErrorList {
	return a.validate(len(a.AddressPools) > 0 || len(a.DHCP) > 0)
}

// validate is Validate. assigned reports whether the link may have addresses that are not in the parameters, with
// subnets that gateways may be in.
func (a *NetworkAttachment) validate(assigned bool) (errs field.ErrorList) {
	errs = append(errs, validateInterfaceName(a.InterfaceName, field.NewPath("interfaceName"))...)
	errs = append(errs, validateEnum(a.Mode, field.NewPath("mode"), ModePrivate, ModeBridge)...)
	if a.Bandwidth != nil {
		path := field.NewPath("bandwidth", "burst")
		errs = append(errs, validateEnum(a.Bandwidth.Burst, path, BurstGuaranteed, BurstLine)...)
	}
	addresses, addressErrs := validateAddresses(a.Addresses, field.NewPath("addresses"))
	errs = append(errs, addressErrs...)
	errs = append(errs, validatePools(a, field.NewPath("addressPools"))...)
	errs = append(errs, validateMTU(a.MTU, addresses, field.NewPath("mtu"))...)
	errs = append(errs, validateDHCP(a, addresses, field.NewPath("dhcp"))...)
	errs = append(errs, validateRules(a.PolicyRules, field.NewPath("policyRules"))...)
	errs = append(errs, validateNeighbors(a.Neighbors, field.NewPath("neighbors"))...)
	errs = append(errs, validateSysctls(a.Sysctls, field.NewPath("sysctls"))...)
	return append(errs, validateRoutes(a.Routes, addresses, assigned, field.NewPath("routes"))...)
}

// ValidateFor checks parameters with defaults against the bounds of the device's network,
// in addition to Validate.
func (a *NetworkAttachment) ValidateFor(allowed AllowedNetwork) field.ErrorList {
	errs := a.Validate()
	if len(errs) > 0 {
		return errs
	}
	forbidden := func(path *field.Path, value any, allows string) {
		errs = append(errs, field.Forbidden(path, fmt.Sprintf("%v: network %q %s", value, allowed.Network, allows)))
	}
	if !slices.Contains(allowed.Modes, a.Mode) {
		forbidden(field.NewPath("mode"), a.Mode, "allows "+list(allowed.Modes))
	}
	if a.Bandwidth != nil && !slices.Contains(allowed.Bursts, a.Bandwidth.Burst) {
		forbidden(field.NewPath("bandwidth", "burst"), a.Bandwidth.Burst, "allows "+list(allowed.Bursts))
	}
	if a.MTU != nil && allowed.MTU > 0 && *a.MTU > allowed.MTU {
		errs = append(errs, field.Invalid(field.NewPath("mtu"), *a.MTU,
			fmt.Sprintf("must not be larger than the NIC's, %d", allowed.MTU)))
	}
	for i, text := range a.Addresses {
		if address := netip.MustParsePrefix(text); !allowed.Contains(address) {
			forbidden(field.NewPath("addresses").Index(i), text, allowed.describeSubnets(address))
		}
	}
	for i, family := range a.DHCP {
		if !slices.Contains(allowed.DHCP, family) {
			forbidden(field.NewPath("dhcp").Index(i), family, allows("DHCP for", allowed.DHCP, "allow.dhcp"))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(a.Sysctls)) {
		if !slices.Contains(allowed.Sysctls, name) {
			forbidden(field.NewPath("sysctls").Key(name), a.Sysctls[name],
				allows("only the sysctls", allowed.Sysctls, "allow.sysctls"))
		}
	}
	return errs
}

// Contains reports whether one of the allowed subnets contains the address and is
// at least as large as its network: with a wider network, the link would have a
// route to addresses outside the subnet.
func (n AllowedNetwork) Contains(address netip.Prefix) bool {
	return slices.ContainsFunc(n.Subnets, func(subnet netip.Prefix) bool {
		return subnet.Contains(address.Addr()) && subnet.Bits() <= address.Bits()
	})
}

// describeSubnets describes the subnets of the network, for a message about an address that Contains refuses.
func (n AllowedNetwork) describeSubnets(address netip.Prefix) string {
	for _, subnet := range n.Subnets {
		if subnet.Contains(address.Addr()) {
			return fmt.Sprintf("allows addresses in %s: the prefix length must be at least %d", subnet, subnet.Bits())
		}
	}
	return allows("addresses in", n.Subnets, "allow.subnets")
}

// allows describes the values that a field of the network's configuration allows.
func allows[T any](what string, values []T, configuration string) string {
	if len(values) == 0 {
		return "allows none: its " + configuration + " is empty"
	}
	return "allows " + what + " " + list(values)
}

// list formats values for a message.
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

// validateEnum checks that a value is one of the known values or not set.
func validateEnum[T ~string](value T, path *field.Path, known ...T) field.ErrorList {
	if value == "" || slices.Contains(known, value) {
		return nil
	}
	return field.ErrorList{field.NotSupported(path, value, known)}
}

// reservedNames are links that every pod has, names that mean all interfaces in
// /proc/sys/net, and directory entries, which the kernel refuses.
var reservedNames = []string{"lo", "eth0", "all", "default", ".", ".."}

func validateInterfaceName(name string, path *field.Path) field.ErrorList {
	switch {
	case name == "":
		return nil
	case len(name) > maxInterfaceNameLength:
		return field.ErrorList{field.TooLong(path, name, maxInterfaceNameLength)}
	case slices.Contains(reservedNames, name):
		return field.ErrorList{field.Invalid(path, name, "is reserved: choose another, such as net1")}
	case strings.ContainsFunc(name, func(r rune) bool { return !isNameRune(r) }):
		return field.ErrorList{field.Invalid(path, name, "must consist of letters, digits, '.', '_', and '-'")}
	}
	return nil
}

func isNameRune(r rune) bool {
	switch {
	case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
		return true
	default:
		return r == '.' || r == '_' || r == '-'
	}
}

// validateAddresses returns the valid addresses.
func validateAddresses(texts []string, path *field.Path) (addresses []netip.Prefix, errs field.ErrorList) {
	if len(texts) > maxAddresses {
		return nil, field.ErrorList{field.TooMany(path, len(texts), maxAddresses)}
	}
	for i, text := range texts {
		address, err := netip.ParsePrefix(text)
		isDuplicate := func(other netip.Prefix) bool { return other.Addr() == address.Addr() }
		switch {
		case err != nil:
			errs = append(errs, field.Invalid(path.Index(i), text,
				"must be an address with its prefix length, such as 10.20.0.5/24 or fd00::5/64"))
		case !isHostAddress(address):
			errs = append(errs, field.Invalid(path.Index(i), text,
				"must be a host's address, not a network, broadcast, multicast, loopback, or link-local address"))
		case slices.ContainsFunc(addresses, isDuplicate):
			errs = append(errs, field.Duplicate(path.Index(i), text))
		default:
			addresses = append(addresses, address)
		}
	}
	return addresses, errs
}

// validatePools validates the names of AddressPools.
func validatePools(a *NetworkAttachment, path *field.Path) (errs field.ErrorList) {
	if len(a.AddressPools) > maxAddressPools {
		return field.ErrorList{field.TooMany(path, len(a.AddressPools), maxAddressPools)}
	}
	if len(a.AddressPools) > 0 && len(a.Addresses) > 0 {
		errs = append(errs, field.Forbidden(path, "addresses is set, too: set one of them"))
	}
	if ptr.Deref(a.KeepAddresses, false) && (len(a.Addresses) > 0 || a.AddressPools != nil && len(a.AddressPools) == 0) {
		errs = append(errs, field.Forbidden(field.NewPath("keepAddresses"),
			"the pod gets no address of an AddressPool: remove keepAddresses, or name the AddressPools"))
	}
	for i, name := range a.AddressPools {
		for _, problem := range validation.NameIsDNSSubdomain(name, false) {
			errs = append(errs, field.Invalid(path.Index(i), name, problem))
		}
		if slices.Contains(a.AddressPools[:i], name) {
			errs = append(errs, field.Duplicate(path.Index(i), name))
		}
	}
	return errs
}

// validateDHCP validates the families that a link with the addresses leases an address in.
func validateDHCP(a *NetworkAttachment, addresses []netip.Prefix, path *field.Path) (errs field.ErrorList) {
	for i, family := range a.DHCP {
		if family == "" || len(validateEnum(family, path.Index(i), IPv4)) > 0 {
			errs = append(errs, field.NotSupported(path.Index(i), family, []IPFamily{IPv4}))
		}
		if slices.Contains(a.DHCP[:i], family) {
			errs = append(errs, field.Duplicate(path.Index(i), family))
		}
		for _, address := range addresses {
			if address.Addr().Is4() == (family == IPv4) {
				errs = append(errs, field.Forbidden(path.Index(i), fmt.Sprintf(
					"%s: addresses has %s, of the same IP family: remove one of them", family, address)))
			}
		}
	}
	if len(a.DHCP) == 0 {
		return errs
	}
	if ptr.Deref(a.KeepAddresses, false) {
		errs = append(errs, field.Forbidden(field.NewPath("keepAddresses"),
			"true: the pod leases its address from a DHCP server: remove keepAddresses, or dhcp"))
	}
	if len(a.AddressPools) > 0 {
		errs = append(errs, field.Forbidden(path, fmt.Sprintf(
			"%s: the link gets its addresses from addressPools %s: remove one of them", list(a.DHCP), list(a.AddressPools))))
	}
	for i, r := range a.PolicyRules {
		if r.Source == "" && r.Destination == "" {
			errs = append(errs, field.Required(field.NewPath("policyRules").Index(i).Child("source"),
				"with dhcp, the address of the link may change: name the network of the source addresses, or a destination"))
		}
	}
	return errs
}

// isHostAddress reports whether a host can have the address.
func isHostAddress(p netip.Prefix) bool {
	a := p.Addr()
	if a.Is4In6() || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.IsLinkLocalUnicast() || p.Bits() == 0 {
		return false
	}
	if p.Bits() >= a.BitLen()-1 { // point to point (RFC 3021, RFC 6164), or a single host
		return true
	}
	isNetwork := a == p.Masked().Addr()
	isBroadcast := a.Is4() && !p.Contains(a.Next())
	return !isNetwork && !isBroadcast
}

func validateMTU(mtu *int32, addresses []netip.Prefix, path *field.Path) field.ErrorList {
	if mtu == nil {
		return nil
	}
	if *mtu < minMTU || *mtu > maxMTU {
		return field.ErrorList{field.Invalid(path, *mtu, fmt.Sprintf("must be between %d and %d", minMTU, maxMTU))}
	}
	hasIPv6 := slices.ContainsFunc(addresses, func(p netip.Prefix) bool { return p.Addr().Is6() })
	if hasIPv6 && *mtu < minMTUIPv6 {
		return field.ErrorList{field.Invalid(path, *mtu, fmt.Sprintf("must be at least %d with an IPv6 address", minMTUIPv6))}
	}
	return nil
}

// validateRoutes validates routes through a link with the addresses. assigned reports whether the link may also have
// others, which are not known here.
func validateRoutes(
	routes []Route, addresses []netip.Prefix, assigned bool, path *field.Path,
) (errs field.ErrorList) {
	if len(routes) > maxRoutes {
		return field.ErrorList{field.TooMany(path, len(routes), maxRoutes)}
	}
	type inTable struct {
		destination netip.Prefix
		table       int32
	}
	seen := map[inTable]bool{}
	for i, r := range routes {
		path := path.Index(i)
		destination, destinationErrs := validateNetwork(r.Destination, path.Child("destination"))
		if len(destinationErrs) > 0 {
			errs = append(errs, destinationErrs...)
			continue
		}
		if r.Table != nil {
			errs = append(errs, validateTable(*r.Table, path.Child("table"))...)
		}
		key := inTable{destination, ptr.Deref(r.Table, 0)}
		if seen[key] {
			errs = append(errs, field.Duplicate(path.Child("destination"), r.Destination))
		}
		seen[key] = true
		errs = append(errs, validateGateway(r.Gateway, destination, addresses, assigned, path.Child("gateway"))...)
	}
	return errs
}

// validateNetwork parses a network.
func validateNetwork(text string, path *field.Path) (netip.Prefix, field.ErrorList) {
	network, err := netip.ParsePrefix(text)
	if err != nil {
		return network, field.ErrorList{field.Invalid(path, text, "must be a network, such as 10.30.0.0/16")}
	}
	if network != network.Masked() || network.Addr().Is4In6() {
		return network, field.ErrorList{field.Invalid(path, text,
			fmt.Sprintf("has bits beyond its prefix length: want %s", network.Masked()))}
	}
	return network, nil
}

// validateTable refuses the kernel's tables: default, main, and local.
func validateTable(table int32, path *field.Path) field.ErrorList {
	if table < 1 || table >= firstKernelTable && table <= lastKernelTable {
		return field.ErrorList{field.Invalid(path, table,
			fmt.Sprintf("must be from 1 to 2147483647 except %d to %d, such as 100", firstKernelTable, lastKernelTable))}
	}
	return nil
}

func validateRules(rules []PolicyRule, path *field.Path) (errs field.ErrorList) {
	if len(rules) > maxPolicyRules {
		return field.ErrorList{field.TooMany(path, len(rules), maxPolicyRules)}
	}
	for i, r := range rules {
		path := path.Index(i)
		var networks []netip.Prefix
		for _, side := range []struct{ name, text string }{{"source", r.Source}, {"destination", r.Destination}} {
			if side.text == "" {
				continue
			}
			network, networkErrs := validateNetwork(side.text, path.Child(side.name))
			errs = append(errs, networkErrs...)
			networks = append(networks, network)
		}
		if len(networks) == 2 && networks[0].Addr().Is4() != networks[1].Addr().Is4() {
			errs = append(errs, field.Invalid(path.Child("destination"), r.Destination,
				"is not of the same IP family as the source "+r.Source))
		}
		errs = append(errs, validateTable(r.Table, path.Child("table"))...)
		if p := r.Priority; p != nil && (*p < 1 || *p > maxPriority) {
			errs = append(errs, field.Invalid(path.Child("priority"), *p, fmt.Sprintf("must be between 1 and %d", maxPriority)))
		}
	}
	return errs
}

func validateNeighbors(neighbors []Neighbor, path *field.Path) (errs field.ErrorList) {
	if len(neighbors) > maxNeighbors {
		return field.ErrorList{field.TooMany(path, len(neighbors), maxNeighbors)}
	}
	seen := map[netip.Addr]bool{}
	for i, n := range neighbors {
		address, err := netip.ParseAddr(n.Address)
		switch {
		case err != nil || address.Zone() != "" || address.Is4In6() || address.IsMulticast() || address.IsUnspecified():
			errs = append(errs, field.Invalid(path.Index(i).Child("address"), n.Address,
				"must be the address of a host, such as 10.20.0.7"))
		case seen[address]:
			errs = append(errs, field.Duplicate(path.Index(i).Child("address"), n.Address))
		}
		seen[address] = true
		if mac, err := net.ParseMAC(n.MAC); err != nil || len(mac) != 6 || mac[0]&1 != 0 {
			errs = append(errs, field.Invalid(path.Index(i).Child("mac"), n.MAC,
				"must be the MAC address of one host, such as 02:00:00:00:00:07"))
		}
	}
	return errs
}

// sysctlName matches the names of a link's kernel parameters.
var sysctlName = regexp.MustCompile(`^net\.ipv[46]\.(conf|neigh)\.IFNAME\.[a-z0-9_]+$`)

// ValidateSysctlName returns an error unless the kernel parameter belongs to a link.
func ValidateSysctlName(name string, path *field.Path) field.ErrorList {
	if !sysctlName.MatchString(name) {
		return field.ErrorList{field.Invalid(path, name,
			"must be a kernel parameter of a link, such as net.ipv4.conf.IFNAME.arp_ignore")}
	}
	return nil
}

func validateSysctls(sysctls map[string]string, path *field.Path) (errs field.ErrorList) {
	if len(sysctls) > maxSysctls {
		return field.ErrorList{field.TooMany(path, len(sysctls), maxSysctls)}
	}
	for _, name := range slices.Sorted(maps.Keys(sysctls)) {
		errs = append(errs, ValidateSysctlName(name, path.Key(name))...)
		value := sysctls[name]
		isPrintable := !strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r > '~' })
		if value == "" || len(value) > maxSysctlValue || !isPrintable {
			errs = append(errs, field.Invalid(path.Key(name), value,
				fmt.Sprintf("must have 1 to %d printable ASCII characters", maxSysctlValue)))
		}
	}
	return errs
}

func validateGateway(
	text string, destination netip.Prefix, addresses []netip.Prefix, assigned bool, path *field.Path,
) field.ErrorList {
	if text == "" {
		return nil
	}
	gateway, err := netip.ParseAddr(text)
	if err != nil || gateway.Zone() != "" {
		return field.ErrorList{field.Invalid(path, text, "must be an address, such as 10.20.0.1")}
	}
	if gateway.Is4() != destination.Addr().Is4() {
		return field.ErrorList{field.Invalid(path, text,
			fmt.Sprintf("is not of the same IP family as the destination %s", destination))}
	}
	onLink := func(p netip.Prefix) bool { return p.Contains(gateway) && p.Addr() != gateway }
	if !gateway.IsLinkLocalUnicast() && !assigned && !slices.ContainsFunc(addresses, onLink) {
		return field.ErrorList{field.Invalid(path, text,
			"must be in the subnet of one of the addresses, and not one of them: the addresses are "+list(addresses))}
	}
	return nil
}
