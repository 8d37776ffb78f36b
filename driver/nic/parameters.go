// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// mergeParameters decodes, merges, and defaults opaque parameters: the claim's override the DeviceClass's.
func mergeParameters(parameters [][]byte) (*v1alpha1.NetworkAttachment, error) {
	var merged *v1alpha1.NetworkAttachment
	for _, raw := range parameters {
		p, err := v1alpha1.DecodeAs[*v1alpha1.NetworkAttachment](raw)
		if err != nil {
			return nil, err
		}
		merged = v1alpha1.MergeNetworkAttachments(merged, p)
	}
	merged = v1alpha1.MergeNetworkAttachments(merged, nil)
	v1alpha1.SetDefaultsNetworkAttachment(merged)
	return merged, nil
}

// parametersOf returns the recorded parameters of a share.
func parametersOf(share record.Share) (p v1alpha1.NetworkAttachment, err error) {
	if err = json.Unmarshal(share.Parameters, &p); err != nil {
		err = fmt.Errorf("recorded parameters of share %s: %w", share.Name, err)
	}
	return p, err
}

// hasOnlyIPv4 reports whether a share's addresses are all IPv4 and known: it has some, and none from a pool.
func hasOnlyIPv4(p v1alpha1.NetworkAttachment) bool {
	return len(p.Addresses) > 0 && len(p.AddressPools) == 0 &&
		!slices.ContainsFunc(p.Addresses, func(address string) bool { return strings.Contains(address, ":") })
}

// grantOf returns the bandwidth that is granted to a share, in bits per second.
func grantOf(share record.Share) (uint64, error) {
	q, ok := share.Capacity[v1alpha1.CapacityBandwidth]
	if !ok || share.ShareID == "" {
		return 0, errors.New("the allocation has no shareID or no consumedCapacity for bandwidth: " +
			"is the feature gate DRAConsumableCapacity on in kube-scheduler and kube-apiserver?")
	}
	value, ok := q.AsInt64()
	if !ok || value < 8 {
		return 0, fmt.Errorf("consumedCapacity.bandwidth %s: want whole bits per second, at least 8", q.String())
	}
	return uint64(value), nil
}

// The number of a share is the minor number of its class, so each must be in the range that
// package shape reserves for shares. Otherwise this does not compile.
const _ = uint(record.FirstNumber - shape.FirstMinor)

// ratesOf returns the rates that the kernel must enforce for a share. A share with admin access has no class, so no
// rates.
func ratesOf(d *device, share record.Share, p v1alpha1.NetworkAttachment) (shape.Rates, error) {
	if share.AdminAccess {
		return shape.Rates{}, nil
	}
	grant, err := grantOf(share)
	rates := shape.Rates{Floor: d.guaranteed(grant), Ceil: grant, Overhead: uint16(d.network.Overhead)}
	if p.Bandwidth != nil && p.Bandwidth.Burst == v1alpha1.BurstLine {
		rates.Ceil = d.line
	}
	rates.Ceil = max(min(rates.Ceil, d.line), rates.Floor)
	if d.shaping == shapingHTBMQ {
		rates.Ceil = rates.Floor // see shape.Trees
	}
	return rates, err
}

// sameRates compares rates with the kernel's resolution of bytes per second.
func sameRates(a, b shape.Rates) bool {
	return a.Floor/8 == b.Floor/8 && a.Ceil/8 == b.Ceil/8 && a.Overhead == b.Overhead
}

// linkSpec returns the link for a share, according to its parameters and grant.
func linkSpec(d *device, share record.Share, mac net.HardwareAddr) (netdev.LinkSpec, error) {
	p, err := parametersOf(share)
	if err != nil {
		return netdev.LinkSpec{}, err
	}
	rates, err := ratesOf(d, share, p)
	if err != nil {
		return netdev.LinkSpec{}, err
	}
	s := netdev.LinkSpec{
		Parent: d.nic.Index,
		Name:   p.InterfaceName,
		MAC:    mac,
		Mode:   netdev.Private,
		Minor:  share.Number,
		Rates:  rates,
	}
	s.Leases = slices.Contains(p.DHCP, v1alpha1.IPv4)
	if p.Mode == v1alpha1.ModeBridge {
		s.Mode = netdev.Bridge
	}
	mtu := d.nic.MTU
	if p.MTU != nil {
		s.MTU = int(*p.MTU)
		mtu = s.MTU
	}
	if d.network.Enforcement == config.EnforcementShape && !share.AdminAccess {
		s.SegmentBytes = shape.SegmentBytes(rates.Ceil, mtu)
	}
	if s.Addresses, err = parseAddresses(p.Addresses); err != nil {
		return s, err
	}
	if s.Routes, err = parseRoutes(p.Routes); err != nil {
		return s, err
	}
	if s.Rules, err = parseRules(p.PolicyRules); err != nil {
		return s, err
	}
	s.Neighbors, err = parseNeighbors(p.Neighbors)
	return s, err
}

func parseAddresses(texts []string) (addresses []netip.Prefix, err error) {
	for _, text := range texts {
		address, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, err
		}
		addresses = append(addresses, address)
	}
	return addresses, nil
}

func parseRoutes(all []v1alpha1.Route) (routes []netdev.Route, err error) {
	for _, route := range all {
		var r netdev.Route
		if r.Destination, err = netip.ParsePrefix(route.Destination); err != nil {
			return nil, err
		}
		if route.Gateway != "" {
			if r.Gateway, err = netip.ParseAddr(route.Gateway); err != nil {
				return nil, err
			}
		}
		r.Table = uint32(ptr.Deref(route.Table, 0))
		routes = append(routes, r)
	}
	return routes, nil
}

func parseRules(all []v1alpha1.PolicyRule) (rules []netdev.Rule, err error) {
	for _, rule := range all {
		r := netdev.Rule{Table: uint32(rule.Table), Priority: uint32(ptr.Deref(rule.Priority, 0))}
		if rule.Source != "" {
			if r.Source, err = netip.ParsePrefix(rule.Source); err != nil {
				return nil, err
			}
		}
		if rule.Destination != "" {
			if r.Destination, err = netip.ParsePrefix(rule.Destination); err != nil {
				return nil, err
			}
		}
		rules = append(rules, r)
	}
	return rules, nil
}

func parseNeighbors(all []v1alpha1.Neighbor) (neighbors []netdev.Neighbor, err error) {
	for _, neighbor := range all {
		var n netdev.Neighbor
		if n.Address, err = netip.ParseAddr(neighbor.Address); err != nil {
			return nil, err
		}
		if n.MAC, err = net.ParseMAC(neighbor.MAC); err != nil {
			return nil, err
		}
		neighbors = append(neighbors, n)
	}
	return neighbors, nil
}

// checkRuleSources returns an error if a rule applies to packets from the link's addresses, and the plugin does not
// know any address that the link gets.
func checkRuleSources(p *v1alpha1.NetworkAttachment) error {
	if len(p.Addresses)+len(p.AddressPools)+len(p.DHCP) > 0 {
		return nil // ValidateFor checks rules of leased addresses
	}
	for i, r := range p.PolicyRules {
		if r.Source == "" && r.Destination == "" {
			return field.Required(field.NewPath("policyRules").Index(i).Child("source"),
				"the link gets no address from the claim or a pool: name the network of the source addresses, or a destination")
		}
	}
	return nil
}
