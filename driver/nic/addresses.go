// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"

	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

// reservation is the payload that Reserve passes to Attach: the attachment properties that are known before the link
// exists, and the pools' routes.
type reservation struct {
	attach.Link
	Routes []v1alpha1.Route `json:"routes,omitempty"`
}

// configurePools replaces unset AddressPools with the default pools of the device's network, and validates them.
func (k *Kind) configurePools(
	ctx context.Context, namespace, network string, p *v1alpha1.NetworkAttachment,
) (err error) {
	if k.addresses == nil {
		if len(p.AddressPools) > 0 {
			return fmt.Errorf("addressPools: Forbidden: %v: the plugin does not use AddressPools", p.AddressPools)
		}
		return nil
	}
	if p.AddressPools == nil && len(p.Addresses) == 0 {
		if p.AddressPools, err = k.addresses.Defaults(ctx, network, namespace); err != nil {
			return err
		}
	}
	static, err := parseAddresses(p.Addresses)
	if err != nil {
		return err
	}
	if err := k.addresses.CheckStatic(ctx, network, static); err != nil {
		return err
	}
	return k.addresses.Check(ctx, network, namespace, p.AddressPools)
}

// Reserve implements driver.Reserver: it assigns an address from each of a share's pools, and the static addresses
// that are reserved in a pool.
func (k *Kind) Reserve(
	ctx context.Context, share record.Share, r attach.Request, sandbox driver.Sandbox,
	records driver.Records, write func(driver.Attached) error,
) error {
	p, err := parametersOf(share)
	if err != nil || len(p.AddressPools)+len(p.Addresses) == 0 {
		return err
	}
	d, err := k.device(share.Device)
	if err != nil {
		return err
	}
	if d.absent {
		return d.absentError()
	}
	static, err := parseAddresses(p.Addresses)
	if err != nil {
		return err
	}
	if needed, err := k.needsReservation(ctx, d, p, static); err != nil || !needed {
		return err
	}
	reserved, err := k.reservationNamespace(sandbox)
	if err != nil {
		return err
	}
	network := d.network.Name
	if len(p.AddressPools) > 0 { // of a claim that may have been prepared before the network got another name
		if network, err = k.addresses.NetworkOf(ctx, p.AddressPools); err != nil {
			return err
		}
	}
	cookie := reserved.Namespace.Cookie
	request := ipam.Request{
		Pools: p.AddressPools, Network: network, Reserved: addrsOf(static), PodNamespace: r.Pod.Namespace,
		Keep: ptr.Deref(p.KeepAddresses, false), Pod: r.Pod.Name, Interface: p.InterfaceName,
		Owner: ownerOf(r.ClaimUID, share.Name, cookie, r.Pod),
	}
	unassigned := attach.Link{Parent: d.nic.Index, MAC: macOf(share, r, cookie).String(), Network: network}
	link := unassigned
	assign := func(assigned ipam.Assignment) (err error) {
		if link, reserved.Payload, err = payloadOf(unassigned, assigned); err != nil {
			return err
		}
		return write(reserved)
	}
	return k.assignUnused(ctx, request, k.usedIn(records), assign, func() (addressOwners, error) {
		return k.refusedAddresses(ctx, d, link, static)
	})
}

// payloadOf returns a link with its assigned addresses, and the payload of its reservation.
func payloadOf(unassigned attach.Link, assigned ipam.Assignment) (attach.Link, json.RawMessage, error) {
	link := unassigned
	for _, address := range assigned.Addresses {
		link.Addresses = append(link.Addresses, address.String())
	}
	for _, server := range assigned.Nameservers {
		link.Nameservers = append(link.Nameservers, server.String())
	}
	payload, err := json.Marshal(reservation{Link: link, Routes: routesOf(assigned.Routes)})
	return link, payload, err
}

// assignUnused assigns a request's addresses, and replaces them as long as other hosts on the network have any of
// them. refused returns the assigned addresses that other hosts have.
func (k *Kind) assignUnused(
	ctx context.Context, request ipam.Request, used func() (ipam.Used, error),
	assign func(ipam.Assignment) error, refused func() (addressOwners, error),
) error {
	network := request.Network
	for {
		if err := k.addresses.Assign(ctx, request, used, assign); err != nil {
			return err
		}
		found, err := refused()
		if err != nil || len(found) == 0 {
			return err
		}
		if request.Keep {
			return fmt.Errorf("keepAddresses: another host on the network has an address that pod %s/%s keeps: %s on "+
				"network %s: remove the address from that host", request.PodNamespace, request.Pod, found, network)
		}
		klog.FromContext(ctx).Info("Other hosts on the network have addresses of the pool; assigning others",
			"network", network, "hosts", found.String())
		k.avoid(network, found)
		for address := range found {
			k.addresses.Release(request.Owner, ipam.Address{Network: network, IP: address})
		}
	}
}

