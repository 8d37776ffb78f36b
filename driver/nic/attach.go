// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// Attaches implements driver.Attacher. A share with admin access gets a link only if its parameters
// set adminLink.
func (k *Kind) Attaches(share record.Share) bool {
	if !share.AdminAccess {
		return true
	}
	p, err := parametersOf(share)
	return err == nil && p.AdminLink
}

// ValidateConsumers implements driver.Attacher: only one pod can use an address.
func (k *Kind) ValidateConsumers(share record.Share, others []string) error {
	p, err := parametersOf(share)
	if err != nil || len(p.Addresses) == 0 || len(others) == 0 {
		return err
	}
	return fmt.Errorf("addresses %v belong to pod %s, which uses the same claim: give each pod its own claim, or "+
		"remove addresses; in a Deployment, set strategy.type to Recreate", p.Addresses, others[0])
}

// Attach implements driver.Attacher: it creates a macvlan of the NIC in the pod.
func (k *Kind) Attach(
	ctx context.Context, share record.Share, r attach.Request, sandbox driver.Sandbox,
) (attached driver.Attached, err error) {
	defer func() {
		if errors.Is(err, netdev.ErrLinkRemains) {
			err = fmt.Errorf("%w: %w", err, driver.ErrRemains)
		}
	}()
	d, err := k.device(share.Device)
	if err != nil {
		return attached, err
	}
	if d.absent {
		return attached, d.absentError()
	}
	conn, err := connect(sandbox.Netlink)
	if err != nil {
		return attached, err
	}
	defer conn.Close()
	attempt := attachAttempt{device: d, share: share, request: r, sandbox: sandbox, conn: conn}
	planned, err := k.planLink(ctx, attempt)
	if err != nil {
		return attached, err
	}
	a, err := k.node.Attach(netdev.PodNamespace{File: sandbox.Namespace, Socket: conn}, planned.LinkSpec)
	if errors.Is(err, shape.ErrQueuesMissing) {
		return attached, fmt.Errorf("on %s: %w; %w", d.nic.Name, err, driver.ErrRetryAttach)
	}
	if err != nil {
		return attached, fmt.Errorf("on %s: %w", d.nic.Name, err)
	}
	attached, link, err := k.finishAttachment(ctx, attempt, planned, a)
	if err != nil {
		return attached, k.node.Undo(err, a)
	}
	k.duplicates.add(share.Device, link)
	klog.FromContext(ctx).V(4).Info("Created link", "device", share.Device, "link", link.Name, "mac", link.MAC,
		"addresses", link.Sources, "class", planned.Minor)
	return attached, nil
}

// attachAttempt is an attempt to attach a share to a pod.
type attachAttempt struct {
	device  *device
	share   record.Share
	request attach.Request
	sandbox driver.Sandbox
	conn    *rtnl.Conn // over the socket of sandbox.Netlink
}

// finishAttachment leases the address of a new link, if the share leases one, and returns what the driver records. The
// caller undoes the attachment if it fails.
func (k *Kind) finishAttachment(
	ctx context.Context, attempt attachAttempt, planned plannedLink, a netdev.Attachment,
) (attached driver.Attached, link attach.Link, err error) {
	link = linkOf(a, planned.reserved)
	if link.Sysctls, err = sysctlsOf(attempt.share); err != nil {
		return attached, link, err
	}
	addresses := planned.Addresses
	if planned.Leases {
		link.DHCP = newLease(attempt.share, attempt.request)
		if err := k.firstLease(ctx, attempt, a, planned.leasedRoutes, &link); err != nil {
			return attached, link, err
		}
		addresses = append(addresses, leaseOf(link).Address)
	}
	if attached, err = attachedResult(a, attempt.sandbox, link); err != nil {
		return attached, link, err
	}
	attached.NetworkData = networkData(link.Name, a.MAC, addresses)
	attached.Attributes = attributesOf(link.Nameservers)
	return attached, link, nil
}

// plannedLink is the configuration of a share's link.
type plannedLink struct {
	netdev.LinkSpec
	// reserved is the record that Reserve has made for the link.
	reserved attach.Link
	// leasedRoutes are the routes that need the leased address. LinkSpec has the others.
	leasedRoutes []netdev.Route
}

