package nic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// Attaches implements driver.Attacher.
func (k *Kind) Attaches(share record.Share) bool {
	if !share.AdminAccess {
		return true
	}
	p, err := parameters(share)
	return err == nil && p.AdminLink
}

// Attach implements driver.Attacher: a macvlan of the NIC in the pod.
func (k *Kind) Attach(_ context.Context, share record.Share, r attach.Request, pod driver.PodNamespace) (attach.Record, error) {
	var none attach.Record
	d, err := k.device(share.Device)
	if err != nil {
		return none, err
	}
	if d.absent {
		return none, fmt.Errorf("NIC %s is gone from the node", share.Device)
	}
	conn, err := connect(pod.Socket)
	if err != nil {
		return none, err
	}
	defer conn.Close()
	cookie, err := conn.Cookie()
	if err != nil {
		return none, err
	}
	if cookie == k.node.Cookie() {
		return none, errors.New("the pod has the node's network (hostNetwork): a share of a NIC cannot be attached to it")
	}
	spec, err := linkSpec(d, share, netdev.MAC(r.ClaimUID, share.Device, string(share.ShareID), r.Pod.UID, cookie))
	if err != nil {
		return none, err
	}
	spec.Alias = fmt.Sprintf("dra-shared %s/%s %s", r.Pod.Namespace, r.Pod.Name, share.Name)
	spec.Alias = spec.Alias[:min(len(spec.Alias), maxAlias)]
	a, err := k.node.Attach(netdev.PodNamespace{File: pod.File, Socket: conn}, spec)
	if err != nil {
		return none, fmt.Errorf("on %s: %w", d.nic.Name, err)
	}
	ns, err := attach.NamespaceOf(pod.File, a.Cookie)
	if err != nil {
		return none, errors.Join(err, k.node.Detach(a))
	}
	ns.NSID = a.NSID
	return attach.Record{
		ClaimUID: r.ClaimUID, Share: share.Name, Pod: r.Pod, SandboxID: r.SandboxID, Namespace: ns, Class: a.Minor,
		Link: attach.Link{Parent: a.Parent, Index: a.Index, Name: a.Name, MAC: a.MAC.String(), MTU: a.MTU},
	}, nil
}

// maxAlias is the kernel's limit (IFALIASZ), in bytes.
const maxAlias = 255

