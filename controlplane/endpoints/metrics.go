// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package endpoints

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dra-shared/dra-driver-shared/controlplane/metrics"
)

// Values of the label object of the metric of writes.
const (
	objectSlice = "endpointslice"
	objectPod   = "pod"
)

// NewWrites returns the metric dra_shared_endpoint_writes_total, which counts the writes of both
// reconcilers.
func NewWrites(registry prometheus.Registerer) (*prometheus.CounterVec, error) {
	return metrics.RegisterCounter(registry, prometheus.CounterOpts{
		Name: "dra_shared_endpoint_writes_total",
		Help: "Writes of EndpointSlices, and of the annotation network-status of pods, by object.",
	}, "object")
}
