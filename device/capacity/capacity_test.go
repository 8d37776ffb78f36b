// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
)

func TestDecimal(t *testing.T) {
	for text, want := range map[string]string{
		"10Gi": "10737418240", "0": "0", "100M": "100000000", "250m": "0.25",
		"1500m": "1.5", "0.5Gi": "536870912", "1e3": "1000", "100": "100",
	} {
		if got := Decimal(resource.MustParse(text)); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}
