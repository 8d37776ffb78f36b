// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package metricslint

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestRegistry_problems(t *testing.T) {
	for _, test := range []struct {
		name, metric, help string
		labels             []string
		want               []string
	}{
		{"correct", "dra_shared_sent_bytes", "Bytes.", []string{"device"}, nil},
		{"prefix", "shared_sent_bytes", "Bytes.", nil,
			[]string{"metric shared_sent_bytes: the name does not start with dra_shared_"}},
		{"derived unit", "dra_shared_sent_bits", "Bits.", nil,
			[]string{"metric dra_shared_sent_bits: bits is not a base unit of Prometheus"}},
		{"help", "dra_shared_shares", "shares", nil,
			[]string{`metric dra_shared_shares: the help text "shares" is not a sentence`}},
		{"label in camel case", "dra_shared_shares", "Shares.", []string{"deviceName"},
			[]string{`metric dra_shared_shares: label "deviceName" is not in snake case`}},
		{"label without a meaning", "dra_shared_shares", "Shares.", []string{"device", "type"},
			[]string{`metric dra_shared_shares: label "type" does not say what its values are`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			registry := NewRegistry()
			registry.MustRegister(prometheus.NewGaugeVec(prometheus.GaugeOpts{
				Name: test.metric, Help: test.help,
			}, test.labels))
			problems, err := registry.problems(nil)
			if err != nil || !slices.Equal(problems, test.want) {
				t.Errorf("problems: got %q, error %v, want %q", problems, err, test.want)
			}
		})
	}
}

func TestRegistry_problems_metricWithValue(t *testing.T) {
	registry := NewRegistry()
	total := prometheus.NewGauge(prometheus.GaugeOpts{Name: "dra_shared_sent_total", Help: "Bytes."})
	registry.MustRegister(total)
	problems, err := registry.problems([]string{"dra_shared_sent_total", "dra_shared_missing"})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"metric dra_shared_missing has no value",
		`metric dra_shared_sent_total: non-counter metrics should not have "_total" suffix`,
	}
	if !slices.Equal(problems, want) {
		t.Errorf("problems: got %q, want %q", problems, want)
	}
}
