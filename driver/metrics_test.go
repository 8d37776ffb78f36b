// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// refusingKind refuses frames of each share.
type refusingKind struct{ Kind }

func (refusingKind) Name() string                  { return "nic" }
func (refusingKind) Devices() []resourceapi.Device { return []resourceapi.Device{{Name: "nic0"}} }
func (refusingKind) Refusals(_ string, class uint16) []Refusal {
	return []Refusal{{Reason: "MAC", Dropped: 10 + uint64(class)}}
}

// refusals collects the refused frames of claims.
type refusals []*record.Claim

func (refusals) Describe(descriptions chan<- *prometheus.Desc) { descriptions <- descRefused }
func (r refusals) Collect(out chan<- prometheus.Metric) {
	collectRefusals(out, refusingKind{}, refusingKind{}, r)
}

// traffic collects the bytes of claims.
type traffic []*record.Claim

func (traffic) Describe(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descBytes, descMulticast, descShareBytes} {
		descriptions <- d
	}
}
func (c traffic) Collect(out chan<- prometheus.Metric) {
	collectStats(out, []DeviceStats{{Device: "nic0", SentBytes: 100, ReceivedBytes: 200, MulticastBytes: 7,
		Shares: map[uint16]ShareStats{1: {10, 20}, 2: {1, 2}, 3: {3, 4}}}}, "nic", c)
}

func TestCollectStats(t *testing.T) {
	share := func(kind string, class uint16) record.Share {
		return record.Share{Kind: kind, Device: "nic0", Class: class}
	}
	claims := traffic{
		{Namespace: "default", Name: "twice", Shares: []record.Share{share("nic", 1), share("nic", 2)}},
		{Namespace: "default", Name: "other", Shares: []record.Share{share("accelerator", 3), share("nic", 9)}},
	}
	want := `# TYPE dra_shared_device_bytes_total counter
dra_shared_device_bytes_total{device="nic0",direction="receive"} 200
dra_shared_device_bytes_total{device="nic0",direction="send"} 100
# TYPE dra_shared_device_multicast_bytes_total counter
dra_shared_device_multicast_bytes_total{device="nic0"} 7
# TYPE dra_shared_share_bytes_total counter
dra_shared_share_bytes_total{claim="twice",device="nic0",direction="receive",namespace="default"} 22
dra_shared_share_bytes_total{claim="twice",device="nic0",direction="send",namespace="default"} 11
`
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(claims)
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
	if diff := cmp.Diff(want, text.String()); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

// Shares with the same labels must not appear as two series, which no scrape accepts.
func TestCollectRefusals(t *testing.T) {
	share := func(class uint16) record.Share { return record.Share{Kind: "nic", Device: "nic0", Class: class} }
	claims := refusals{
		{Namespace: "default", Name: "twice", Shares: []record.Share{share(1), share(2)}},
		{Namespace: "default", Name: "again", Shares: []record.Share{share(3)}},
		{Namespace: "default", Name: "again", Shares: []record.Share{share(4)}},
	}
	want := "# HELP dra_shared_refused_frames_total Frames to or from a pod that violate the rules of its share, by " +
		"reason and by action: dropped, or passed because the network only audits them. namespace and claim are " +
		"empty if the share of a frame is not known." + `
# TYPE dra_shared_refused_frames_total counter
dra_shared_refused_frames_total{action="dropped",claim="",device="nic0",namespace="",reason="MAC"} 10
dra_shared_refused_frames_total{action="dropped",claim="again",device="nic0",namespace="default",reason="MAC"} 27
dra_shared_refused_frames_total{action="dropped",claim="twice",device="nic0",namespace="default",reason="MAC"} 23
`
	if err := testutil.CollectAndCompare(claims, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}
