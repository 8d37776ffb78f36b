// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package containeredits

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
)

func quantities(values map[string]string) map[string]resource.Quantity {
	parsed := map[string]resource.Quantity{}
	for name, value := range values {
		parsed[name] = resource.MustParse(value)
	}
	return parsed
}

func TestShareVariables(t *testing.T) {
	share := Share{Name: "1f3c-gpu", Request: "gpu/fast", Device: "pci-0000-3b-00-0", Node: "n1"}
	c := config.Capacities{Capacity: quantities(map[string]string{"memory": "141Gi", "compute": "3"})}
	want := map[string]string{
		"share": "1f3c-gpu", "request": "gpu/fast", "device": "pci-0000-3b-00-0", "node": "n1",
		"memory": "2684354560", "memory.Ki": "2621440", "memory.Mi": "2560", "memory.Gi": "2", "memory.percent": "1",
		"compute": "1", "compute.Ki": "0", "compute.Mi": "0", "compute.Gi": "0", "compute.percent": "33",
	}
	grant := quantities(map[string]string{"memory": "2560Mi", "compute": "1"})
	if diff := cmp.Diff(want, ShareVariables(share, c, grant)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	want = map[string]string{"share": "1f3c-gpu", "request": "gpu/fast", "device": "pci-0000-3b-00-0", "node": "n1"}
	if diff := cmp.Diff(want, ShareVariables(share, c, nil)); diff != "" {
		t.Errorf("without a grant (-want +got):\n%s", diff)
	}
}

func TestGrantVariables(t *testing.T) {
	want := map[string]string{"DRA_SHARED_GPU_FAST_MEMORY_BYTES": "1073741824", "DRA_SHARED_GPU_FAST_COMPUTE": "0.5"}
	if diff := cmp.Diff(want, GrantVariables("gpu/fast", quantities(map[string]string{"memory": "1Gi",
		"compute": "500m"}))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
