// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"sigs.k8s.io/yaml"
)

// Load must accept all configurations in the documentation.
func TestLoad_examplesInDocumentation(t *testing.T) {
	documents, err := filepath.Glob("../../../docs/user/*.md")
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, document := range append(documents, "../../../README.md") {
		raw, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(raw, -1) {
			var values struct {
				Config map[string]any `json:"config"`
			}
			if err := yaml.Unmarshal(block[1], &values); err != nil || values.Config == nil {
				continue // not a configuration
			}
			values.Config["apiVersion"], values.Config["kind"] = APIVersion, Kind
			config, err := yaml.Marshal(values.Config)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := Load(config); err != nil {
				t.Errorf("%s: %v\n%s", document, err, block[1])
			}
			checked++
		}
	}
	if checked < 4 {
		t.Errorf("found only %d configurations in %v: has the format of the examples changed?", checked, documents)
	}
}
