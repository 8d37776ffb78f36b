// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/yaml"
)

func TestStateOf(t *testing.T) {
	for text, want := range map[string]State{
		"{}":                                 {},
		"spec: {replicas: 0}":                {Suspended: true},
		"spec: {replicas: 1}":                {},
		"spec: {suspend: true}":              {Suspended: true},
		"spec: {suspend: true, replicas: 1}": {Suspended: true},
		"status: {conditions: [{type: Suspended, status: 'True'}]}":                           {Suspended: true},
		"{spec: {suspend: false}, status: {conditions: [{type: Suspended, status: 'True'}]}}": {},
		"status: {conditions: [{type: Complete, status: 'True'}]}":                            {Complete: true},
		"status: {conditions: [{type: Completed, status: 'True'}]}":                           {Complete: true},
		"status: {conditions: [{type: Failed, status: 'True'}]}":                              {Complete: true},
		"status: {conditions: [{type: Complete, status: 'False'}]}":                           {},
		"status: {conditions: [{type: Available, status: 'True'}, none]}":                     {},
		"{spec: {replicas: none, suspend: 1}, status: {conditions: none}}":                    {},
	} {
		raw, err := yaml.YAMLToJSON([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		object := &unstructured.Unstructured{}
		if err := json.Unmarshal(raw, &object.Object); err != nil { // integers are int64, as from the API server
			t.Fatal(err)
		}
		if got := stateOf(object); got != want {
			t.Errorf("%s: got %+v, want %+v", text, got, want)
		}
	}
}
