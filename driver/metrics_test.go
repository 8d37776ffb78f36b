// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
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
