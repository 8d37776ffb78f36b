// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"sigs.k8s.io/yaml"

	"github.com/dra-shared/dra-driver-shared/api/internal/strict"
)

// Load decodes a DriverConfig, fills in defaults, and validates it. The error names
// every invalid field and what is expected.
func Load(raw []byte) (*DriverConfig, error) {
	c, err := Decode(raw)
	if err != nil {
		return nil, err
	}
	scheme.Default(c)
	if errs := c.Validate(); len(errs) > 0 {
		return nil, fmt.Errorf("%s: %w", Kind, errs.ToAggregate())
	}
	return c, nil
}

// decoder refuses unknown and duplicate fields.
var decoder = json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme,
	json.SerializerOptions{Yaml: true, Strict: true})

// Decode reads a DriverConfig from YAML or JSON. Unknown and duplicate fields are errors. It does not default or
// validate.
func Decode(raw []byte) (*DriverConfig, error) {
	var id metav1.TypeMeta
	if err := yaml.Unmarshal(raw, &id); err != nil {
		return nil, fmt.Errorf("%s: %w", Kind, err)
	}
	if id.APIVersion != APIVersion || id.Kind != Kind {
		return nil, fmt.Errorf("apiVersion %q, kind %q: want %q, %q", id.APIVersion, id.Kind, APIVersion, Kind)
	}
	var c DriverConfig
	if _, _, err := decoder.Decode(raw, nil, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", Kind, strict.Explain(err))
	}
	return &c, nil
}
