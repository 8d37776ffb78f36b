package v1alpha1

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const acceleratorHeader = `"apiVersion": "dra-shared.dev/v1alpha1", "kind": "AcceleratorShare"`

func checkAccelerator(fields string) error {
	a, err := DecodeAs[*AcceleratorShare]([]byte(`{` + acceleratorHeader + fields + `}`))
	if err != nil {
		return err
	}
	return a.ValidateFor(AllowedAccelerator{Accelerator: "npu", DeviceNodes: []string{"/dev/dri/card*"}, Environment: []string{"CUDA_MPS_PIPE_DIRECTORY"}}).ToAggregate()
}

func TestGoodSharesOfAcceleratorsAreAccepted(t *testing.T) {
	for _, fields := range []string{
		``,
		`, "environment": {"MODE": "fast", "_x": ""}`,
		`, "deviceNodes": ["/dev/dri/card0", "/dev/dri/card1"]`,
	} {
		if err := checkAccelerator(fields); err != nil {
			t.Errorf("{%s}: %v", fields, err)
		}
	}
}

func TestWrongSharesOfAcceleratorsAreRefusedByFieldValueAndRemedy(t *testing.T) {
	for _, tc := range []struct{ name, fields, want string }{
		{"unknown field", `, "env": {}`, `unknown field "env"; there are the fields environment, deviceNodes`},
		{"a number for a text", `, "environment": {"A": 5}`, `environment: got a number, want a string: does the value lack quotes`},
		{"a text for a list", `, "deviceNodes": "/dev/x"`, `deviceNodes: got a string, want a []string`},
		{"no name for a variable", `, "environment": {"A=B": "x"}`, `environment[A=B]: Invalid value: "A=B": a valid C identifier`},
		{"a variable of the driver's", `, "environment": {"DRA_SHARED_X": "x"}`, `names that begin with DRA_SHARED_ are the driver's`},
		{"a variable of the administrator's", `, "environment": {"CUDA_MPS_PIPE_DIRECTORY": "/x"}`, `environment[CUDA_MPS_PIPE_DIRECTORY]: Forbidden: accelerator "npu" sets it for all its shares`},
		{"a value with NUL", `, "environment": {"A": "\u0000"}`, `must not contain NUL`},
		{"a long value", `, "environment": {"A": "` + strings.Repeat("x", maxValue+1) + `"}`, `environment[A]: Too long: may not be more than 4096`},
		{"a file", `, "deviceNodes": ["/etc/shadow"]`, `deviceNodes[0]: Invalid value: "/etc/shadow": must be the path of a device node below /dev`},
		{"a way out of /dev", `, "deviceNodes": ["/dev/../etc/shadow"]`, `must be the path of a device node below /dev`},
		{"a node that is not allowed", `, "deviceNodes": ["/dev/mem"]`, `deviceNodes[0]: Forbidden: /dev/mem: accelerator "npu" allows /dev/dri/card*`},
		{"a directory deeper than the pattern", `, "deviceNodes": ["/dev/dri/card/x"]`, `Forbidden`},
		{"a node twice", `, "deviceNodes": ["/dev/dri/card0", "/dev/dri/card0"]`, `deviceNodes[1]: Duplicate value`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := checkAccelerator(tc.fields); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got  %v\nwant %s", err, tc.want)
			}
		})
	}
}

func TestAClaimAddsToItsClass(t *testing.T) {
	class := &AcceleratorShare{Environment: map[string]string{"A": "class", "B": "class"}, DeviceNodes: []string{"/dev/a"}}
	claim := &AcceleratorShare{Environment: map[string]string{"B": "claim"}, DeviceNodes: []string{"/dev/b", "/dev/a"}}
	want := &AcceleratorShare{APIVersion: APIVersion, Kind: AcceleratorShareKind,
		Environment: map[string]string{"A": "class", "B": "claim"}, DeviceNodes: []string{"/dev/a", "/dev/b"}}
	if diff := cmp.Diff(want, MergeAcceleratorShares(class, claim)); diff != "" {
		t.Errorf("merged (-want +got):\n%s", diff)
	}
	if class.Environment["B"] != "class" {
		t.Error("merging changed the class")
	}
}
