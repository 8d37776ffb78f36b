// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// Limits on the contents of a status.
const (
	maxAddresses = resourceapi.NetworkDeviceDataMaxIPs
	// maxSummary is the size of a summary in bytes. The API server accepts 10 KiB of data.
	maxSummary = 10_000
)

// Read implements driver.Attacher.
func (k *Kind) Read(_ context.Context, share record.Share, r attach.Record) (driver.State, error) {
	recorded, err := r.Link()
	if err != nil {
		return driver.State{}, err
	}
	a, err := k.attachment(r)
	if err != nil {
		return driver.State{}, err
	}
	if recorded.Index == 0 {
		return k.unfinished(a)
	}
	link, err := k.node.ReadAndBlock(a)
	if err != nil {
		return driver.State{}, err
	}
	if !link.Exists {
		presence, err := k.node.Presence(a)
		if err != nil {
			return driver.State{}, err
		}
		if presence == netdev.NamespaceMissing {
			return driver.State{Pending: true}, nil
		}
	}
	d, err := k.device(share.Device)
	if err != nil {
		return driver.State{}, err
	}
	p, err := parametersOf(share)
	if err != nil && link.Exists {
		return driver.State{Exists: true}, err
	}
	state := withNameservers(k.state(d, share, p, a, link), recorded.Nameservers)
	failure, _ := k.leaseFailures.Load(leaseIDOf(&r))
	text, _ := failure.(string)
	return withLease(state, recorded, d, text), nil
}

// unfinished returns the state of an attachment with a link that is not recorded yet. The link may exist as long as
// the namespace does, because a plugin may have been killed, or failed to remove the link, after creating it.
func (k *Kind) unfinished(a netdev.Attachment) (driver.State, error) {
	presence, err := k.node.Presence(a)
	if err != nil {
		return driver.State{}, err
	}
	return driver.State{Exists: presence != netdev.NamespaceMissing, Pending: true}, nil
}

// withNameservers adds the DNS servers of an existing link's pools to its state.
func withNameservers(state driver.State, nameservers []string) driver.State {
	status, ok := state.Data.(*v1alpha1.NetworkStatus)
	if !ok || len(nameservers) == 0 {
		return state
	}
	status.DNS = &v1alpha1.CNIDNS{Nameservers: nameservers}
	state.Attributes = attributesOf(nameservers)
	return state
}

// attributesOf returns the additional attributes of a link in the device metadata.
func attributesOf(nameservers []string) attribute.Map {
	if len(nameservers) == 0 {
		return nil
	}
	return attribute.Map{v1alpha1.AttributeNameservers: {StringValues: nameservers}}
}

// networkData describes a link that exists.
func networkData(name string, mac net.HardwareAddr, addresses []netip.Prefix) *resourceapi.NetworkDeviceData {
	ips := make([]string, 0, len(addresses))
	for _, address := range addresses {
		ips = append(ips, address.String())
	}
	return &resourceapi.NetworkDeviceData{
		InterfaceName: name, HardwareAddress: mac.String(), IPs: ips[:min(len(ips), maxAddresses)],
	}
}

// state returns an attachment's state, from its link's state in the kernel.
func (k *Kind) state(
	d *device,
	share record.Share,
	p v1alpha1.NetworkAttachment,
	a netdev.Attachment,
	link netdev.LinkState,
) driver.State {
	reason, message := d.unhealthyReason()
	identity := d.identityCondition(link)
	switch {
	case !link.Exists:
		if message == "" {
			reason = v1alpha1.ReasonLinkGone
			message = fmt.Sprintf("the link %s no longer exists in the pod: restart its containers to recreate it", a.Name)
		}
		enforced := bandwidthCondition(false, reason, message)
		identity = enforced
		identity.Type = v1alpha1.ConditionIdentityEnforced
		return driver.State{Reason: reason, Message: message, Conditions: []metav1.Condition{enforced, identity}}
	case message == "" && identity.Reason == v1alpha1.ReasonLinkBlocked:
		reason, message = v1alpha1.ReasonLinkBlocked, blockedMessage(link)
	case message == "" && a.Blocking == netdev.BlockAlways:
		reason, message = v1alpha1.ReasonAddressLost, k.lost.message(d.network.Name, a.Addresses, identity)
	case message == "" && !link.Up:
		reason, message = v1alpha1.ReasonLinkChanged, fmt.Sprintf("the link %s is down in the pod", link.Name)
	case message == "":
		if found := k.duplicates.ownersOf(a.Parent, a.MAC.String()); len(found) > 0 {
			reason, message = v1alpha1.ReasonDuplicateAddress, duplicateMessage(d.network.Name, found)
		}
	}
	network := "" // of a NIC that is no longer configured
	if d.network != nil {
		network = d.network.Name
	}
	data := networkData(link.Name, link.MAC, link.Addresses)
	return driver.State{
		Exists: true, Ready: message == "", Reason: reason, Message: message,
		NetworkData: data,
		Conditions:  []metav1.Condition{k.enforcementCondition(d, share, p, link), identity},
		Data:        networkStatus(network, link, data.IPs, p.Routes),
	}
}