// needsReservation reports whether a link gets an address from a pool.
func (k *Kind) needsReservation(
	ctx context.Context, d *device, p v1alpha1.NetworkAttachment, static []netip.Prefix,
) (bool, error) {
	switch {
	case k.addresses == nil && len(p.AddressPools) > 0:
		return false, fmt.Errorf("addressPools: Forbidden: %v: the plugin does not use AddressPools", p.AddressPools)
	case k.addresses == nil:
		return false, nil
	case len(p.AddressPools) > 0:
		return true, nil
	}
	return k.addresses.HasPool(ctx, d.network.Name, addrsOf(static))
}

// refusedAddresses returns the other hosts with an address that is reserved for a link, if the network has
// duplicateAddressDetection Refuse. Attach checks the static addresses.
func (k *Kind) refusedAddresses(
	ctx context.Context, d *device, link attach.Link, static []netip.Prefix,
) (addressOwners, error) {
	mac, err := net.ParseMAC(link.MAC)
	if err != nil {
		return nil, err
	}
	addresses, err := parseAddresses(link.Addresses)
	if err != nil {
		return nil, err
	}
	addresses = slices.DeleteFunc(addresses, func(p netip.Prefix) bool {
		return slices.Contains(addrsOf(static), p.Addr())
	})
	return d.refuseDuplicates(ctx, mac, addresses)
}

func addrsOf(prefixes []netip.Prefix) (addresses []netip.Addr) {
	for _, p := range prefixes {
		addresses = append(addresses, p.Addr())
	}
	return addresses
}

// reservationNamespace returns the identity of the pod's namespace for the attachment record.
func (k *Kind) reservationNamespace(sandbox driver.Sandbox) (reserved driver.Attached, err error) {
	conn, err := connect(sandbox.Netlink)
	if err != nil {
		return reserved, err
	}
	defer conn.Close()
	cookie, err := conn.Cookie()
	if err != nil {
		return reserved, err
	}
	if reserved.Namespace, err = attach.NamespaceOf(sandbox.Namespace, cookie); err != nil {
		return reserved, err
	}
	reserved.Namespace.NSID, err = k.node.NamespaceID(sandbox.Namespace)
	return reserved, err
}

// ReserveForClaim implements driver.Reserver: it acquires the pool addresses that the claim names, and those that its
// pod keeps.
func (k *Kind) ReserveForClaim(
	ctx context.Context, share record.Share, claim driver.ReservingClaim, records driver.Records,
) error {
	if k.addresses == nil || !k.Attaches(share) {
		return nil
	}
	p, err := parametersOf(share)
	if err != nil || len(p.Addresses) == 0 && !ptr.Deref(p.KeepAddresses, false) {
		return err
	}
	d, err := k.device(share.Device)
	if err != nil {
		return err
	}
	static, err := parseAddresses(p.Addresses)
	if err != nil {
		return err
	}
	request := ipam.Request{
		Network: d.network.Name, Reserved: addrsOf(static), PodNamespace: claim.Namespace, Interface: p.InterfaceName,
		Owner: ipam.Owner{Claim: claim.UID},
	}
	if ptr.Deref(p.KeepAddresses, false) && len(claim.Pods) == 1 { // with several pods, Reserve takes the address of each
		request.Keep, request.Pools, request.Pod = true, p.AddressPools, claim.Pods[0]
	}
	return k.addresses.Acquire(ctx, request, k.usedIn(records))
}

// UnreserveForClaim implements driver.Reserver.
func (k *Kind) UnreserveForClaim(share record.Share) {
	if p, err := parametersOf(share); err == nil && len(p.Addresses) > 0 && k.addresses != nil {
		k.addresses.ClaimsChanged()
	}
}

// Unreserve implements driver.Reserver.
func (k *Kind) Unreserve(r attach.Record) {
	link, err := r.Link()
	if err != nil || k.addresses == nil {
		return
	}
	k.addresses.Release(ownerOf(r.ClaimUID, r.Share, r.Namespace.Cookie, r.Pod), addressesOf(link)...)
}

// RecoverReservations implements driver.Reserver.
func (k *Kind) RecoverReservations(
	ctx context.Context, records driver.Records,
) (change driver.Change, err error) {
	if k.addresses == nil {
		return change, nil
	}
	if err := k.addresses.Recover(ctx, k.usedIn(records)); err != nil {
		return change, err
	}
	return changeOfLostAddresses(k.lost.takeAltered()), nil
}