// connect uses the socket that came from the hook; the caller keeps the
// descriptor it passed, and closes it.
func connect(socket *os.File) (*rtnl.Conn, error) {
	fd, err := unix.FcntlInt(socket.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return rtnl.New(os.NewFile(uintptr(fd), "pod-rtnetlink"))
}

// linkSpec is the link that a share's parameters and grant ask for: pure.
func linkSpec(d *device, share record.Share, mac net.HardwareAddr) (netdev.LinkSpec, error) {
	var s netdev.LinkSpec
	p, err := parameters(share)
	if err != nil {
		return s, err
	}
	rates, err := shareRates(d, share, p)
	if err != nil {
		return s, err
	}
	s = netdev.LinkSpec{Parent: d.nic.Index, Name: p.InterfaceName, MAC: mac, Mode: netdev.Private, Minor: share.Class, Rates: rates}
	if p.Mode == params.ModeBridge {
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
	for _, text := range p.Addresses {
		address, err := netip.ParsePrefix(text)
		if err != nil {
			return s, err
		}
		s.Addresses = append(s.Addresses, address)
	}
	for _, route := range p.Routes {
		destination, err := netip.ParsePrefix(route.Destination)
		if err != nil {
			return s, err
		}
		r := netdev.Route{Destination: destination}
		if route.Gateway != "" {
			if r.Gateway, err = netip.ParseAddr(route.Gateway); err != nil {
				return s, err
			}
		}
		s.Routes = append(s.Routes, r)
	}
	return s, nil
}

func parameters(share record.Share) (p params.NetworkAttachment, err error) {
	if err = json.Unmarshal(share.Parameters, &p); err != nil {
		err = fmt.Errorf("recorded parameters of share %s: %w", share.Name, err)
	}
	return p, err
}

func shareRates(d *device, share record.Share, p params.NetworkAttachment) (shape.Rates, error) {
	if share.AdminAccess {
		return shape.Rates{}, nil // no class of its own
	}
	floor, err := granted(share)
	rates := shape.Rates{Floor: d.guaranteed(floor), Ceil: floor}
	if p.Bandwidth != nil && p.Bandwidth.Burst == params.BurstLine {
		rates.Ceil = d.line
	}
	rates.Ceil = max(min(rates.Ceil, d.line), rates.Floor)
	return rates, err
}

// attachment is a record as netdev knows it.
func attachment(r attach.Record) (netdev.Attachment, error) {
	mac, err := net.ParseMAC(r.Link.MAC)
	if err != nil {
		return netdev.Attachment{}, fmt.Errorf("attach record of share %s: %w", r.Share, err)
	}
	return netdev.Attachment{Parent: r.Link.Parent, NSID: r.Namespace.NSID, Cookie: r.Namespace.Cookie,
		Index: r.Link.Index, Name: r.Link.Name, MAC: mac, MTU: r.Link.MTU, Minor: r.Class}, nil
}

// Restore implements driver.Attacher.
func (k *Kind) Restore(_ context.Context, share record.Share, r attach.Record) (bool, error) {
	a, err := attachment(r)
	if err != nil {
		return true, err
	}
	presence, err := k.node.Presence(a)
	if err != nil || presence != netdev.LinkPresent {
		return presence != netdev.NamespaceMissing, err
	}
	// Whatever is wrong from here on, the pod has its link: it stays.
	d, err := k.device(share.Device)
	if err != nil {
		return true, err
	}
	if d.absent || d.network == nil || len(share.Parameters) == 0 || share.AdminAccess {
		// Not configured any more, or the claim's record is lost: what there
		// is in the kernel stays as it is. With admin access there is nothing.
		return true, nil
	}
	p, err := parameters(share)
	if err != nil {
		return true, err
	}
	rates, err := shareRates(d, share, p)
	if err != nil {
		return true, err
	}
	link, err := k.node.Read(a)
	if err == nil && link.Send != nil && link.Receive != nil && sameRates(*link.Send, rates) && sameRates(*link.Receive, rates) {
		return true, nil // as it should be: every change is an event for somebody
	}
	return true, k.node.Restore(a, rates)
}

// Detach implements driver.Attacher.
func (k *Kind) Detach(_ context.Context, r attach.Record) error {
	a, err := attachment(r)
	if err != nil {
		return err
	}
	return k.node.Detach(a)
}

// Release implements driver.Attacher: the class that all links of the share
// draw on goes.
func (k *Kind) Release(_ context.Context, share record.Share) error {
	if d, err := k.device(share.Device); err == nil && !d.absent && share.Class != 0 {
		return k.node.RemoveClass(d.nic.Index, share.Class)
	}
	return nil // it went with the NIC
}

// Serves implements driver.Attacher: an address can be in one place only.
func (k *Kind) Serves(share record.Share, others []string) error {
	p, err := parameters(share)
	if err != nil || len(p.Addresses) == 0 || len(others) == 0 {
		return err
	}
	return fmt.Errorf("addresses %v belong to pod %s, which uses the same claim: give each pod a claim of its own, or leave addresses out", p.Addresses, others[0])
}

// Read implements driver.Attacher.
func (k *Kind) Read(_ context.Context, share record.Share, r attach.Record) (driver.State, error) {
	a, err := attachment(r)
	if err != nil {
		return driver.State{}, err
	}
	link, err := k.node.Read(a)
	if err != nil {
		return driver.State{}, err
	}
	d, err := k.device(share.Device)
	if err != nil {
		return driver.State{}, err
	}
	reason, message := d.trouble()
	if !link.Exists {
		if message == "" {
			reason, message = reasonLinkGone, fmt.Sprintf("the link %s is gone from the pod: restart its containers to have it made anew", r.Link.Name)
		}
		return driver.State{Reason: reason, Message: message, Enforced: driver.Enforcement{Reason: reasonLinkGone, Message: message}}, nil
	}
	if message == "" && !link.Up {
		reason, message = driver.ReasonLinkChanged, fmt.Sprintf("the link %s is down in the pod", link.Name)
	}
	state := driver.State{Attached: message == "", Reason: reason, Message: message, Interface: link.Name, MAC: link.MAC.String(), MTU: link.MTU}
	for _, address := range link.Addresses {
		state.Addresses = append(state.Addresses, address.String())
	}
	p, err := parameters(share)
	if err != nil {
		return state, err
	}
	for _, route := range p.Routes {
		state.Routes = append(state.Routes, driver.Route{Destination: route.Destination, Gateway: route.Gateway})
	}
	state.Enforced = k.enforcement(share, p, link)
	return state, nil
}

// Reasons of the condition Ready.
const (
	reasonGone     = "DeviceGone"
	reasonLinkDown = "LinkDown"
	reasonLinkGone = "LinkGone"
)

// Reasons of the condition BandwidthEnforced, beside the classifier's keys.
const (
	reasonSlow       = "LinkTooSlow"
	reasonNone       = "EnforcementNone"
	reasonNotSelects = "NotClassified"
	reasonDiffers    = "RateDiffers"
	// reasonAdminAccess is of a link without a grant.
	reasonAdminAccess = "AdminAccess"
)

// enforcement compares what the kernel has with what was granted.
func (k *Kind) enforcement(share record.Share, p params.NetworkAttachment, link netdev.LinkState) driver.Enforcement {
	d, err := k.device(share.Device)
	if err != nil {
		return driver.Enforcement{Reason: reasonGone, Message: err.Error()}
	}
	if d.absent || d.network == nil {
		_, message := d.trouble()
		return driver.Enforcement{Reason: reasonGone, Message: message}
	}
	if d.network.Enforcement == config.EnforcementNone {
		return driver.Enforcement{Reason: reasonNone, Message: fmt.Sprintf("network %q has enforcement None", d.network.Name)}
	}
	if share.AdminAccess {
		return driver.Enforcement{Holds: true, Reason: reasonAdminAccess, Message: "a request with admin access is granted nothing: its link shares what is reserved for frames that cannot be identified"}
	}
	if link.Send == nil || link.Receive == nil {
		return driver.Enforcement{Reason: reasonNotSelects, Message: fmt.Sprintf("frames of %s do not select the share's class: has the pod changed its address %s?", link.Name, link.MAC)}
	}
	e := driver.Enforcement{SendFloor: link.Send.Floor, SendCeil: link.Send.Ceil, ReceiveFloor: link.Receive.Floor, ReceiveCeil: link.Receive.Ceil}
	want, err := shareRates(d, share, p)
	if err != nil || !sameRates(*link.Send, want) || !sameRates(*link.Receive, want) {
		e.Reason = reasonDiffers
		e.Message = fmt.Sprintf("granted %s to %s bit/s; the kernel has %s to %s for sending, %s to %s for receiving: who changed the queues of %s?",
			text(want.Floor), text(want.Ceil), text(e.SendFloor), text(e.SendCeil), text(e.ReceiveFloor), text(e.ReceiveCeil), d.nic.Name)
		return e
	}
	if grant, err := granted(share); err == nil && want.Floor < grant {
		e.Reason = reasonSlow
		e.Message = fmt.Sprintf("granted %s bit/s, of which %s are guaranteed: NIC %s has %s bit/s to grant, and %s are granted",
			text(grant), text(want.Floor), d.name, text(d.bandwidth()), text(d.granted))
		return e
	}
	e.Holds, e.Reason, e.Message = true, string(k.node.ClassifierKey()), k.limits(d, p)
	return e
}

// sameRates compares as the kernel does, in bytes.
func sameRates(a, b shape.Rates) bool { return a.Floor/8 == b.Floor/8 && a.Ceil/8 == b.Ceil/8 }

// limits says what the enforcement in force does not cover.
func (k *Kind) limits(d *device, p params.NetworkAttachment) string {
	message := "each direction on the wire is held to the grant"
	if k.node.ClassifierKey() == classify.KeyMAC {
		message += "; this kernel tells senders apart by address only: a pod with CAP_NET_RAW can send as another"
	}
	if d.network.TrustMAC {
		message += "; the network trusts addresses of frames without a socket (trustMAC)"
	}
	if p.Mode == params.ModeBridge {
		message += "; what siblings send each other is held to the receiver's grant, broadcasts among them to none"
	}
	return message
}
