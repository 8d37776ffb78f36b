// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"strings"
	"testing"
)

func TestLoad_invalidFabric(t *testing.T) {
	for _, tc := range []struct{ name, fields, want string }{
		{"no node selector", `name: a`,
			`fabrics[0].nodeSelector: Required value: give the labels of the nodes that are connected to the fabric`},
		{"invalid label", `name: a, nodeSelector: {"x y": z}`, `fabrics[0].nodeSelector: Invalid value: "x y"`},
		{"reserved attribute", `name: a, nodeSelector: {x: z}, attributes: {kind: x}`,
			`fabrics[0].attributes[kind]: Forbidden: the driver sets it`},
		{"empty attribute", `name: a, nodeSelector: {x: z}, attributes: {b: ""}`,
			`fabrics[0].attributes[b]: Invalid value: "": must have 1 to 64 characters`},
		{"PCI variable", `name: a, nodeSelector: {x: z}, edits: {environment: {A: "${pciBusID}"}}`,
			`has the unknown variable "pciBusID"`},
		{"capacity named groups", `name: a, nodeSelector: {x: z}, capacity: {groups: 3}`,
			`fabrics[0].capacity[groups]: Forbidden: set the fabric's field groups instead`},
		{"negative groups", `name: a, nodeSelector: {x: z}, groups: -1`,
			`fabrics[0].groups: Invalid value: -1: must not be negative`},
		{"groups of an exclusive fabric", `name: a, nodeSelector: {x: z}, groups: 2, exclusive: true`,
			`fabrics[0].groups: Forbidden: only one claim can use an exclusive fabric`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Load([]byte(header + "fabrics: [{" + tc.fields + "}]"))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got  %v\nwant %s", err, tc.want)
			}
		})
	}
}
