// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
	"sigs.k8s.io/yaml"
)

// The webhook denies what the plugin rejects for every device; the tests of both
// share one set of cases.
func TestParameters_deniesInvalidParameters(t *testing.T) {
	raw, err := os.ReadFile("../../api/v1alpha1/testdata/wrong.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name, Kind, Parameters, Want string
		OnDevice                     bool
	}
	if err := yaml.UnmarshalStrict(raw, &cases); err != nil {
		t.Fatal(err)
	}
	for _, tc := range cases {
		opaque := &resourceapi.OpaqueDeviceConfiguration{
			Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(tc.Parameters)},
		}
		config := resourceapi.DeviceConfiguration{Opaque: opaque}
		claim := resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Config: []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: config}},
		}}
		template := resourceapi.ResourceClaimTemplateSpec{Spec: claim}
		class := resourceapi.DeviceClassSpec{
			Config: []resourceapi.DeviceClassConfiguration{{DeviceConfiguration: config}},
		}
		for path, o := range map[string]any{
			"spec.devices.config[0].opaque.parameters":      &resourceapi.ResourceClaim{Spec: claim},
			"spec.spec.devices.config[0].opaque.parameters": &resourceapi.ResourceClaimTemplate{Spec: template},
			"spec.config[0].opaque.parameters":              &resourceapi.DeviceClass{Spec: class},
		} {
			object, err := json.Marshal(o)
			if err != nil {
				continue // the API server rejects invalid JSON before admission
			}
			request := admissionv1.AdmissionRequest{Object: runtime.RawExtension{Raw: object}}
			r := (&Parameters{Driver: driver}).Handle(t.Context(), admission.Request{AdmissionRequest: request})
			if tc.OnDevice {
				if !r.Allowed {
					t.Errorf("%s: denied before the device is known: %v", tc.Name, r.Result)
				}
				continue
			}
			if r.Allowed || !strings.Contains(r.Result.Message, path) || !strings.Contains(r.Result.Message, tc.Want) {
				t.Errorf("%s:\nresponse %v\nwant %s, at %s", tc.Name, r.Result, tc.Want, path)
			}
		}
	}
}

// The webhook denies parameters that the chart's DeviceClass of a request does not take.
func TestParameters_deniesKindOfOtherDeviceClass(t *testing.T) {
	const (
		nic         = `exactly: {deviceClassName: nic.dra-shared.dev}`
		accelerator = `exactly: {deviceClassName: accelerator.dra-shared.dev}`
		either      = `firstAvailable: [{name: gpu, deviceClassName: accelerator.dra-shared.dev},
			{name: nic, deviceClassName: nic.dra-shared.dev}]`
	)
	for _, tc := range []struct{ name, request, of, parameters, want string }{
		{"a link of a NIC", nic, "", `kind: NetworkAttachment`, ""},
		{"parameters of an accelerator for a NIC", nic, "", `kind: AcceleratorShare`,
			`parameters.kind: Forbidden: AcceleratorShare: request "r" has the DeviceClass nic.dra-shared.dev, ` +
				`whose devices take NetworkAttachment: list the matching requests`},
		{"parameters of a NIC for an accelerator", accelerator, "r", `kind: NetworkAttachment`,
			`request "r" has the DeviceClass accelerator.dra-shared.dev, whose devices take AcceleratorShare`},
		{"parameters of an accelerator for a fabric", `exactly: {deviceClassName: fabric.dra-shared.dev}`, "",
			`kind: AcceleratorShare`, `whose devices take no parameters`},
		{"parameters for another request", nic, "other", `kind: AcceleratorShare`, ""},
		{"another DeviceClass", `exactly: {deviceClassName: storage}`, "", `kind: AcceleratorShare`, ""},
		{"one of two alternatives takes the parameters", either, "r", `kind: AcceleratorShare`, ""},
		{"the alternative that takes the parameters", either, "r/gpu", `kind: AcceleratorShare`, ""},
		{"the other alternative", either, "r/nic", `kind: AcceleratorShare`, `AcceleratorShare: request "r/nic" has`},
		{"adminLink without adminAccess", nic, "", `kind: NetworkAttachment, adminLink: true`,
			`parameters.adminLink: Forbidden: true: request "r" does not have adminAccess`},
		{"adminLink with adminAccess", `exactly: {deviceClassName: nic.dra-shared.dev, adminAccess: true}`, "",
			`kind: NetworkAttachment, adminLink: true`, ""},
	} {
		devices := `{devices: {requests: [{name: r, ` + tc.request + `}], config: [{requests: [` + tc.of +
			`], opaque: {driver: dra-shared.dev, parameters: {apiVersion: dra-shared.dev/v1alpha1, ` + tc.parameters + `}}}]}}`
		for path, object := range map[string]string{
			"spec.devices.config[0]":      `{spec: ` + devices + `}`,
			"spec.spec.devices.config[0]": `{spec: {spec: ` + devices + `}}`,
		} {
			r := (&Parameters{Driver: driver}).Handle(t.Context(), review(t, "", object))
			if r.Allowed != (tc.want == "") {
				t.Errorf("%s, %s: response %+v, want denial %q", tc.name, path, r, tc.want)
			}
			if text := path + ".opaque."; !r.Allowed &&
				(!strings.Contains(r.Result.Message, tc.want) || !strings.Contains(r.Result.Message, text)) {
				t.Errorf("%s: denial %q, want %q at %s", tc.name, r.Result.Message, tc.want, text)
			}
		}
	}
}

