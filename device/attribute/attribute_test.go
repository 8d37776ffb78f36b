// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attribute

import (
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
)

func TestLabel(t *testing.T) {
	for name, want := range map[string]string{"nic0": "nic0", "0000:3b:00.0": "0000-3b-00-0", "eth0.100": "eth0-100"} {
		if got := Label(name); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}

func TestLabel_returnsValidAndDistinctLabels(t *testing.T) {
	seen := map[string]string{}
	for _, name := range []string{"a-b", "a_b", "a b", "A-B", "-a-b-", "_", "__"} {
		got := Label(name)
		if len(validation.IsDNS1123Label(got)) > 0 {
			t.Errorf("%q: %q is not a DNS label", name, got)
		}
		if other, taken := seen[got]; taken {
			t.Errorf("%q and %q both become %q", name, other, got)
		}
		seen[got] = name
	}
}

func TestPCI(t *testing.T) {
	sysfs := fstest.MapFS{
		"bus/pci/devices/0000:00:03.0": {
			Mode: fs.ModeSymlink | 0o777,
			Data: []byte("../../../devices/pci0000:00/0000:00:03.0"),
		},
		"devices/pci0000:00/0000:00:03.0/numa_node": {Data: []byte("1\n")},
	}
	got := PCI(sysfs, "0000:00:03.0")
	want := Map{
		"resource.kubernetes.io/pciBusID": Text("0000:00:03.0"),
		"resource.kubernetes.io/pcieRoot": Text("pci0000:00"),
		"resource.kubernetes.io/numaNode": {IntValue: ptr.To[int64](1)},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := PCI(sysfs, ""); len(got) > 0 {
		t.Errorf("a device that is not on PCI: %v", got)
	}
}

func TestGranted(t *testing.T) {
	attributes := Granted(
		map[string]resource.Quantity{"memory": resource.MustParse("1Gi"), "compute": resource.MustParse("500m")},
	)
	if *attributes["grantedMemory"].IntValue != 1<<30 || *attributes["grantedCompute"].StringValue != "0.5" {
		t.Errorf("attributes: %v", attributes)
	}
}
