// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package endpoints

import (
	"encoding/json"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
)

// link is the link of a pod as the plugin reports it in the status of a claim.
type link struct {
	network, name, mac string
	mtu                int32
	addresses          []netip.Addr
	nameservers        []string
	ready              bool
}

// linksOf returns the links that a pod has by a claim. complete is false if the status omits pods
// that use the claim, and this pod may be one of them.
func linksOf(claim *resourceapi.ResourceClaim, pod *corev1.Pod, driver string) (links []link, complete bool) {
	complete = true
	for i := range claim.Status.Devices {
		d := &claim.Status.Devices[i]
		if d.Driver != driver || d.Data == nil {
			continue
		}
		var kind metav1.TypeMeta
		if json.Unmarshal(d.Data.Raw, &kind) != nil || kind.APIVersion != v1alpha1.TypeMeta("").APIVersion {
			continue
		}
		switch kind.Kind {
		case v1alpha1.NetworkStatusKind:
			if l := linkOf(d.Data.Raw, pod); l != nil {
				links = append(links, *l)
			}
		case v1alpha1.NetworkStatusSummaryKind:
			l, listed := linkInSummary(d.Data.Raw, pod)
			if l != nil {
				links = append(links, *l)
			}
			complete = complete && listed
		}
	}
	return links, complete
}

func nameOf(pod *corev1.Pod) string { return pod.Namespace + "/" + pod.Name }

// linkOf returns the link of a NetworkStatus if it is the pod's, or nil.
func linkOf(raw []byte, pod *corev1.Pod) *link {
	var status v1alpha1.NetworkStatus
	if json.Unmarshal(raw, &status) != nil || status.Pod != nameOf(pod) || len(status.Interfaces) == 0 {
		return nil
	}
	l := &link{network: status.Network, name: status.Interfaces[0].Name, mac: status.Interfaces[0].MAC,
		mtu: status.Interfaces[0].MTU, ready: !status.NotReady}
	if status.DNS != nil {
		l.nameservers = status.DNS.Nameservers
	}
	for _, ip := range status.IPs {
		l.add(ip.Address)
	}
	return l
}

// linkInSummary returns the link of a pod in a NetworkStatusSummary, or nil. listed is false if the summary omits
// links, and the pod's link may be one of them.
func linkInSummary(raw []byte, pod *corev1.Pod) (l *link, listed bool) {
	var summary v1alpha1.NetworkStatusSummary
	if json.Unmarshal(raw, &summary) != nil {
		return nil, false
	}
	for _, p := range summary.First {
		if p.Pod != nameOf(pod) {
			continue
		}
		l = &link{network: summary.Network, name: p.Interface, mac: p.MAC, ready: !p.NotReady}
		for _, ip := range p.IPs {
			l.add(ip)
		}
		return l, true
	}
	return nil, !summary.Truncated
}

func (l *link) add(text string) {
	if p, err := netip.ParsePrefix(text); err == nil {
		l.addresses = append(l.addresses, p.Addr())
	}
}

// isReservedFor reports whether a claim is reserved for a pod, or for an object other than a pod.
func isReservedFor(claim *resourceapi.ResourceClaim, uid types.UID) bool {
	for _, r := range claim.Status.ReservedFor {
		if r.UID == uid || !claimref.IsPodEntry(r) && !claims.IsTerminalPodEntry(r) {
			return true
		}
	}
	return false
}
