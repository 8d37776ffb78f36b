// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/dhcp"
)

var (
	descBytes = prometheus.NewDesc(
		"dra_shared_device_bytes_total",
		"Bytes that passed through the queues of a device, by direction (send, receive), as the kernel counts them.",
		[]string{"device", "direction"},
		nil,
	)
	descMulticast = prometheus.NewDesc(
		"dra_shared_device_multicast_bytes_total",
		"Bytes of multicast and broadcast frames that arrived for shares of a device or for the node, except ARP and "+
			"neighbor discovery. The field multicast of the network limits their rate.",
		[]string{"device"},
		nil,
	)
	descMulticastDropped = prometheus.NewDesc(
		"dra_shared_device_multicast_dropped_frames_total",
		"Multicast and broadcast frames for shares of a device or for the node that exceeded the field multicast of the "+
			"network.",
		[]string{"device"},
		nil,
	)
	descShareBytes = prometheus.NewDesc(
		"dra_shared_share_bytes_total",
		"Bytes that passed through the queues of a claim's shares of a device, by direction (send, receive), as the kernel "+
			"counts them. What a share sends to other shares of the device counts as well.",
		[]string{"device", "namespace", "claim", "direction"},
		nil,
	)
	descGuarded = prometheus.NewDesc(
		"dra_shared_device_guarded",
		"1 while the source MAC addresses of frames to the pods on a device are replaced, because a pod has, recently "+
			"had, or may have a link that receives other pods' frames, 0 otherwise.",
		[]string{"device"},
		nil,
	)
	descRefused = prometheus.NewDesc(
		"dra_shared_refused_frames_total",
		"Frames to or from a pod that violate the rules of its share, by reason and by action: dropped, or passed because "+
			"the network only audits them. namespace and claim are empty if the share of a frame is not known.",
		[]string{"device", "namespace", "claim", "reason", "action"},
		nil,
	)
	descLeases = prometheus.NewDesc(
		"dra_shared_leases",
		"Links of pods that lease their address from a DHCP server, by the state of the lease: Bound; Renewing and "+
			"Rebinding, while no server has answered since it should have been renewed; Expired, without an address.",
		[]string{"state"},
		nil,
	)
	descCheck = prometheus.NewDesc(
		"dra_shared_kernel_check",
		"1 if the node's kernel passed a check, 0 if not: NetnsCookie, NetnsCookieOfSocket, and MAC are ways to identify "+
			"a frame's sender, and the plugin uses the first that passed; ForwardedByRoute recognizes frames that "+
			"the node forwards; ARPSender finds the sender of ARP; SenderLists replaces the address of a listed sender; "+
			"TCX runs the classifier before the programs of other owners.",
		[]string{"check"},
		nil,
	)
)

// DescribeMetrics implements driver.MetricsCollector.
func (k *Kind) DescribeMetrics(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descBytes, descMulticast, descMulticastDropped, descShareBytes, descGuarded, descRefused, descLeases, descCheck,
	} {
		descriptions <- d
	}
}

// CollectMetrics implements driver.MetricsCollector.
func (k *Kind) CollectMetrics(claims []*record.Claim, out chan<- prometheus.Metric) {
	collectTraffic(out, k.traffic(), claims)
	var devices []string
	for _, d := range k.sharedDevices() {
		devices = append(devices, d.name)
		guarded := asNumber(k.hidden.isGuarded(d.nic.Name))
		out <- prometheus.MustNewConstMetric(descGuarded, prometheus.GaugeValue, guarded, d.name)
	}
	collectRefusals(out, k.refusals, devices, claims)
	collectLeases(out, k.leases.Load())
	collectKernelChecks(out, checks(k.node.Trials(), k.node.ClassifierKey()))
}

// leaseStates counts leases by their state.
type leaseStates map[dhcp.State]int

func collectLeases(out chan<- prometheus.Metric, leases *leaseStates) {
	if leases == nil {
		return
	}
	for state, name := range map[dhcp.State]string{
		dhcp.Bound: "Bound", dhcp.Renewing: "Renewing", dhcp.Rebinding: "Rebinding", dhcp.Expired: "Expired",
	} {
		out <- prometheus.MustNewConstMetric(descLeases, prometheus.GaugeValue, float64((*leases)[state]), name)
	}
}

