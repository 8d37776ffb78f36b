// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// collect is a collector that calls a function.
type collect func(out chan<- prometheus.Metric)

func (collect) Describe(descriptions chan<- *prometheus.Desc) {
	(*Kind)(nil).DescribeMetrics(descriptions)
}
func (c collect) Collect(out chan<- prometheus.Metric) { c(out) }

func TestCollectTraffic(t *testing.T) {
	share := func(kind string, class uint16) record.Share {
		return record.Share{Kind: kind, Device: "nic0", Number: class}
	}
	claims := []*record.Claim{
		{Namespace: "default", Name: "twice", Shares: []record.Share{share("nic", 1), share("nic", 2)}},
		{Namespace: "default", Name: "other", Shares: []record.Share{share("accelerator", 3), share("nic", 9)}},
	}
	devices := []deviceTraffic{{
		"nic0", netdev.Traffic{Sent: 100, Received: 200, Multicast: 7},
		map[uint16]netdev.ShareTraffic{1: {Sent: 10, Received: 20}, 2: {Sent: 1, Received: 2}, 3: {Sent: 3, Received: 4}},
		5,
	}}
	want := `# TYPE dra_shared_device_bytes_total counter
dra_shared_device_bytes_total{device="nic0",direction="receive"} 200
dra_shared_device_bytes_total{device="nic0",direction="send"} 100
# TYPE dra_shared_device_multicast_bytes_total counter
dra_shared_device_multicast_bytes_total{device="nic0"} 7
# TYPE dra_shared_device_multicast_dropped_frames_total counter
dra_shared_device_multicast_dropped_frames_total{device="nic0"} 5
# TYPE dra_shared_share_bytes_total counter
dra_shared_share_bytes_total{claim="twice",device="nic0",direction="receive",namespace="default"} 22
dra_shared_share_bytes_total{claim="twice",device="nic0",direction="send",namespace="default"} 11
`
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(collect(func(out chan<- prometheus.Metric) { collectTraffic(out, devices, claims) }))
	if diff := cmp.Diff(want, gather(t, registry)); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

// gather returns the metrics of a registry as text, without their help.
func gather(t *testing.T, registry *prometheus.Registry) string {
	t.Helper()
	got, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, family := range got {
		family.Help = nil
		if _, err := expfmt.MetricFamilyToText(&text, family); err != nil {
			t.Fatal(err)
		}
	}
	return text.String()
}

// Shares with the same labels must not appear as two series, which no scrape accepts.
func TestCollectRefusals(t *testing.T) {
	share := func(class uint16) record.Share { return record.Share{Kind: "nic", Device: "nic0", Number: class} }
	claims := []*record.Claim{
		{Namespace: "default", Name: "twice", Shares: []record.Share{share(1), share(2)}},
		{Namespace: "default", Name: "again", Shares: []record.Share{share(3)}},
		{Namespace: "default", Name: "again", Shares: []record.Share{share(4)}},
	}
	want := "# HELP dra_shared_refused_frames_total Frames to or from a pod that violate the rules of its share, by " +
		"reason and by action: dropped, or passed because the network only audits them. namespace and claim are " +
		"empty if the share of a frame is not known." + `
# TYPE dra_shared_refused_frames_total counter
dra_shared_refused_frames_total{action="dropped",claim="",device="nic0",namespace="",reason="SourceMAC"} 10
dra_shared_refused_frames_total{action="dropped",claim="again",device="nic0",namespace="default",reason="SourceMAC"} 27
dra_shared_refused_frames_total{action="dropped",claim="twice",device="nic0",namespace="default",reason="SourceMAC"} 23
`
	refused := func(_ string, class uint16) classify.Refusals {
		return classify.Refusals{Dropped: map[classify.Reason]uint64{"SourceMAC": 10 + uint64(class)}}
	}
	collector := collect(func(out chan<- prometheus.Metric) { collectRefusals(out, refused, []string{"nic0"}, claims) })
	if err := testutil.CollectAndCompare(collector, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

func TestCollectLeases(t *testing.T) {
	states := leaseStates{}
	for _, lease := range []attach.Lease{
		{Address: "10.20.0.5/16", Renew: 2000, Rebind: 3000, Expires: 4000},
		{Address: "10.20.0.6/16", Renew: 500, Rebind: 3000, Expires: 4000},
		{Address: "10.20.0.7/16", Renew: 500, Rebind: 600, Expires: 4000},
		{Address: "10.20.0.8/16"}, // without end
		{Last: "10.20.0.9/16"},
	} {
		states[stateOf(attach.Link{DHCP: &lease}, time.Second)]++
	}
	want := `# TYPE dra_shared_leases gauge
dra_shared_leases{state="Bound"} 2
dra_shared_leases{state="Expired"} 1
dra_shared_leases{state="Rebinding"} 1
dra_shared_leases{state="Renewing"} 1
`
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(collect(func(out chan<- prometheus.Metric) { collectLeases(out, &states) }))
	if diff := cmp.Diff(want, gather(t, registry)); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

// The packages below netdev do not import the API, which has the documented constants.
func TestMetrics_valuesOfLabelsAreDocumented(t *testing.T) {
	reasons := []classify.Reason{
		v1alpha1.RefusalSourceMAC, v1alpha1.RefusalSourceAddress, v1alpha1.RefusalARP, v1alpha1.RefusalNeighborDiscovery,
		v1alpha1.RefusalRouterAdvertisement, v1alpha1.RefusalDHCPServer, v1alpha1.RefusalVLAN, v1alpha1.RefusalForwarded,
		v1alpha1.RefusalNeighborRate, v1alpha1.RefusalBlocked, v1alpha1.RefusalProtocol, v1alpha1.RefusalReceiver,
		v1alpha1.RefusalIsolation, v1alpha1.RefusalMulticastRouter,
	}
	if diff := cmp.Diff(reasons, classify.Reasons()); diff != "" {
		t.Errorf("reasons to refuse a frame (-documented +classify):\n%s", diff)
	}
	keys := []classify.Key{
		v1alpha1.KernelCheckNetnsCookie, v1alpha1.KernelCheckNetnsCookieOfSocket, v1alpha1.KernelCheckMAC,
	}
	if diff := cmp.Diff(keys, classify.Keys()); diff != "" {
		t.Errorf("keys that identify senders (-documented +classify):\n%s", diff)
	}
}
