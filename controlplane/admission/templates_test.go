// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"testing"

	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

func TestTemplates_copiesPodGroupToAnnotation(t *testing.T) {
	pods := newPods(t, mode.Bridge)
	for _, tc := range []struct{ object, path string }{
		{`{spec: {template: {spec: {schedulingGroup: {podGroupName: group}}}}}`, "/spec/template/metadata"},
		{
			`{spec: {template: {metadata: {labels: {a: b}}, spec: {schedulingGroup: {podGroupName: group}}}}}`,
			"/spec/template/metadata/annotations",
		},
		{
			`{spec: {template: {metadata: {annotations: {a: b}}, spec: {schedulingGroup: {podGroupName: group}}}}}`,
			"/spec/template/metadata/annotations/scheduling.dra-shared.dev~1pod-group",
		},
		{
			`{spec: {jobTemplate: {spec: {template: {metadata: {}, spec: {schedulingGroup: {podGroupName: group}}}}}}}`,
			"/spec/jobTemplate/spec/template/metadata/annotations",
		},
		{
			`{template: {metadata: {}, spec: {schedulingGroup: {podGroupName: group}}}}`,
			"/template/metadata/annotations",
		},
		{`{spec: {template: {spec: {}}}}`, ""},
	} {
		var into map[string]any
		r := admit(t, &Templates{APIReader: pods.APIReader, Mapper: pods.Mapper}, review(t, "", tc.object), &into)
		patched := ""
		if len(r.Patches) > 0 {
			patched = r.Patches[len(r.Patches)-1].Path
		}
		if !r.Allowed || patched != tc.path {
			t.Errorf("%s: response %+v, want a patch of %q", tc.object, r, tc.path)
		}
	}
}

func TestTemplates_podGroupsOfKubernetes(t *testing.T) {
	pods := newPods(t, mode.Bridge)
	for _, name := range []string{"later", "both"} {
		request := review(t, "", `{spec: {template: {spec: {schedulingGroup: {podGroupName: `+name+`}}}}}`)
		r := (&Templates{APIReader: pods.APIReader, Mapper: pods.Mapper}).Handle(t.Context(), request)
		if !r.Allowed || len(r.Patches) > 0 || len(r.Warnings) != 1 {
			t.Errorf("PodGroup %s: response %+v, want a warning and no patch: it may be one of Kubernetes' own", name, r)
		}
	}
	request := review(t, "", `{spec: {template: {spec: {schedulingGroup: {podGroupName: native}}}}}`)
	r := (&Templates{APIReader: pods.APIReader, Mapper: pods.Mapper}).Handle(t.Context(), request)
	if !r.Allowed || len(r.Patches)+len(r.Warnings) > 0 {
		t.Errorf("one of Kubernetes' own: response %+v, want no warning and no patch", r)
	}
}