// MaintainReservations implements driver.Reserver.
func (k *Kind) MaintainReservations(ctx context.Context, records driver.Records) {
	var duplicates sync.WaitGroup
	duplicates.Go(func() { k.detectDuplicates(ctx, records.List) })
	defer duplicates.Wait()
	if k.addresses != nil {
		k.addresses.Run(ctx, k.usedIn(records))
	}
}

func ownerOf(claimUID, share string, cookie uint64, pod attach.Pod) ipam.Owner {
	return ipam.Owner{Claim: claimUID, Share: share, Namespace: cookie, Pod: pod.Namespace + "/" + pod.Name}
}

// usedIn returns a function that reads, for the Allocator, the pool addresses in the records, and which records
// cannot be read.
func (k *Kind) usedIn(records driver.Records) func() (ipam.Used, error) {
	return func() (used ipam.Used, err error) {
		all, err := records.List()
		if err != nil {
			return used, err
		}
		unreadable, err := records.Unreadable()
		if err != nil {
			return used, err
		}
		used.Unreadable = slices.Sorted(maps.Keys(unreadable))
		claims, err := records.Claims()
		if err != nil {
			return used, err
		}
		used.NamedByClaims = k.addressesNamedBy(claims)
		used.Owners = map[ipam.Address]ipam.Owner{}
		for _, r := range all {
			if r.Kind != Name {
				continue
			}
			link, err := r.Link()
			if err != nil {
				return used, err
			}
			for _, address := range addressesOf(link) {
				used.Owners[address] = ownerOf(r.ClaimUID, r.Share, r.Namespace.Cookie, r.Pod)
			}
		}
		return used, nil
	}
}

// addressesNamedBy returns the addresses that claims name, on their devices' networks. The network is unknown, and
// empty, if the NIC has been missing since before the plugin started, or is no longer configured. The NIC may come
// back.
func (k *Kind) addressesNamedBy(claims []*record.Claim) map[ipam.Address]bool {
	claimed := map[ipam.Address]bool{}
	for _, c := range claims {
		for _, s := range c.SharesOf(Name) {
			p, err := parametersOf(s)
			if err != nil || len(p.Addresses) == 0 {
				continue
			}
			network := ""
			if d, err := k.device(s.Device); err == nil && d.network != nil {
				network = d.network.Name
			}
			static, _ := parseAddresses(p.Addresses) // Configure has parsed them
			for _, address := range static {
				claimed[ipam.Address{Network: network, IP: address.Addr()}] = true
			}
		}
	}
	return claimed
}

// addressesOf returns the link's addresses from pools.
func addressesOf(link attach.Link) (addresses []ipam.Address) {
	for _, text := range link.Addresses {
		if p, err := netip.ParsePrefix(text); err == nil {
			addresses = append(addresses, ipam.Address{Network: link.Network, IP: p.Addr()})
		}
	}
	return addresses
}

func routesOf(assigned []ipam.Route) (routes []v1alpha1.Route) {
	for _, r := range assigned {
		route := v1alpha1.Route{Destination: r.Destination.String()}
		if r.Gateway.IsValid() {
			route.Gateway = r.Gateway.String()
		}
		routes = append(routes, route)
	}
	return routes
}

// addReserved adds the reserved addresses and their pools' routes to the link, except where the claim has its own
// route to the destination. All of a pod's links on the same network have the routes of its pools, so each route is
// added if the pod does not have it.
func addReserved(spec *netdev.LinkSpec, raw json.RawMessage) (link attach.Link, err error) {
	if raw == nil {
		return link, nil
	}
	var reserved reservation
	if err := json.Unmarshal(raw, &reserved); err != nil {
		return link, fmt.Errorf("reserved addresses: %w", err)
	}
	addresses, addressErr := parseAddresses(reserved.Addresses)
	routes, routeErr := parseRoutes(reserved.Routes)
	for _, a := range addresses { // the claim may have named some of them
		if !slices.Contains(addrsOf(spec.Addresses), a.Addr()) {
			spec.Addresses = append(spec.Addresses, a)
		}
	}
	for _, r := range routes {
		isSet := func(other netdev.Route) bool { return other.Destination == r.Destination && other.Table == r.Table }
		if !slices.ContainsFunc(spec.Routes, isSet) {
			r.Optional = true
			spec.Routes = append(spec.Routes, r)
		}
	}
	return reserved.Link, errors.Join(addressErr, routeErr)
}
