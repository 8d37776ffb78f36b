// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"batch/jobs/train":               "",
		"/replicationcontrollers/web":    "",
		"/pods/leader":                   "a pod holds the claims that it names",
		"example.com/rockets/a.b-c":      "",
		"":                               "must be <API group>/<resource>/<name>",
		"jobs/train":                     "must be <API group>/<resource>/<name>",
		"batch/v1/jobs/train":            "must be <API group>/<resource>/<name>",
		"batch/jobs/":                    "must be <API group>/<resource>/<name>",
		"Batch/jobs/train":               `"Batch" is not an API group`,
		"batch/Jobs/train":               `"Jobs" is not a resource: use the lower-case plural`,
		"batch/jobs/Train":               `"Train" is not a valid object name`,
		"scheduling.k8s.io/podgroups/pg": "",

		"resource.k8s.io/resourceclaims/other":        "resourceclaims.resource.k8s.io cannot hold claims",
		"resource.k8s.io/deviceclasses/nic.example.x": "deviceclasses.resource.k8s.io cannot hold claims",
	} {
		h, err := Parse(text)
		switch {
		case want == "" && (err != nil || h.String() != text):
			t.Errorf("Parse(%q): got %v, %v, want no error", text, h, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("Parse(%q): got error %v, want %q", text, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("batch/jobs/train")
	f.Add("//")
	f.Fuzz(func(t *testing.T, text string) {
		if h, err := Parse(text); err == nil && h.String() != text {
			t.Errorf("Parse(%q) returns %q", text, h)
		}
	})
}
