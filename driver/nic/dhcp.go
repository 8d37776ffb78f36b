// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/dhcp"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

const (
	// acquireTimeout limits how long a pod waits for its first lease.
	acquireTimeout = 10 * time.Second
	// exchangeTimeout limits later exchanges. While one runs, its socket keeps the pod's namespace alive.
	exchangeTimeout = 3 * time.Second
	// maxDeclined is how many addresses a link declines because another host has them before the attempt fails.
	maxDeclined = 3
)

// configureDHCP sets p.DHCP to the network's families if the claim does not set addresses, and returns an error if
// the kind cannot renew leases.
func (k *Kind) configureDHCP(
	ctx context.Context, namespace string, network *config.Network, p *v1alpha1.NetworkAttachment,
) error {
	if p.DHCP == nil && p.AddressPools == nil && len(p.Addresses) == 0 && len(network.DHCP) > 0 {
		p.DHCP = network.DHCP
		if k.addresses != nil {
			pools, err := k.addresses.Defaults(ctx, network.Name, namespace)
			if err != nil {
				return err
			}
			if len(pools) > 0 {
				return fmt.Errorf("dhcp: Forbidden: %v: network %q also has the default AddressPools %v: set "+
					"dhcp or addressPools in the claim, or remove dhcp or the default pools from the network",
					p.DHCP, network.Name, pools)
			}
		}
	}
	if len(p.DHCP) == 0 {
		return nil
	}
	if k.openSockets == nil {
		return fmt.Errorf("dhcp: Forbidden: %v: the plugin cannot renew leases: set plugin.dhcp in the chart", p.DHCP)
	}
	if ptr.Deref(p.KeepAddresses, false) {
		return errors.New("keepAddresses: Forbidden: true: the pod leases its address: remove keepAddresses")
	}
	p.AddressPools = []string{} // not the network's
	return nil
}

// splitRoutes returns the routes that need the leased address, and the others.
func splitRoutes(routes []netdev.Route) (leased, others []netdev.Route) {
	for _, r := range routes {
		if r.Destination.Addr().Is4() {
			leased = append(leased, r)
		} else {
			others = append(others, r)
		}
	}
	return leased, others
}

// clientOf returns the DHCP client that a link's record identifies.
func clientOf(link attach.Link) (c dhcp.Client, err error) {
	c = dhcp.Client{ID: link.DHCP.ClientID, Hostname: link.DHCP.Hostname}
	c.MAC, err = net.ParseMAC(link.MAC)
	return c, err
}

// firstLease leases an address for a new link, adds it to the link in the pod, and sets the lease in link. routes are
// the claim's IPv4 routes.
func (k *Kind) firstLease(
	ctx context.Context, attempt attachAttempt, a netdev.Attachment, routes []netdev.Route, link *attach.Link,
) error {
	ctx, cancel := context.WithTimeout(ctx, acquireTimeout)
	defer cancel()
	lease, err := k.acquire(ctx, attempt.device, a, *link, attempt.sandbox.Packet)
	if err != nil {
		return err
	}
	setLease(link, lease)
	a.Addresses = append(a.Addresses, lease.Address.Addr())
	if err := k.apply(a, lease, routes, attempt.conn, attempt.sandbox.Packet); err != nil {
		k.releaseLease(ctx, *link)
		return fmt.Errorf("address %s of DHCP server %s: %w", lease.Address, lease.Server, err)
	}
	return nil
}

// acquire leases an address for a link. It declines up to maxDeclined addresses that another link
// or host has.
func (k *Kind) acquire(
	ctx context.Context, d *device, a netdev.Attachment, link attach.Link, packet *os.File,
) (lease dhcp.Lease, err error) {
	client, err := clientOf(link)
	if err != nil {
		return lease, err
	}
	for range maxDeclined {
		conn, err := dhcp.NewConn(packet, link.Index)
		if err != nil {
			return lease, err
		}
		err = k.failpoints.Do("lease address", func() (err error) {
			lease, err = client.Acquire(ctx, conn)
			return err
		})
		if err != nil {
			return lease, fmt.Errorf("lease an address for %s on network %q: %w: does a DHCP server on the network of NIC %s "+
				"have free addresses?", link.Name, d.network.Name, err, d.nic.Name)
		}
		err = k.checkLease(ctx, d, a, client.MAC, lease)
		if err == nil {
			return lease, nil
		}
		var inUse addressInUseError
		if !errors.As(err, &inUse) {
			k.giveBack(ctx, link, lease)
			return lease, err
		}
		if err := k.decline(client, link, packet, lease); err != nil {
			return lease, err
		}
		klog.FromContext(ctx).Info("Declined a leased address that is in use", "address", lease.Address,
			"server", lease.Server, "reason", inUse.Error())
	}
	return lease, fmt.Errorf("DHCP server %s leases addresses that are in use, %s as the last one: "+
		"exclude them on the server", lease.Server, lease.Address)
}