func TestParameters_ignoresOtherDrivers(t *testing.T) {
	claim := `{spec: {devices: {config: [{opaque: {driver: example.com, parameters: {kind: x}}}]}}}`
	r := (&Parameters{Driver: driver}).Handle(t.Context(), review(t, "", claim))
	if !r.Allowed {
		t.Errorf("response to parameters of another driver: %+v", r)
	}
}

func TestParameters_protectsAnnotationOfHeldClaim(t *testing.T) {
	parameters := &Parameters{Driver: driver}
	const (
		held = `{metadata: {annotations: {scheduling.dra-shared.dev/reserved-for: batch/jobs/a}},
			status: {reservedFor: [{apiGroup: batch, resource: jobs, name: a, uid: x}]}}`
		another = `{metadata: {annotations: {scheduling.dra-shared.dev/reserved-for: batch/jobs/b}}}`
		want    = "the claim is reserved for batch/jobs/a: delete that object before you change the annotation"
	)
	for _, updated := range []string{`{}`, another} {
		r := parameters.Handle(t.Context(), review(t, held, updated))
		if r.Allowed || !strings.Contains(r.Result.Message, want) {
			t.Errorf("update to %s: response %+v, want %s", updated, r, want)
		}
	}
	if r := parameters.Handle(t.Context(), review(t, held, held)); !r.Allowed {
		t.Errorf("an update that does not change the annotation: response %+v", r)
	}
}

func TestParameters_deniesInvalidHolder(t *testing.T) {
	claim := `{metadata: {annotations: {scheduling.dra-shared.dev/reserved-for: jobs}}}`
	r := (&Parameters{Driver: driver}).Handle(t.Context(), review(t, "", claim))
	if r.Allowed || !strings.Contains(r.Result.Message,
		`metadata.annotations[scheduling.dra-shared.dev/reserved-for]: Invalid value: "jobs"`) {
		t.Errorf("response %+v", r)
	}
}

// The claims of a template get the annotations in its spec. The template's own annotations do not have an effect.
func TestParameters_annotationsOfTemplates(t *testing.T) {
	const holder = "scheduling.dra-shared.dev/reserved-for"
	for _, tc := range []struct{ name, template, denial, warning string }{
		{"valid", `{spec: {metadata: {annotations: {` + holder + `: batch/jobs/a}}}}`, "", ""},
		{"invalid holder", `{spec: {metadata: {annotations: {` + holder + `: jobs}}}}`,
			`spec.metadata.annotations[` + holder + `]: Invalid value: "jobs"`, ""},
		{"release without a holder", `{spec: {metadata: {annotations: {scheduling.dra-shared.dev/release: OnDeletion}}}}`,
			`spec.metadata.annotations[scheduling.dra-shared.dev/release]: Forbidden: has an effect only on a claim`, ""},
		{"annotation of the template", `{metadata: {annotations: {` + holder + `: jobs}}}`, "",
			`metadata.annotations["` + holder + `"] has no effect on a ResourceClaimTemplate: move it to spec.metadata`},
	} {
		request := review(t, "", tc.template)
		request.Kind.Kind = "ResourceClaimTemplate"
		r := (&Parameters{Driver: driver}).Handle(t.Context(), request)
		if r.Allowed != (tc.denial == "") || !r.Allowed && !strings.Contains(r.Result.Message, tc.denial) {
			t.Errorf("%s: response %+v, want denial %q", tc.name, r, tc.denial)
		}
		if got := strings.Join(r.Warnings, "\n"); (got == "") != (tc.warning == "") || !strings.Contains(got, tc.warning) {
			t.Errorf("%s: warnings %q, want %q", tc.name, got, tc.warning)
		}
	}
}
