// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"
)

const chart = "deployments/helm/dra-driver-shared"

// schema is the part of a JSON schema that the page shows.
type schema struct {
	Description string            `json:"description"`
	Type        any               `json:"type"`
	Enum        []any             `json:"enum"`
	Properties  map[string]schema `json:"properties"`
	Ref         string            `json:"$ref"`
}

func valuesPage(root string) (string, error) {
	raw, err := os.ReadFile(filepath.Join(root, chart, "values.yaml"))
	if err != nil {
		return "", err
	}
	var values yaml.Node
	if err := yaml.Unmarshal(raw, &values); err != nil {
		return "", err
	}
	raw, err = os.ReadFile(filepath.Join(root, chart, "values.schema.json"))
	if err != nil {
		return "", err
	}
	var s schema
	if err := json.Unmarshal(raw, &s); err != nil {
		return "", err
	}
	var m markdown
	m.paragraph("The chart validates values against `values.schema.json`. `config` has the fields of a " +
		"[DriverConfig](driverconfig.md), without `apiVersion` and `kind`.")
	err = m.values(values.Content[0], s, "")
	return m.String(), err
}

// values lists the values of a mapping, including nested mappings.
func (m *markdown) values(mapping *yaml.Node, s schema, prefix string) error {
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		key, value := mapping.Content[i], mapping.Content[i+1]
		path := prefix + key.Value
		known, ok := s.Properties[key.Value]
		if !ok {
			return fmt.Errorf("values.schema.json lacks %s of values.yaml", path)
		}
		text := commentText(key.HeadComment)
		if text == "" {
			text = known.Description
		}
		if value.Kind == yaml.MappingNode && len(known.Properties) > 0 && path != "config" {
			if text != "" {
				m.item(code(path), escape(text))
			}
			if err := m.values(value, known, path+"."); err != nil {
				return err
			}
			continue
		}
		defaultValue, err := flow(value)
		if err != nil {
			return err
		}
		qualifiers := "default " + code(defaultValue)
		if path == "config" {
			qualifiers = "[DriverConfig](driverconfig.md)"
		}
		if len(known.Enum) > 0 {
			texts := make([]string, len(known.Enum))
			for i, v := range known.Enum {
				texts[i] = code(fmt.Sprint(v))
			}
			qualifiers += "; one of " + strings.Join(texts, ", ")
		}
		m.item(fmt.Sprintf("%s (%s)", code(path), qualifiers), escape(text))
	}
	return nil
}

// flow formats a value in one line.
func flow(value *yaml.Node) (string, error) {
	var v any
	if err := value.Decode(&v); err != nil {
		return "", err
	}
	if v == "" {
		return `""`, nil
	}
	if text, ok := v.(string); ok {
		return text, nil
	}
	raw, err := json.Marshal(v)
	return string(raw), err
}

// commentText returns a comment of values.yaml without examples, which are lists or
// indented.
func commentText(comment string) string {
	var lines []string
	for line := range strings.Lines(comment) {
		line = strings.TrimPrefix(strings.TrimRight(line, "\n"), "#")
		line = strings.TrimPrefix(line, " ")
		if strings.HasPrefix(line, "- ") || strings.HasPrefix(line, "  ") {
			continue
		}
		lines = append(lines, line)
	}
	return strings.TrimSpace(strings.Join(lines, "\n"))
}
