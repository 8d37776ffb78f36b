// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"testing"

	"github.com/dra-shared/dra-driver-shared/test/metricslint"
)

// TestMetrics_exposition lints the metrics of a plugin with a prepared claim.
func TestMetrics_exposition(t *testing.T) {
	p := newPlugin(t)
	p.stop()
	registry := metricslint.NewRegistry()
	p.options.Metrics = registry
	p.start()
	claim := p.claim("metrics", "100M", "")
	p.mustPrepare(claim)
	registry.Check(t, "dra_shared_operation_duration_seconds", "dra_shared_device_shares")
	p.unprepare(claim)
}