// addressInUseError is the reason to decline a leased address.
type addressInUseError struct{ error }

func (e addressInUseError) Unwrap() error { return e.error }

// checkLease returns an error if a link must not have a leased address, or if the check failed. The error is an
// addressInUseError if the client must decline the address.
func (k *Kind) checkLease(
	ctx context.Context, d *device, a netdev.Attachment, mac net.HardwareAddr, lease dhcp.Lease,
) error {
	if err := refuseLease(d.network, lease); err != nil {
		return err
	}
	if err := k.node.CheckAddress(a, lease.Address); err != nil {
		return addressInUseError{err}
	}
	if err := k.refusePooled(ctx, d.network.Name, lease.Address.Addr()); err != nil {
		return err
	}
	found, err := d.refuseDuplicates(ctx, mac, []netip.Prefix{lease.Address})
	if err != nil || len(found) == 0 {
		return err
	}
	return addressInUseError{fmt.Errorf("another host has it: %s", found)}
}

// refusePooled returns an addressInUseError if one of the network's AddressPools has a leased address: it may belong
// to a pod on any node.
func (k *Kind) refusePooled(ctx context.Context, network string, address netip.Addr) error {
	if k.addresses == nil {
		return nil
	}
	pooled, err := k.addresses.HasPool(ctx, network, []netip.Addr{address})
	if err != nil || !pooled {
		return err
	}
	return addressInUseError{fmt.Errorf(
		"an AddressPool of network %q has the address %s: exclude it on the DHCP server, or in the pool", network, address)}
}

func (k *Kind) decline(client dhcp.Client, link attach.Link, packet *os.File, lease dhcp.Lease) error {
	conn, err := dhcp.NewConn(packet, link.Index)
	if err != nil {
		return err
	}
	return k.failpoints.Do("decline address", func() error { return client.Decline(conn, lease) })
}

// refuseLease refuses an address outside the subnets that the network allows: a server that does not belong to the
// network may have leased it.
func refuseLease(network *config.Network, lease dhcp.Lease) error {
	allowed := network.Allowed(0)
	if len(allowed.Subnets) == 0 || allowed.Contains(lease.Address) {
		return nil
	}
	return fmt.Errorf("DHCP server %s (MAC address %s) leases %s: network %q allows addresses in %v: "+
		"is it a server of the network?",
		lease.Server, lease.ServerMAC, lease.Address, network.Name, allowed.Subnets)
}

// apply gives a leased address to a link, and announces it. The address is invalid if the lease has
// ended. a has the addresses of the link.
func (k *Kind) apply(
	a netdev.Attachment, lease dhcp.Lease, routes []netdev.Route, conn *rtnl.Conn, packet *os.File,
) error {
	if err := k.node.SetAddresses(a); err != nil {
		return err
	}
	wanted := netdev.Lease{Address: lease.Address, Valid: netdev.Forever}
	if remaining := lease.Remaining(dhcp.SinceBoot()); remaining != dhcp.Never {
		wanted.Valid = remaining
	}
	if lease.Address.IsValid() {
		wanted.Routes = slices.Clone(routes)
		for _, r := range lease.Routes {
			wanted.Routes = append(wanted.Routes, netdev.Route{Destination: r.Destination, Gateway: r.Gateway})
		}
	}
	if err := k.node.SetLease(conn, a, wanted); err != nil || !lease.Address.IsValid() {
		return err
	}
	announcer, err := dhcp.NewConn(packet, a.Index)
	if err != nil {
		return err
	}
	return errors.Join(announcer.Announce(a.MAC, lease.Address.Addr()), announcer.Close())
}

// giveBack releases a leased address that could not be added to its link.
func (k *Kind) giveBack(ctx context.Context, link attach.Link, lease dhcp.Lease) {
	setLease(&link, lease)
	k.releaseLease(ctx, link)
}

// releaseLease releases the lease of a deleted link. If that fails, the server keeps the address until the
// lease expires.
func (k *Kind) releaseLease(ctx context.Context, link attach.Link) {
	if link.DHCP == nil || link.DHCP.Address == "" {
		return
	}
	client, err := clientOf(link)
	lease := leaseOf(link)
	if err == nil && lease.State(dhcp.SinceBoot()) != dhcp.Expired {
		err = k.failpoints.Do("release lease", func() error { return client.Release(link.Parent, lease) })
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to release a leased address; it is free when the lease ends",
			"address", link.DHCP.Address, "server", link.DHCP.Server)
		return
	}
	klog.FromContext(ctx).V(2).Info("Released leased address", "address", link.DHCP.Address, "server", link.DHCP.Server)
}

// newLease returns the lease to record for a link that does not have an address yet.
func newLease(share record.Share, r attach.Request) *attach.Lease {
	return &attach.Lease{
		ClientID: dhcp.ID(r.Pod.UID, r.ClaimUID, share.Name), Hostname: hostname(r.Pod.Name),
	}
}

