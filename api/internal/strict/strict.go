// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package strict turns the errors of strict decoding into messages for users.
package strict

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
)

// Explain rewrites an error of a strict decoder. For a value of the wrong type, the
// result names the field, the type of the value, and the expected type. For unknown
// and duplicate fields, it lists them, followed by the valid fields, if given.
func Explain(err error, validFields ...string) error {
	if wrongType, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("%s: got %s %s, want %s: does the value lack quotes, or have too many?",
			wrongType.Field, article(wrongType.Value), wrongType.Value, typeName(wrongType.Type))
	}
	strict, ok := runtime.AsStrictDecodingError(err)
	if !ok {
		return err
	}
	var problems []string
	for _, problem := range strict.Errors() {
		problems = append(problems, problem.Error())
	}
	if len(validFields) > 0 {
		problems = append(problems, "valid fields are "+strings.Join(validFields, ", "))
	}
	return errors.New(strings.Join(problems, "; "))
}

// article returns the indefinite article of a JSON type, such as array.
func article(jsonType string) string {
	if strings.HasPrefix(jsonType, "array") || strings.HasPrefix(jsonType, "object") {
		return "an"
	}
	return "a"
}

// typeName describes the JSON values that a Go type accepts.
func typeName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "a bool"
	case reflect.String:
		return "a string"
	case reflect.Slice, reflect.Array:
		return "an array"
	case reflect.Map, reflect.Struct:
		return "an object"
	default: // a number: the API does not have other types
		return "an integer (" + t.String() + ")"
	}
}