func count(out chan<- prometheus.Metric, d *prometheus.Desc, value uint64, labels ...string) {
	out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(value), labels...)
}

// deviceTraffic is the traffic of a device and of its shares, by their class.
type deviceTraffic struct {
	device string
	netdev.Traffic
	shares           map[uint16]netdev.ShareTraffic
	multicastDropped uint64 // frames
}

// traffic returns the traffic of the devices with NICs that the kernel counts.
func (k *Kind) traffic() (all []deviceTraffic) {
	for _, d := range k.sharedDevices() {
		traffic, err := k.node.Traffic(d.nic.Index)
		shares, dropped, sharesErr := k.node.ShareTraffic(d.nic.Index)
		if err != nil || sharesErr != nil {
			continue // the NIC is not enforced, or no longer exists: the kernel counts nothing
		}
		all = append(all, deviceTraffic{d.name, traffic, shares, dropped})
	}
	return all
}

// shareBytes are the labels of dra_shared_share_bytes_total. Several shares may have the same labels: one claim's
// shares on one device, and shares of claims that had the same name.
type shareBytes struct{ device, namespace, claim, direction string }

func collectTraffic(out chan<- prometheus.Metric, all []deviceTraffic, claims []*record.Claim) {
	shares := map[string]map[uint16]netdev.ShareTraffic{}
	for _, t := range all {
		count(out, descBytes, t.Sent, t.device, "send")
		count(out, descBytes, t.Received, t.device, "receive")
		count(out, descMulticast, t.Multicast, t.device)
		count(out, descMulticastDropped, t.multicastDropped, t.device)
		shares[t.device] = t.shares
	}
	sums := map[shareBytes]uint64{}
	for _, c := range claims {
		for _, s := range c.SharesOf(Name) {
			if counted, ok := shares[s.Device][s.Number]; ok {
				sums[shareBytes{s.Device, c.Namespace, c.Name, "send"}] += counted.Sent
				sums[shareBytes{s.Device, c.Namespace, c.Name, "receive"}] += counted.Received
			}
		}
	}
	for labels, bytes := range sums {
		count(out, descShareBytes, bytes, labels.device, labels.namespace, labels.claim, labels.direction)
	}
}

// refusals counts the frames that the kernel has refused from the shares with a class on a device. With class 0, it
// counts frames from unknown shares.
func (k *Kind) refusals(device string, class uint16) classify.Refusals {
	d, err := k.device(device)
	if err != nil || d.absent {
		return classify.Refusals{}
	}
	refused, err := k.node.Refusals(d.nic.Index, class)
	if err != nil {
		return classify.Refusals{} // the NIC no longer exists: the kernel counts nothing
	}
	return refused
}

// refusedFrames are the labels of dra_shared_refused_frames_total. Several shares may have the
// same; see shareBytes.
type refusedFrames struct{ device, namespace, claim, reason, action string }

func collectRefusals(
	out chan<- prometheus.Metric,
	refusals func(device string, class uint16) classify.Refusals,
	devices []string,
	claims []*record.Claim,
) {
	sums := map[refusedFrames]uint64{}
	add := func(device string, class uint16, namespace, claim string) {
		refused := refusals(device, class)
		for _, reason := range classify.Reasons() {
			sums[refusedFrames{device, namespace, claim, string(reason), v1alpha1.RefusedDropped}] += refused.Dropped[reason]
			sums[refusedFrames{device, namespace, claim, string(reason), v1alpha1.RefusedPassed}] += refused.Passed[reason]
		}
	}
	for _, device := range devices {
		add(device, 0, "", "")
	}
	for _, c := range claims {
		for _, s := range c.SharesOf(Name) {
			if s.Number != 0 {
				add(s.Device, s.Number, c.Namespace, c.Name)
			}
		}
	}
	for labels, frames := range sums {
		if frames > 0 {
			count(out, descRefused, frames, labels.device, labels.namespace, labels.claim, labels.reason, labels.action)
		}
	}
}

func collectKernelChecks(out chan<- prometheus.Metric, checks []check) {
	for _, c := range checks {
		out <- prometheus.MustNewConstMetric(descCheck, prometheus.GaugeValue, asNumber(c.passed), c.name)
	}
}

func asNumber(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