// networkStatus returns the data of a share with one link.
func networkStatus(
	network string, link netdev.LinkState, addresses []string, routes []v1alpha1.Route,
) *v1alpha1.NetworkStatus {
	status := &v1alpha1.NetworkStatus{
		TypeMeta:   v1alpha1.TypeMeta(v1alpha1.NetworkStatusKind),
		CNIVersion: v1alpha1.CNIVersion,
		Network:    network,
		Interfaces: []v1alpha1.CNIInterface{{Name: link.Name, MAC: link.MAC.String(), MTU: int32(link.MTU)}},
	}
	for _, a := range addresses {
		status.IPs = append(status.IPs, v1alpha1.CNIIP{Address: a})
	}
	for _, r := range routes {
		status.Routes = append(status.Routes, v1alpha1.CNIRoute(r))
	}
	if link.Send != nil && link.Receive != nil {
		status.Bandwidth = &v1alpha1.BandwidthStatus{
			Send:    v1alpha1.RateStatus{Guaranteed: link.Send.Floor, Ceiling: link.Send.Ceil},
			Receive: v1alpha1.RateStatus{Guaranteed: link.Receive.Floor, Ceiling: link.Receive.Ceil},
		}
	}
	return status
}

// StatusData implements driver.Attacher: a NetworkStatus for one link, a
// NetworkStatusSummary for several.
func (k *Kind) StatusData(attachments []driver.PodState, failed int) any {
	if len(attachments) == 1 {
		status := *networkStatusOf(attachments[0])
		status.Pod = attachments[0].Pod.Namespace + "/" + attachments[0].Pod.Name
		status.NotReady = !attachments[0].Ready
		return &status
	}
	attachments = slices.SortedFunc(slices.Values(attachments), func(a, b driver.PodState) int {
		return cmp.Or(cmp.Compare(a.Pod.Name, b.Pod.Name), cmp.Compare(a.Pod.UID, b.Pod.UID))
	})
	summary := v1alpha1.NetworkStatusSummary{
		TypeMeta:  v1alpha1.TypeMeta(v1alpha1.NetworkStatusSummaryKind),
		Network:   networkStatusOf(attachments[0]).Network,
		Pods:      int32(len(attachments) + failed),
		Failed:    int32(failed),
		Bandwidth: networkStatusOf(attachments[0]).Bandwidth,
	}
	var links []v1alpha1.PodNetworkStatus
	for _, a := range attachments {
		if a.Ready {
			summary.Attached++
		}
		links = append(links, podNetworkStatus(a))
	}
	summary.First, summary.Truncated = fitting(links, maxSummary-sizeOf(summary))
	return summary
}

// fitting returns as many of the first links as fit into the given number of bytes as JSON, and reports
// whether it omits others. It omits the names and MAC addresses before it omits links.
func fitting(links []v1alpha1.PodNetworkStatus, bytes int) (first []v1alpha1.PodNetworkStatus, truncated bool) {
	if n := countFitting(links, bytes); n == len(links) {
		return links, false
	}
	for i := range links {
		links[i].Interface, links[i].MAC = "", ""
	}
	n := countFitting(links, bytes)
	return links[:n], n < len(links)
}

// countFitting returns how many links fit into a list of at most the given number of bytes as JSON.
func countFitting(links []v1alpha1.PodNetworkStatus, bytes int) int {
	for i := range links {
		if bytes -= sizeOf(links[i]) + len(","); bytes < 0 {
			return i
		}
	}
	return len(links)
}

// sizeOf returns the number of bytes of a value as JSON.
func sizeOf(value any) int {
	raw, _ := json.Marshal(value) // cannot fail: the status has only strings, numbers, and booleans
	return len(raw)
}

// networkStatusOf returns one attachment's data. It has no interfaces if the link no longer exists.
func networkStatusOf(a driver.PodState) *v1alpha1.NetworkStatus {
	if status, ok := a.Data.(*v1alpha1.NetworkStatus); ok {
		return status
	}
	return &v1alpha1.NetworkStatus{
		TypeMeta:   v1alpha1.TypeMeta(v1alpha1.NetworkStatusKind),
		CNIVersion: v1alpha1.CNIVersion,
		Interfaces: []v1alpha1.CNIInterface{},
	}
}

