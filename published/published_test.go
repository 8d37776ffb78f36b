package published

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
)

func quantities(values map[string]string) map[string]resource.Quantity {
	parsed := map[string]resource.Quantity{}
	for name, value := range values {
		parsed[name] = resource.MustParse(value)
	}
	return parsed
}

func TestNamesAreLabelsAndStayApart(t *testing.T) {
	for name, want := range map[string]string{"nic0": "nic0", "0000:3b:00.0": "0000-3b-00-0", "eth0.100": "eth0-100"} {
		if got := Label(name); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
	seen := map[string]string{}
	for _, name := range []string{"a-b", "a_b", "a b", "A-B", "-a-b-", "_", "__"} {
		got := Label(name)
		if len(validation.IsDNS1123Label(got)) > 0 {
			t.Errorf("%q: %q is no label", name, got)
		}
		if other, taken := seen[got]; taken {
			t.Errorf("%q and %q are both %q", name, other, got)
		}
		seen[got] = name
	}
}

func TestNumbersAsProgramsReadThem(t *testing.T) {
	for text, want := range map[string]string{
		"10Gi": "10737418240", "0": "0", "100M": "100000000", "250m": "0.25", "1500m": "1.5", "0.5Gi": "536870912", "1e3": "1000", "100": "100",
	} {
		if got := Decimal(resource.MustParse(text)); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

func TestVariablesOfAGrant(t *testing.T) {
	c := config.Capacities{Capacity: quantities(map[string]string{"memory": "141Gi", "compute": "3"})}
	want := map[string]string{
		"memory": "2684354560", "memory.Ki": "2621440", "memory.Mi": "2560", "memory.Gi": "2", "memory.percent": "1",
		"compute": "1", "compute.Ki": "0", "compute.Mi": "0", "compute.Gi": "0", "compute.percent": "33",
	}
	if diff := cmp.Diff(want, Variables(c, quantities(map[string]string{"memory": "2560Mi", "compute": "1"}))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := Variables(c, nil); len(got) != 0 {
		t.Errorf("of nothing: %v", got)
	}
	wantEnv := map[string]string{"DRA_SHARED_GPU_FAST_MEMORY_BYTES": "1073741824", "DRA_SHARED_GPU_FAST_COMPUTE": "0.5"}
	if diff := cmp.Diff(wantEnv, GrantVariables("gpu/fast", quantities(map[string]string{"memory": "1Gi", "compute": "500m"}))); diff != "" {
		t.Errorf("environment (-want +got):\n%s", diff)
	}
	attributes := GrantAttributes(quantities(map[string]string{"memory": "1Gi", "compute": "500m"}))
	if *attributes["grantedMemory"].IntValue != 1<<30 || *attributes["grantedCompute"].StringValue != "0.5" {
		t.Errorf("attributes: %v", attributes)
	}
}
