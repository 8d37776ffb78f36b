// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"strings"
	"testing"
)

func TestAddressPools_Handle(t *testing.T) {
	pool := func(metadata, fields string) string {
		return `{metadata: {name: office` + metadata + `}, spec: {network: storage, subnet: 10.20.0.0/16` + fields + `}}`
	}
	valid, invalid := pool("", ""), pool("", ", ranges: [10.20.12.0/33]")
	for _, tc := range []struct{ name, old, now, want string }{
		{"create a valid pool", "", pool("", ", ranges: [10.20.1.0/24], nameservers: [10.20.0.2]"), ""},
		{"prefix length", "", invalid,
			`spec.ranges[0]: Invalid value: "10.20.12.0/33": must be a network, an address, or FIRST-LAST in subnet`,
		},
		{"range outside the subnet", valid, pool("", ", ranges: [10.21.0.0/24]"),
			`spec.ranges[0]: Invalid value: "10.21.0.0/24": must be`},
		{"nameserver in the ranges", valid, pool("", ", nameservers: [10.20.0.2]"),
			`spec.nameservers[0]: Invalid value: "10.20.0.2": the pool may assign the address to a pod`},
		{"reserved network address", valid, pool("", ", reserved: [10.20.0.0]"),
			`spec.reserved[0]: Invalid value: "10.20.0.0"`},
		{"route of the other IP family", valid, pool("", ", routes: ['fd00::/64']"),
			`spec.routes[0]: Invalid value: "fd00::/64": must be of the same IP family as subnet 10.20.0.0/16`},
		{"correct an invalid pool", invalid, valid, ""},
		{"another label of an invalid pool", invalid, pool(", labels: {a: b}", ", ranges: [10.20.12.0/33]"), ""},
		{"deletion of an invalid pool", invalid,
			pool(`, deletionTimestamp: "2026-01-01T00:00:00Z"`, ", ranges: [10.20.12.0/33, x]"), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := (&AddressPools{}).Handle(t.Context(), review(t, tc.old, tc.now))
			if r.Allowed != (tc.want == "") || !r.Allowed && !strings.Contains(r.Result.Message, tc.want) {
				t.Errorf("response %+v, want denial %q", r, tc.want)
			}
		})
	}
}
