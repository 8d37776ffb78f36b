// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1beta1_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

func TestParseJobClaims(t *testing.T) {
	got, errs := scheduling.ParseJobClaims(`
- {name: net, resourceClaimTemplateName: share, containers: [worker]}
- name: data
  deletionPolicy: OnDeletion
  spec: {devices: {requests: [{name: disk, exactly: {deviceClassName: disk.example.com}}]}}
`, field.NewPath("a"))
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	disk := resourceapi.DeviceRequest{
		Name: "disk", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "disk.example.com"},
	}
	spec := resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{disk}}}
	want := []scheduling.ListedClaim{
		{
			Name: "net", ResourceClaimTemplateName: ptr.To("share"), Containers: []string{"worker"},
			DeletionPolicy: scheduling.DeleteOnCompletion,
		},
		{Name: "data", Spec: &spec, DeletionPolicy: scheduling.DeleteOnDeletion},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if template := got[1].Template(); template == nil || cmp.Diff(spec, template.Spec.Spec) != "" {
		t.Errorf("got template %v, want the spec of the entry", template)
	}
	if template := got[0].Template(); template != nil {
		t.Errorf("got template %v of an entry that names one", template)
	}
}

func TestParseJobClaims_errorsNameEntryFieldValueAndRemedy(t *testing.T) {
	for value, want := range map[string]string{
		`net`:           "a: Invalid value: \"net\": must be a YAML list of entries",
		`[`:             "a: Invalid value: \"[\": must be a YAML list:",
		`[]`:            "a: Required value: must have at least one entry: add one, or omit the annotation",
		`[{}]`:          "a[0].name: Invalid value: \"\"",
		`[{name: net}]`: "a[0]: Required value: set resourceClaimTemplateName, to use a ResourceClaimTemplate, or spec",
		`[{name: net, template: share}]`: `unknown field "template"; ` +
			"valid fields are name, resourceClaimTemplateName, spec, containers, deletionPolicy",
		`[{name: net, resourceClaimTemplateName: [share]}]`: "a[0]: Invalid value:",
		`[{name: Net, resourceClaimTemplateName: share}]`:   "a[0].name: Invalid value: \"Net\"",
		`[{name: net, resourceClaimTemplateName: "a b"}]`:   "a[0].resourceClaimTemplateName: Invalid value: \"a b\"",
		`[{name: net, resourceClaimTemplateName: a, spec: {devices: {requests: [{name: r}]}}}]`: "" +
			"a[0].resourceClaimTemplateName: Invalid value: \"a\": must not be set together with spec: remove one of them",
		`[{name: net, spec: {}}]`: "a[0].spec.devices.requests: Required value",
		`[{name: net, resourceClaimTemplateName: a}, {name: net, resourceClaimTemplateName: b}]`: "a[1].name: " +
			"Duplicate value: \"net\"",
		`[{name: net, resourceClaimTemplateName: a, containers: [w, w]}]`: "a[0].containers[1]: Duplicate value: \"w\"",
		`[{name: net, resourceClaimTemplateName: a, containers: [W]}]`:    "a[0].containers[0]: Invalid value: \"W\"",
		`[{name: net, resourceClaimTemplateName: a, deletionPolicy: Never}]`: "a[0].deletionPolicy: " +
			"Unsupported value: \"Never\": supported values: \"OnCompletion\", \"OnDeletion\"",
		`[{name: net, spec: {devices: {requests: [{name: r, exactly: {deviceClassName: c, adminAccess: true}}]}}}]`: "" +
			"a[0].spec.devices.requests[0].exactly.adminAccess: Forbidden: claims of Jobs cannot have administrative access",
		`[{name: net, spec: {devices: {requests: [{name: r, exactly: {deviceClassName: c,
			capacity: {requests: {groups: 0}}}}]}}}]`: "a[0].spec.devices.requests[0].exactly.capacity.requests[groups]: " +
			"Invalid value: \"0\": would use a fabric without counting as a group: request 1",
		`[{name: net, spec: {devices: {requests: [{name: r, firstAvailable: [{name: s, deviceClassName: c,
			capacity: {requests: {dra-shared.dev/groups: 0}}}]}]}}}]`: "requests[0].firstAvailable[0].capacity",
		strings.Repeat("- {name: a, resourceClaimTemplateName: b}\n", 17): "a: Too many: 17: must have at most 16 items",
	} {
		_, errs := scheduling.ParseJobClaims(value, field.NewPath("a"))
		if len(errs) == 0 || !strings.Contains(errs.ToAggregate().Error(), want) {
			t.Errorf("%s: got errors %v, want %q", value, errs, want)
		}
	}
}

// Whatever the parser accepts is unambiguous: names are unique, and each entry has one source. It stays the same when
// it is written and read again.
func FuzzParseJobClaims(f *testing.F) {
	f.Add(`[{name: net, resourceClaimTemplateName: share, containers: [worker]}]`)
	f.Add(`[{name: net, spec: {devices: {requests: [{name: r, exactly: {deviceClassName: c, adminAccess: true}}]}}}]`)
	f.Add("- &a {name: x, resourceClaimTemplateName: y}\n- *a")
	f.Fuzz(func(t *testing.T, value string) {
		claims, errs := scheduling.ParseJobClaims(value, nil)
		if len(errs) > 0 {
			return
		}
		names := map[string]bool{}
		for _, c := range claims {
			if names[c.Name] || (c.Spec == nil) == (c.ResourceClaimTemplateName == nil) || c.DeletionPolicy == "" {
				t.Errorf("accepted %+v", claims)
			}
			names[c.Name] = true
		}
		raw, err := yaml.Marshal(claims)
		if err != nil {
			t.Fatal(err)
		}
		again, errs := scheduling.ParseJobClaims(string(raw), nil)
		if len(errs) > 0 || !equality.Semantic.DeepEqual(claims, again) {
			t.Errorf("written and read again: errors %v, got %+v, want %+v", errs, again, claims)
		}
	})
}

func TestParseReplicaClaims(t *testing.T) {
	path := field.NewPath("metadata", "annotations").Key(scheduling.ReplicaClaimsAnnotation)
	claims, errs := scheduling.ParseReplicaClaims("[{name: net, resourceClaimTemplateName: share}]", path)
	if len(errs) > 0 || len(claims) != 1 || claims[0].Name != "net" || claims[0].DeletionPolicy != "" {
		t.Errorf("got %+v, %v, want the entry net without a policy", claims, errs)
	}
	_, errs = scheduling.ParseReplicaClaims(
		"[{name: net, resourceClaimTemplateName: share, deletionPolicy: OnCompletion}]", path)
	const want = "[0].deletionPolicy: Forbidden: the claims of a replica are deleted"
	if len(errs) != 1 || !strings.Contains(errs.ToAggregate().Error(), want) {
		t.Errorf("deletionPolicy: got %v, want %q", errs, want)
	}
}