// maxHostname is the longest label in DNS.
const maxHostname = 63

// hostname returns the host name of a pod, as the kubelet sets it: the name of the pod, truncated to one DNS label.
func hostname(pod string) string {
	if len(pod) <= maxHostname {
		return pod
	}
	end := maxHostname
	for end > 0 && (pod[end-1] == '-' || pod[end-1] == '.') {
		end--
	}
	return pod[:end]
}

// setLease records a lease, or removes it if its address is invalid.
func setLease(link *attach.Link, lease dhcp.Lease) {
	old := *link.DHCP
	isLeased := func(text string) bool { return text == addrOf(old.Address) }
	link.Sources = slices.DeleteFunc(slices.Clone(link.Sources), isLeased)
	link.Nameservers = nil
	next := &attach.Lease{ClientID: old.ClientID, Hostname: old.Hostname, Last: old.Address}
	if old.Address == "" {
		next.Last = old.Last
	}
	link.DHCP = next
	if !lease.Address.IsValid() {
		return
	}
	link.Sources = append(link.Sources, lease.Address.Addr().String())
	for _, server := range lease.Nameservers {
		link.Nameservers = append(link.Nameservers, server.String())
	}
	next.Address, next.Server, next.Last = lease.Address.String(), lease.Server.String(), ""
	next.ServerMAC = lease.ServerMAC.String()
	next.Renew, next.Rebind, next.Expires = millis(lease.Renew), millis(lease.Rebind), millis(lease.Expires)
	for _, r := range lease.Routes {
		route := attach.LeaseRoute{Destination: r.Destination.String()}
		if r.Gateway.IsValid() {
			route.Gateway = r.Gateway.String()
		}
		next.Routes = append(next.Routes, route)
	}
}

// addrOf returns an address without its prefix length, or "".
func addrOf(text string) string {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return ""
	}
	return p.Addr().String()
}

// millis returns a time as it is recorded.
func millis(d time.Duration) int64 {
	if d == dhcp.Never {
		return 0
	}
	return d.Milliseconds()
}

// leaseOf returns a link's recorded lease; its address is invalid if there is none.
func leaseOf(link attach.Link) (lease dhcp.Lease) {
	recorded := link.DHCP
	lease.Address, _ = netip.ParsePrefix(recorded.Address)
	lease.Server, _ = netip.ParseAddr(recorded.Server)
	lease.ServerMAC, _ = net.ParseMAC(recorded.ServerMAC)
	at := func(millis int64) time.Duration {
		if millis == 0 {
			return dhcp.Never
		}
		return time.Duration(millis) * time.Millisecond
	}
	lease.Times = dhcp.Times{Renew: at(recorded.Renew), Rebind: at(recorded.Rebind), Expires: at(recorded.Expires)}
	for _, r := range recorded.Routes {
		route := dhcp.Route{}
		var err error
		if route.Destination, err = netip.ParsePrefix(r.Destination); err != nil {
			continue
		}
		route.Gateway, _ = netip.ParseAddr(r.Gateway)
		lease.Routes = append(lease.Routes, route)
	}
	for _, text := range link.Nameservers {
		if server, err := netip.ParseAddr(text); err == nil {
			lease.Nameservers = append(lease.Nameservers, server)
		}
	}
	return lease
}

// stateOf returns the state of a link's recorded lease.
func stateOf(link attach.Link, now time.Duration) dhcp.State {
	lease := leaseOf(link)
	if !lease.Address.IsValid() {
		return dhcp.Expired
	}
	return lease.State(now)
}

// leaseWarnings returns a warning if links have leases that this plugin cannot renew, as an earlier one could.
func (k *Kind) leaseWarnings() []driver.Warning {
	states := k.leases.Load()
	if k.openSockets != nil || states == nil || len(*states) == 0 {
		return nil
	}
	return []driver.Warning{{
		Reason: v1alpha1.EventReasonLeasesNotRenewed,
		Message: "links of pods lease their addresses, and the plugin cannot renew the leases: the links lose their " +
			"addresses when the leases expire: set plugin.dhcp=true in the chart, or delete these pods",
		EndReason:  v1alpha1.EventReasonLeasesRenewed,
		EndMessage: "no link has a lease that the plugin cannot renew",
	}}
}

// withLease makes the state of a working link not ready if the link must have a leased address and does not. failure
// is why the last attempt to lease one failed, or "".
func withLease(state driver.State, link attach.Link, d *device, failure string) driver.State {
	if !state.Ready || link.DHCP == nil || link.DHCP.Address != "" || d.network == nil {
		return state
	}
	state.Ready, state.Reason = false, v1alpha1.ReasonLeaseExpired
	state.Message = fmt.Sprintf("the link %s has no address: the lease of %s has ended, and the plugin tries to lease "+
		"another one on network %q", link.Name, link.DHCP.Last, d.network.Name)
	if failure != "" {
		state.Message += ": " + failure
	}
	return state
}
