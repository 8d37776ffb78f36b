// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package addresspool validates AddressPools and chooses the blocks that nodes take from them. The node plugin and
// the controller use it.
package addresspool

import (
	"errors"
	"fmt"
	"math/big"
	"net/netip"
	"strings"

	"go4.org/netipx"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
)

// Pool is a valid AddressPool.
type Pool struct {
	Name, Network string
	// Default reports whether the pool serves claims that do not name a pool.
	Default bool
	// Subnet gives the links their prefix length.
	Subnet netip.Prefix
	// Addresses are the assignable addresses, including Reserved.
	Addresses *netipx.IPSet
	// Reserved are the addresses that a link gets only if its claim names them.
	Reserved *netipx.IPSet
	// Gateway is the next hop of Routes; invalid if the pool does not have one.
	Gateway netip.Addr
	Routes  []netip.Prefix
	// Nameservers are the DNS servers of the network.
	Nameservers []netip.Addr
	// Namespaces can use the pool; all can if it is empty.
	Namespaces map[string]bool
	// NamespaceLimit is how many addresses one namespace's pods can have; 0 means no limit.
	NamespaceLimit int
	// NodeSelector selects the nodes that can use the pool; all can if it is empty.
	NodeSelector labels.Set
	// BlockSize is the number of addresses that a node takes at a time, a power of two. If it is
	// 0, a node takes a sixteenth of the free addresses, 64 at most.
	BlockSize int
}

// Family returns "4" or "6".
func (p *Pool) Family() string { return family(p.Subnet.Addr()) }

func family(a netip.Addr) string {
	if a.Is4() {
		return "4"
	}
	return "6"
}

// Parse validates an AddressPool. The error names the fields that are invalid.
func Parse(object *network.AddressPool) (*Pool, error) {
	spec, path := &object.Spec, field.NewPath("spec")
	subnet, err := netip.ParsePrefix(spec.Subnet)
	if err != nil || subnet != subnet.Masked() || subnet.Addr().Is4In6() {
		return nil, field.Invalid(path.Child("subnet"), spec.Subnet, "must be a network, such as 10.20.0.0/16")
	}
	if a := subnet.Addr(); a.IsMulticast() || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsUnspecified() {
		return nil, field.Invalid(path.Child("subnet"), spec.Subnet, "must not be a multicast, loopback, link-local, or "+
			"unspecified network, because the addresses are for hosts: choose another one, such as 10.20.0.0/16")
	}
	p := &Pool{
		Name: object.Name, Network: spec.Network, Default: spec.Default, Subnet: subnet, Namespaces: map[string]bool{},
		NodeSelector: spec.NodeSelector,
	}
	if _, err := p.NodeSelector.AsValidatedSelector(); err != nil {
		return nil, field.Invalid(path.Child("nodeSelector"), spec.NodeSelector, err.Error())
	}
	for _, n := range spec.Namespaces {
		p.Namespaces[n] = true
	}
	gatewayErr := p.parseGateway(spec.Gateway, path.Child("gateway"))
	routesErr := p.parseRoutes(spec.Routes, path.Child("routes"))
	if err := errors.Join(gatewayErr, routesErr, p.parseAddresses(spec, path)); err != nil {
		return nil, err
	}
	if err := p.parseReserved(spec.Reserved, path.Child("reserved")); err != nil {
		return nil, err
	}
	if err := p.parseNameservers(spec.Nameservers, path.Child("nameservers")); err != nil {
		return nil, err
	}
	p.BlockSize = int(ptr.Deref(spec.BlockSize, 0))
	p.NamespaceLimit = int(ptr.Deref(spec.NamespaceLimit, 0))
	return p, nil
}

func (p *Pool) parseGateway(text string, path *field.Path) (err error) {
	if text == "" {
		return nil
	}
	if p.Gateway, err = netip.ParseAddr(text); err != nil || !p.Subnet.Contains(p.Gateway) {
		return field.Invalid(path, text, "must be an address in subnet "+p.Subnet.String())
	}
	return nil
}

func (p *Pool) parseRoutes(texts []string, path *field.Path) error {
	for i, text := range texts {
		route, err := netip.ParsePrefix(text)
		switch {
		case err != nil || route != route.Masked():
			return field.Invalid(path.Index(i), text, "must be a network, such as 10.30.0.0/16")
		case route.Addr().Is4() != p.Subnet.Addr().Is4():
			return field.Invalid(path.Index(i), text, "must be of the same IP family as subnet "+p.Subnet.String())
		}
		p.Routes = append(p.Routes, route)
	}
	return nil
}