// planLink returns the configuration of a share's link. It refuses addresses that another host on the network has.
func (k *Kind) planLink(ctx context.Context, attempt attachAttempt) (planned plannedLink, err error) {
	d, share, r := attempt.device, attempt.share, attempt.request
	cookie, err := attempt.conn.Cookie()
	if err != nil {
		return planned, err
	}
	if cookie == k.node.Cookie() {
		return planned, errors.New("the pod uses the node's network (hostNetwork): a share of a NIC cannot be " +
			"attached to it: set hostNetwork: false, or remove the claim")
	}
	spec := &planned.LinkSpec
	if *spec, err = linkSpec(d, share, macOf(share, r, cookie)); err != nil {
		return planned, err
	}
	found, err := d.refuseDuplicates(ctx, spec.MAC, spec.Addresses)
	if err != nil {
		return planned, err
	}
	if len(found) > 0 {
		return planned, fmt.Errorf("addresses: another host on the network has the address: %s on network %s: "+
			"remove the address from that host, or choose another address", found, d.network.Name)
	}
	spec.Alias = alias(r.Pod, share)
	// Reserve has probed the addresses that it reserved.
	if planned.reserved, err = addReserved(spec, attempt.sandbox.Reserved); err != nil {
		return planned, err
	}
	if !spec.Leases {
		return planned, nil
	}
	planned.leasedRoutes, spec.Routes = splitRoutes(spec.Routes)
	if attempt.sandbox.Packet == nil {
		err = attach.ErrPacketNeeded
	}
	return planned, err
}

// sysctlsOf returns the kernel parameters that the hook sets for a share's link: netlink cannot set most of them, and
// the plugin does not enter namespaces.
func sysctlsOf(share record.Share) (map[string]string, error) {
	p, err := parametersOf(share)
	return p.Sysctls, err
}

// macOf returns the MAC address of a share's link in a pod.
func macOf(share record.Share, r attach.Request, cookie uint64) net.HardwareAddr {
	return netdev.MAC(r.ClaimUID, share.Device, string(share.ShareID), r.Pod.UID, cookie)
}

// maxAlias is the kernel's limit for aliases of links (IFALIASZ), in bytes.
const maxAlias = 255

// alias returns a link's alias, which names its pod and share for administrators.
func alias(pod attach.Pod, share record.Share) string {
	text := fmt.Sprintf("dra-shared %s/%s %s", pod.Namespace, pod.Name, share.Name)
	return text[:min(len(text), maxAlias)]
}

