// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// RegisterCounter returns a counter with these labels. Several controllers of one process, as in
// tests, share it.
func RegisterCounter(
	registry prometheus.Registerer, options prometheus.CounterOpts, labels ...string,
) (*prometheus.CounterVec, error) {
	counter := prometheus.NewCounterVec(options, labels)
	err := registry.Register(counter)
	var registered prometheus.AlreadyRegisteredError
	if errors.As(err, &registered) {
		if existing, ok := registered.ExistingCollector.(*prometheus.CounterVec); ok {
			return existing, nil
		}
	}
	return counter, err
}