// parseAddresses computes the addresses that can be assigned.
func (p *Pool) parseAddresses(spec *network.AddressPoolSpec, path *field.Path) error {
	var set netipx.IPSetBuilder
	for i, text := range spec.Ranges {
		r, err := parseRange(text)
		if err != nil || !p.Subnet.Contains(r.From()) || !p.Subnet.Contains(r.To()) {
			return field.Invalid(path.Child("ranges").Index(i), text,
				fmt.Sprintf("must be a network, an address, or FIRST-LAST in subnet %s", p.Subnet))
		}
		set.AddRange(r)
	}
	if len(spec.Ranges) == 0 {
		set.AddPrefix(p.Subnet)
	}
	for i, text := range spec.Exclude {
		r, err := parseRange(text)
		if err != nil {
			return field.Invalid(path.Child("exclude").Index(i), text, "must be a network, an address, or FIRST-LAST")
		}
		set.RemoveRange(r)
	}
	whole := netipx.RangeOfPrefix(p.Subnet)
	if p.Subnet.Bits() < p.Subnet.Addr().BitLen()-1 { // not point to point (RFC 3021, RFC 6164)
		set.Remove(whole.From()) // the network's, or the anycast address of routers (RFC 4291, section 2.6.1)
		if whole.To().Is4() {
			set.Remove(whole.To()) // broadcast
		}
	}
	if p.Gateway.IsValid() {
		set.Remove(p.Gateway)
	}
	addresses, err := set.IPSet()
	if err != nil {
		return field.Invalid(path.Child("ranges"), spec.Ranges, err.Error())
	}
	if len(addresses.Ranges()) == 0 {
		return field.Invalid(path.Child("exclude"), spec.Exclude, "leaves no address that can be assigned")
	}
	p.Addresses = addresses
	return nil
}

func (p *Pool) parseReserved(texts []string, path *field.Path) (err error) {
	var set netipx.IPSetBuilder
	for i, text := range texts {
		r, err := parseRange(text)
		if err != nil || !p.Addresses.ContainsRange(r) {
			return field.Invalid(path.Index(i), text,
				"must be a network, an address, or FIRST-LAST, of addresses that ranges and exclude leave to the pool")
		}
		set.AddRange(r)
	}
	p.Reserved, err = set.IPSet()
	return err
}

// parseNameservers sets Nameservers. It refuses servers with an address that the pool assigns, so Addresses and
// Reserved must be set.
func (p *Pool) parseNameservers(texts []string, path *field.Path) error {
	for i, text := range texts {
		server, err := netip.ParseAddr(text)
		if err != nil || server.Zone() != "" {
			return field.Invalid(path.Index(i), text, "must be an IP address, such as 10.20.0.2")
		}
		if p.Addresses.Contains(server) && !p.Reserved.Contains(server) {
			return field.Invalid(path.Index(i), text, "the pool may assign the address to a pod: add it to exclude or reserved")
		}
		p.Nameservers = append(p.Nameservers, server)
	}
	return nil
}

// parseRange parses a network, a single address, or FIRST-LAST.
func parseRange(text string) (netipx.IPRange, error) {
	if strings.Contains(text, "-") {
		return netipx.ParseIPRange(text)
	}
	if strings.Contains(text, "/") {
		prefix, err := netip.ParsePrefix(text)
		if err == nil && prefix != prefix.Masked() {
			err = fmt.Errorf("network %s has bits beyond its prefix length", text)
		}
		return netipx.RangeOfPrefix(prefix), err
	}
	address, err := netip.ParseAddr(text)
	return netipx.IPRangeFrom(address, address), err
}

// ParseRanges returns a block's addresses, and its invalid entries, which a person has written. To keep other blocks
// from getting an address that an invalid entry may mean, the addresses contain the entry's valid ends and, if both
// are valid, what is between them.
func ParseRanges(texts []string) (addresses *netipx.IPSet, invalid []string) {
	var set netipx.IPSetBuilder
	for _, text := range texts {
		r, err := parseRange(text)
		if err == nil && r.IsValid() {
			set.AddRange(r)
			continue
		}
		invalid = append(invalid, text)
		addPossible(&set, text)
	}
	addresses, _ = set.IPSet() // fails only if an invalid range was added
	return addresses, invalid
}

// addPossible adds the addresses that an invalid range may mean.
func addPossible(set *netipx.IPSetBuilder, text string) {
	first, last, _ := strings.Cut(text, "-")
	if r, err := netipx.ParseIPRange(last + "-" + first); err == nil {
		set.AddRange(r)
		return
	}
	for _, end := range []string{first, last} {
		if a, err := netip.ParseAddr(end); err == nil {
			set.Add(a.WithZone(""))
		}
	}
}

// FormatRanges is the inverse of ParseRanges.
func FormatRanges(set *netipx.IPSet) (texts []string) {
	for _, r := range set.Ranges() {
		texts = append(texts, r.String())
	}
	return texts
}

// Count returns the number of addresses in a set.
func Count(set *netipx.IPSet) *big.Int {
	total := new(big.Int)
	for _, r := range set.Ranges() {
		first, last := new(big.Int).SetBytes(r.From().AsSlice()), new(big.Int).SetBytes(r.To().AsSlice())
		total.Add(total, last.Sub(last, first).Add(last, big.NewInt(1)))
	}
	return total
}
