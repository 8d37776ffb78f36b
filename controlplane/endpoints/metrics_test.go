// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package endpoints

import (
	"testing"

	"github.com/dra-shared/dra-driver-shared/test/metricslint"
)

func TestNewWrites_exposition(t *testing.T) {
	registry := metricslint.NewRegistry()
	writes, err := NewWrites(registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, object := range []string{objectSlice, objectPod} {
		writes.WithLabelValues(object).Inc()
	}
	registry.Check(t, "dra_shared_endpoint_writes_total")
}