func podNetworkStatus(a driver.PodState) v1alpha1.PodNetworkStatus {
	status := v1alpha1.PodNetworkStatus{Pod: a.Pod.Namespace + "/" + a.Pod.Name, NotReady: !a.Ready}
	if n := a.NetworkData; n != nil {
		status.Interface, status.MAC, status.IPs = n.InterfaceName, n.HardwareAddress, n.IPs
	}
	return status
}

// bandwidthCondition returns the condition BandwidthEnforced.
func bandwidthCondition(holds bool, reason, message string) metav1.Condition {
	c := metav1.Condition{
		Type:    v1alpha1.ConditionBandwidthEnforced,
		Status:  metav1.ConditionFalse,
		Reason:  reason,
		Message: message,
	}
	if holds {
		c.Status = metav1.ConditionTrue
	}
	return c
}

// enforcementCondition returns the condition BandwidthEnforced: it compares the rates that the kernel enforces to the
// grant.
func (k *Kind) enforcementCondition(
	d *device,
	share record.Share,
	p v1alpha1.NetworkAttachment,
	link netdev.LinkState,
) metav1.Condition {
	switch {
	case !d.isShared():
		reason, message := d.unhealthyReason()
		return bandwidthCondition(false, reason, message)
	case d.network.Enforcement == config.EnforcementNone:
		return bandwidthCondition(false, v1alpha1.ReasonEnforcementNone,
			fmt.Sprintf("network %q has enforcement None", d.network.Name))
	case share.AdminAccess:
		return bandwidthCondition(true, v1alpha1.ReasonAdminAccess, "requests with admin access have no grant: "+
			"the link uses the bandwidth reserved for unidentified frames")
	case link.Send == nil || link.Receive == nil:
		return bandwidthCondition(false, v1alpha1.ReasonNotClassified, fmt.Sprintf(
			"frames of link %s are not assigned to the share's class: has the pod changed the link's MAC address (%s)?",
			link.Name, link.MAC))
	}
	if reason, message := rateProblem(d, share, p, link); reason != "" {
		return bandwidthCondition(false, reason, message)
	}
	if d.missed != "" {
		return bandwidthCondition(false, v1alpha1.ReasonFramesMissed, fmt.Sprintf("NIC %s: %s", d.name, d.missed))
	}
	message := enforcementMessage(d, link, k.node.ForwardedBy(d.nic.Index))
	if !k.node.ClassifierKey().HasCookie() {
		return bandwidthCondition(false, v1alpha1.ReasonMAC, message+"; "+cookieMessage(k.node.Trials()))
	}
	return bandwidthCondition(true, v1alpha1.ReasonNetnsCookie, message)
}

// rateProblem compares the rates of a link with classes to the grant. It returns the reason and the message for the
// condition BandwidthEnforced, or "".
func rateProblem(
	d *device, share record.Share, p v1alpha1.NetworkAttachment, link netdev.LinkState,
) (reason, message string) {
	want, err := ratesOf(d, share, p)
	if err != nil || !sameRates(*link.Send, want) || !sameRates(*link.Receive, want) {
		return v1alpha1.ReasonRateDiffers, fmt.Sprintf("granted %s to %s bit/s; the kernel enforces %s to %s for sending "+
			"and %s to %s for receiving: did another program change the queues of %s?",
			formatRate(want.Floor), formatRate(want.Ceil), formatRate(link.Send.Floor), formatRate(link.Send.Ceil),
			formatRate(link.Receive.Floor), formatRate(link.Receive.Ceil), d.nic.Name)
	}
	if grant, err := grantOf(share); err == nil && want.Floor < grant {
		return v1alpha1.ReasonLinkTooSlow, fmt.Sprintf(
			"granted %s bit/s, with %s guaranteed: NIC %s has %s bit/s to grant, and %s are granted",
			formatRate(grant), formatRate(want.Floor), d.name, formatRate(d.bandwidth()), formatRate(d.granted))
	}
	return "", ""
}

// enforcementMessage describes the scope of the current enforcement, and its gaps.
func enforcementMessage(d *device, link netdev.LinkState, forwarded classify.Forwarded) string {
	message := "the kernel limits each direction to the grant"
	if d.network.TrustMAC {
		message += "; the network trusts the addresses of frames without a socket (trustMAC)"
	}
	if forwarded == classify.ForwardedByAddress {
		message += fmt.Sprintf("; frames without a known socket and with the address of %s, including a share's, count as "+
			"forwarded by the node and share %s bit/s", d.nic.Name, formatRate(d.forwarded))
	}
	if link.Switched {
		message += "; an earlier release attached the link, or attached it without enforcement: traffic to other shares " +
			"of the NIC is limited only by their grants until the pod is recreated"
	}
	return message + "; passed checks of the node's kernel: " + passedKernelChecks(d.checks)
}
