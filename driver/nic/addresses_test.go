// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// The node keeps the address of a claim although the NIC of the claim has not been found, and its network is unknown.
func TestAddressesNamedBy_missingNIC(t *testing.T) {
	claim := &record.Claim{Shares: []record.Share{{
		Kind: Name, Device: "missing", Parameters: []byte(`{"addresses": ["10.20.1.1/16"]}`),
	}}}
	want := map[ipam.Address]bool{{IP: netip.MustParseAddr("10.20.1.1")}: true}
	got := newKind(t, Options{}).addressesNamedBy([]*record.Claim{claim})
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Errorf("claimed addresses (-want +got):\n%s", diff)
	}
}
