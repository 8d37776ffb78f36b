package v1alpha1

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"sigs.k8s.io/yaml"
)

// What the documents show as a configuration is one.
func TestTheDocumentsConfigurations(t *testing.T) {
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
				continue // a claim, or several objects
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
		t.Errorf("only %d configurations found in %v", checked, documents)
	}
}
