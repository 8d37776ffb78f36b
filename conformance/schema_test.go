// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"sigs.k8s.io/yaml"
)

// compiledSchema returns the schema of reports.
func compiledSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	const name = "report.schema.json"
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource(name, decoded(t, []byte(Schema()))); err != nil {
		t.Fatal(err)
	}
	schema, err := compiler.Compile(name)
	if err != nil {
		t.Fatal(err)
	}
	return schema
}

// decoded returns YAML or JSON as the validator takes it.
func decoded(t *testing.T, raw []byte) any {
	t.Helper()
	raw, err := yaml.YAMLToJSON(raw)
	if err != nil {
		t.Fatal(err)
	}
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	return document
}

// TestSchema_reports validates the published reports.
func TestSchema_reports(t *testing.T) {
	schema := compiledSchema(t)
	paths, err := filepath.Glob("../reports/*/*/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		if filepath.Base(filepath.Dir(filepath.Dir(path))) == "drivers" {
			continue // configuration
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := schema.Validate(decoded(t, raw)); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// TestSchema validates a report with every field, and a report that differs from the schema.
func TestSchema(t *testing.T) {
	schema := compiledSchema(t)
	all, err := Requirements()
	if err != nil {
		t.Fatal(err)
	}
	c := Config{Driver: "gpu.example.com", Features: features(all), Profiles: kinds(), Implementation: Implementation{
		Organization: "o", Project: "p", URL: "https://example.com", Version: "v1.0.0", Contact: []string{"c"},
	}}
	var results []Result
	for i, q := range all {
		status := []Status{Passed, Failed, Skipped}[i%3]
		measured := map[string]float64{"x": 1}
		results = append(results, Result{Requirement: q, Status: status, Message: "m", Measurements: measured})
	}
	report := newReport(c, results, "v1.37.1", time.Now())
	raw, err := report.YAML()
	if err != nil {
		t.Fatal(err)
	}
	if err := schema.Validate(decoded(t, raw)); err != nil {
		t.Errorf("%v in\n%s", err, raw)
	}
	report.Profiles[0].Result = "good"
	if raw, err = report.YAML(); err != nil {
		t.Fatal(err)
	}
	if err := schema.Validate(decoded(t, raw)); err == nil {
		t.Error("the schema accepts the result good")
	}
}
