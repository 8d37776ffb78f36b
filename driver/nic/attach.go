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

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// Attaches implements driver.Attacher. A share with admin access gets a link
// only if its parameters ask for one.
func (k *Kind) Attaches(share record.Share) bool {
	if !share.AdminAccess {
		return true
	}
	p, err := parametersOf(share)
	return err == nil && p.AdminLink
}

// ValidateConsumers implements driver.Attacher: an address can be in use by one
// pod only.
func (k *Kind) ValidateConsumers(share record.Share, others []string) error {
	p, err := parametersOf(share)
	if err != nil || len(p.Addresses) == 0 || len(others) == 0 {
		return err
	}
	return fmt.Errorf(
		"addresses %v belong to pod %s, which uses the same claim: give each pod its own claim, or remove addresses",
		p.Addresses,
		others[0],
	)
}

// Attach implements driver.Attacher: it creates a macvlan of the NIC in the pod.
func (k *Kind) Attach(
	_ context.Context,
	share record.Share,
	r attach.Request,
	sandbox driver.Sandbox,
) (attached driver.Attached, err error) {
	d, err := k.device(share.Device)
	if err != nil {
		return attached, err
	}
	if d.absent {
		return attached, d.gone()
	}
	conn, err := connect(sandbox.Socket)
	if err != nil {
		return attached, err
	}
	defer conn.Close()
	cookie, err := conn.Cookie()
	if err != nil {
		return attached, err
	}
	if cookie == k.node.Cookie() {
		return attached, errors.New(
			"the pod uses the node's network (hostNetwork): a share of a NIC cannot be attached to it",
		)
	}
	spec, err := linkSpec(d, share, netdev.MAC(r.ClaimUID, share.Device, string(share.ShareID), r.Pod.UID, cookie))
	if err != nil {
		return attached, err
	}
	spec.Alias = alias(r.Pod, share)
	a, err := k.node.Attach(netdev.PodNamespace{File: sandbox.Namespace, Socket: conn}, spec)
	if err != nil {
		return attached, fmt.Errorf("on %s: %w", d.nic.Name, err)
	}
	if attached, err = describe(a, sandbox); err != nil {
		return attached, errors.Join(err, k.node.Detach(a))
	}
	return attached, nil
}

// maxAlias is the kernel's limit for aliases of links (IFALIASZ), in bytes.
const maxAlias = 255

// alias tells an administrator which pod and share a link belongs to.
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

// describe converts an attachment of package netdev to what is recorded.
func describe(a netdev.Attachment, sandbox driver.Sandbox) (attached driver.Attached, err error) {
	if attached.Namespace, err = attach.NamespaceOf(sandbox.Namespace, a.Cookie); err != nil {
		return attached, err
	}
	attached.Namespace.NSID = a.NSID
	attached.Payload, err = json.Marshal(
		attach.Link{Parent: a.Parent, Index: a.Index, Name: a.Name, MAC: a.MAC.String(), MTU: a.MTU},
	)
	return attached, err
}

// attachment converts a record to what package netdev knows.
func attachment(r attach.Record) (a netdev.Attachment, err error) {
	link, err := r.Link()
	if err != nil {
		return a, err
	}
	mac, err := net.ParseMAC(link.MAC)
	if err != nil {
		return a, fmt.Errorf("attachment record of share %s: %w", r.Share, err)
	}
	return netdev.Attachment{
		Parent: link.Parent, NSID: r.Namespace.NSID, Cookie: r.Namespace.Cookie,
		Index: link.Index, Name: link.Name, MAC: mac, MTU: link.MTU, Minor: r.Class,
	}, nil
}

// Restore implements driver.Attacher: it restores the classes of a link that
// exists. It never replaces a link.
func (k *Kind) Restore(_ context.Context, share record.Share, r attach.Record) (exists bool, err error) {
	a, err := attachment(r)
	if err != nil {
		return true, err
	}
	presence, err := k.node.Presence(a)
	if err != nil || presence != netdev.LinkPresent {
		return presence != netdev.NamespaceMissing, err
	}
	return true, k.restoreClasses(share, a)
}

// restoreClasses restores the classes of a share, if they differ. It leaves the
// kernel as it is if the NIC is no longer configured or the claim's record is
// lost, because then the rates are not known, and for admin access, which has no
// class.
func (k *Kind) restoreClasses(share record.Share, a netdev.Attachment) error {
	d, err := k.device(share.Device)
	if err != nil {
		return err
	}
	if d.absent || d.network == nil || len(share.Parameters) == 0 || share.AdminAccess {
		return nil
	}
	p, err := parametersOf(share)
	if err != nil {
		return err
	}
	rates, err := ratesOf(d, share, p)
	if err != nil {
		return err
	}
	link, err := k.node.Read(a)
	if err == nil && link.Send != nil && link.Receive != nil && sameRates(*link.Send, rates) &&
		sameRates(*link.Receive, rates) {
		return nil // a needless change would be an event for every watcher
	}
	return k.node.Restore(a, rates)
}

// Detach implements driver.Attacher.
func (k *Kind) Detach(_ context.Context, r attach.Record) error {
	a, err := attachment(r)
	if err != nil {
		return err
	}
	return k.node.Detach(a)
}

// Release implements driver.Attacher: it removes the class that all links of the
// share use. The class of a missing NIC no longer exists.
func (k *Kind) Release(_ context.Context, share record.Share) error {
	d, err := k.device(share.Device)
	if err != nil || d.absent || share.Class == 0 {
		return nil //nolint:nilerr // the device is unknown: nothing of it is left to remove
	}
	return k.node.RemoveClass(d.nic.Index, share.Class)
}
