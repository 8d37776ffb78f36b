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

func TestTemplateVariables(t *testing.T) {
	c := config.Capacities{Capacity: quantities(map[string]string{"memory": "141Gi", "compute": "3"})}
	want := map[string]string{
		"memory": "2684354560", "memory.Ki": "2621440", "memory.Mi": "2560", "memory.Gi": "2", "memory.percent": "1",
		"compute": "1", "compute.Ki": "0", "compute.Mi": "0", "compute.Gi": "0", "compute.percent": "33",
	}
	if diff := cmp.Diff(want, TemplateVariables(c, quantities(map[string]string{"memory": "2560Mi",
		"compute": "1"}))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := TemplateVariables(c, nil); len(got) != 0 {
		t.Errorf("without a grant: %v", got)
	}
}

func TestGrantVariables(t *testing.T) {
	want := map[string]string{"DRA_SHARED_GPU_FAST_MEMORY_BYTES": "1073741824", "DRA_SHARED_GPU_FAST_COMPUTE": "0.5"}
	if diff := cmp.Diff(want, GrantVariables("gpu/fast", quantities(map[string]string{"memory": "1Gi",
		"compute": "500m"}))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