// connect returns a connection over the socket that the hook sent. It duplicates
// the descriptor, which remains the caller's.
func connect(socket *os.File) (*rtnl.Conn, error) {
	fd, err := unix.FcntlInt(socket.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return rtnl.New(os.NewFile(uintptr(fd), "pod-rtnetlink"))
}

// linkOf converts a netdev attachment to the payload of its record, with its pools' addresses and DNS servers.
func linkOf(a netdev.Attachment, reserved attach.Link) attach.Link {
	link := attach.Link{
		Parent: a.Parent, Index: a.Index, Name: a.Name, MAC: a.MAC.String(), MTU: a.MTU,
		Network: reserved.Network, Addresses: reserved.Addresses,
		Bridge: a.Mode != netdev.Private, VEPA: a.Mode == netdev.VEPA, Identity: true, Nameservers: reserved.Nameservers,
	}
	for _, address := range a.Addresses {
		link.Sources = append(link.Sources, address.String())
	}
	return link
}

// attachedResult returns an attachment in the form that the driver records.
func attachedResult(
	a netdev.Attachment, sandbox driver.Sandbox, link attach.Link,
) (attached driver.Attached, err error) {
	if attached.Namespace, err = attach.NamespaceOf(sandbox.Namespace, a.Cookie); err != nil {
		return attached, err
	}
	attached.Namespace.NSID = a.NSID
	attached.Payload, err = json.Marshal(link)
	return attached, err
}

// attachment converts an attachment record to the type of package netdev.
func (k *Kind) attachment(r attach.Record) (a netdev.Attachment, err error) {
	link, err := r.Link()
	if err != nil {
		return a, err
	}
	mac, err := net.ParseMAC(link.MAC)
	if err != nil {
		return a, fmt.Errorf("attachment record of share %s: %w", r.Share, err)
	}
	a = netdev.Attachment{
		Parent: link.Parent, NSID: r.Namespace.NSID, Cookie: r.Namespace.Cookie,
		Index: link.Index, Name: link.Name, MAC: mac, MTU: link.MTU, Minor: r.Number, Audited: !link.Identity,
	}
	for _, text := range link.Sources {
		if address, err := config.ParseAddressOrNetwork(text); err == nil {
			a.Addresses = append(a.Addresses, address.Addr())
		}
	}
	a.Mode, a.Leases = modeOf(link), link.DHCP != nil
	if k.addresses != nil {
		a.Blocking = k.lost.blocking(link)
	}
	return a, nil
}

// modeOf returns a link's mode in the kernel.
func modeOf(link attach.Link) netdev.Mode {
	switch {
	case !link.Identity:
		return 0 // the record does not have it
	case link.VEPA:
		return netdev.VEPA
	case link.Bridge:
		return netdev.Bridge
	default:
		return netdev.Private
	}
}

// Restore implements driver.Attacher: it restores an existing link's classes. It never replaces a link.
func (k *Kind) Restore(_ context.Context, share record.Share, r attach.Record) (exists bool, err error) {
	a, err := k.attachment(r)
	if err != nil {
		return true, err
	}
	presence, err := k.node.Presence(a)
	if err != nil || presence != netdev.LinkPresent {
		return presence != netdev.NamespaceMissing, err
	}
	return true, k.restoreClasses(share, a)
}

// Altered implements driver.Comparer. It reads the classes of each NIC once.
func (k *Kind) Altered(_ context.Context, attachments []driver.Attachment) (altered []driver.Attachment, err error) {
	snapshot, err := k.node.Snapshot()
	if err != nil {
		return nil, err
	}
	for _, a := range attachments {
		if intact, err := k.isIntact(snapshot, a); err != nil || !intact {
			altered = append(altered, a) // Restore finds the error again
		}
	}
	return altered, nil
}

// isIntact reports whether an attachment's namespace exists, its link is not blocked, and the kernel enforces its
// share's rates.
func (k *Kind) isIntact(snapshot *netdev.Snapshot, of driver.Attachment) (bool, error) {
	a, err := k.attachment(of.Record)
	if err != nil {
		return false, err
	}
	if exists, err := snapshot.NamespaceExists(a); err != nil || !exists {
		return false, err
	}
	want, known, err := k.wantedRates(of.Share)
	if err != nil || !known || !snapshot.Enforced(a) {
		return err == nil, err
	}
	if blocked, err := snapshot.Blocked(a); err != nil || blocked {
		return false, err // Restore guards the NIC of a blocked link again
	}
	if of.Share.AdminAccess {
		return snapshot.Identified(a)
	}
	send, receive, err := snapshot.Rates(a)
	return err == nil && areRates(send, receive, want), err
}

// wantedRates returns the rates that the kernel must enforce for a share; zero for admin access, which has no class.
// known is false if the kernel's state must not change because the rates are unknown: the NIC is no longer
// configured, or the claim record is lost.
func (k *Kind) wantedRates(share record.Share) (rates shape.Rates, known bool, err error) {
	d, err := k.device(share.Device)
	if err != nil || !d.isShared() || len(share.Parameters) == 0 {
		return rates, false, err
	}
	p, err := parametersOf(share)
	if err != nil {
		return rates, false, err
	}
	rates, err = ratesOf(d, share, p)
	return rates, err == nil, err
}

// restoreClasses restores the classes of a share, if they differ.
func (k *Kind) restoreClasses(share record.Share, a netdev.Attachment) error {
	rates, known, err := k.wantedRates(share)
	if err != nil || !known {
		return err
	}
	if link, err := k.node.ReadAndBlock(a); err == nil && areRates(link.Send, link.Receive, rates) {
		return nil // each change causes events for all watchers
	}
	return k.node.Restore(a, rates)
}

// areRates reports whether the rates of both directions are known and equal want.
func areRates(send, receive *shape.Rates, want shape.Rates) bool {
	return send != nil && receive != nil && sameRates(*send, want) && sameRates(*receive, want)
}

// Protect implements driver.Protector: it blocks a link if its pod changed it in a way that could let it receive
// other pods' frames.
func (k *Kind) Protect(r attach.Record) error {
	a, err := k.attachment(r)
	if err != nil {
		return err
	}
	return k.node.UpdateBlocking(a)
}

// Detach implements driver.Attacher.
func (k *Kind) Detach(ctx context.Context, r attach.Record) error {
	a, err := k.attachment(r)
	if err != nil {
		return err
	}
	k.duplicates.forget(a.Parent, a.MAC.String())
	if err := k.node.Detach(a); err != nil {
		return err
	}
	if link, err := r.Link(); err == nil {
		k.releaseLease(ctx, link)
	}
	return nil
}

// Release implements driver.Attacher: it removes the class that all of the share's links use. A missing NIC's class
// no longer exists.
func (k *Kind) Release(_ context.Context, share record.Share) error {
	d, err := k.device(share.Device)
	if err != nil || d.absent || share.Number == 0 {
		return nil //nolint:nilerr // an unknown device has no state to remove
	}
	return k.node.RemoveClass(d.nic.Index, share.Number)
}
