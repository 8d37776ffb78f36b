// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package fabric

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/device/fabricpool"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

func kind(t *testing.T) *Kind {
	t.Helper()
	c, err := config.Load([]byte(`
apiVersion: config.dra-shared.dev/v1alpha1
kind: DriverConfig
fabrics:
- name: rack1
  nodeSelector: {example.com/rack: "1"}
  attributes: {topology: 4x4}
  capacity: {channels: "16"}
  edits: {environment: {CHANNELS: "${channels}", WHERE: "${node}"}}
- {name: torus, nodeSelector: {example.com/torus: "1"}, exclusive: true}
`))
	if err != nil {
		t.Fatal(err)
	}
	return New(c, "n7")
}

func TestConfigure(t *testing.T) {
	k := kind(t)
	s := record.Share{
		Name:     "c-fabric-1",
		Kind:     Name,
		Request:  "fabric",
		Pool:     fabricpool.Name("rack1"),
		Device:   "rack1",
		ShareID:  "1",
		Capacity: map[string]resource.Quantity{"channels": resource.MustParse("4")},
	}
	var err error
	if s.Parameters, err = k.Configure(t.Context(), "default", s, nil); err != nil {
		t.Fatal(err)
	}
	got, err := k.Edits(s)
	want := cdi.Edits{
		Env: []string{"CHANNELS=4", "DRA_SHARED_FABRIC_CHANNELS=4", "DRA_SHARED_FABRIC_FABRIC=rack1",
			"DRA_SHARED_FABRIC_MEMBERSHIP=/var/run/dra-shared.dev/c-fabric-1/membership.json", "WHERE=n7"},
		Files: []cdi.File{{ContainerPath: "/var/run/dra-shared.dev/c-fabric-1/membership.json", Content: `{
  "kind": "FabricMembership",
  "apiVersion": "dra-shared.dev/v1alpha1",
  "fabric": "rack1",
  "attributes": {
    "topology": "4x4"
  },
  "node": "n7",
  "request": "fabric",
  "shareID": "1",
  "granted": {
    "channels": "4"
  }
}
`}},
	}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if _, err := k.Configure(t.Context(), "default", s, [][]byte{[]byte(`{}`)}); err == nil ||
		!strings.Contains(err.Error(), "a fabric takes no parameters") {
		t.Errorf("with parameters: %v", err)
	}
	s.Device = "rack9"
	_, err = k.Configure(t.Context(), "default", s, nil)
	if err == nil || !strings.Contains(err.Error(), "no fabric rack9: was it removed from config.fabrics") {
		t.Errorf("a fabric that is not configured: %v", err)
	}
}

func TestDevices(t *testing.T) {
	k := kind(t)
	if !k.HasPool("fabric/rack1") || k.HasPool("rack1") || k.HasPool("n7") {
		t.Error("a fabric's pool was not found, or another pool was taken for it")
	}
	devices := k.Devices()
	if len(devices) != 2 || devices[0].AllowMultipleAllocations == nil || devices[1].AllowMultipleAllocations != nil ||
		*devices[0].Attributes["topology"].StringValue != "4x4" {
		t.Errorf("%+v", devices)
	}
	whole := record.Share{Device: "torus"}
	if err := k.Admit(whole, nil); err != nil {
		t.Error(err)
	}
	if err := k.Admit(whole, []*record.Share{{Device: "torus", ShareID: "1"}}); err == nil {
		t.Error("the whole of a fabric that has shares was admitted")
	}
}
