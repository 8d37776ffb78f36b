// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package endpoints

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// Values of the label object of the metric of writes.
const (
	objectSlice = "endpointslice"
	objectPod   = "pod"
)

// NewWrites returns the metric dra_shared_endpoint_writes_total, which counts the writes of both
// reconcilers. Several controllers of one process, as in tests, share it.
func NewWrites(registry prometheus.Registerer) (*prometheus.CounterVec, error) {
	writes := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "dra_shared_endpoint_writes_total",
		Help: "Writes of EndpointSlices, and of the annotation network-status of pods, by object.",
	}, []string{"object"})
	err := registry.Register(writes)
	var registered prometheus.AlreadyRegisteredError
	if errors.As(err, &registered) {
		if existing, ok := registered.ExistingCollector.(*prometheus.CounterVec); ok {
			return existing, nil
		}
	}
	return writes, err
}
