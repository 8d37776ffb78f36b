// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const acceleratorHeader = `"apiVersion": "dra-shared.dev/v1alpha1", "kind": "AcceleratorShare"`

// checkAccelerator decodes and validates parameters as the plugin does.
func checkAccelerator(parameters string) error {
	a, err := DecodeAs[*AcceleratorShare]([]byte(parameters))
	if err != nil {
		return err
	}
	return a.ValidateFor(AllowedAccelerator{
		Accelerator: "npu", DeviceNodes: []string{"/dev/dri/card*"}, Environment: []string{"CUDA_MPS_PIPE_DIRECTORY"},
	}).ToAggregate()
}

func TestAcceleratorShare_valid(t *testing.T) {
	for _, fields := range []string{
		``,
		`, "environment": {"MODE": "fast", "_x": ""}`,
		`, "deviceNodes": ["/dev/dri/card0", "/dev/dri/card1"]`,
	} {
		if err := checkAccelerator(`{` + acceleratorHeader + fields + `}`); err != nil {
			t.Errorf("{%s}: %v", fields, err)
		}
	}
}

func TestAcceleratorShare_invalid(t *testing.T) {
	longValue := strings.Repeat("x", maxValueLength+1)
	tooLong := invalidCase{
		Name: "value that is too long", Parameters: `{` + acceleratorHeader + `, "environment": {"A": "` + longValue + `"}}`,
		Want: `environment[A]: Too long: may not be more than 4096`,
	}
	for _, tc := range append(invalidCases(t, "AcceleratorShare"), tooLong) {
		t.Run(tc.Name, func(t *testing.T) {
			if err := checkAccelerator(tc.Parameters); err == nil || !strings.Contains(err.Error(), tc.Want) {
				t.Errorf("got  %v\nwant %s", err, tc.Want)
			}
		})
	}
}

func TestMergeAcceleratorShares(t *testing.T) {
	class := &AcceleratorShare{Environment: map[string]string{"A": "class", "B": "class"}, DeviceNodes: []string{"/dev/a"}}
	claim := &AcceleratorShare{Environment: map[string]string{"B": "claim"}, DeviceNodes: []string{"/dev/b", "/dev/a"}}
	want := &AcceleratorShare{
		TypeMeta:    TypeMeta(AcceleratorShareKind),
		Environment: map[string]string{"A": "class", "B": "claim"}, DeviceNodes: []string{"/dev/a", "/dev/b"},
	}
	if diff := cmp.Diff(want, MergeAcceleratorShares(class, claim)); diff != "" {
		t.Errorf("merged (-want +got):\n%s", diff)
	}
	if class.Environment["B"] != "class" {
		t.Error("merging changed the parameters of the class")
	}
}
