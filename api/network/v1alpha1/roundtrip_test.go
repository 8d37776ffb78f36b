// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"testing"

	"github.com/dra-shared/dra-driver-shared/api/internal/roundtrip"
)

func TestRoundTrip(t *testing.T) { roundtrip.Test(t, AddToScheme) }
