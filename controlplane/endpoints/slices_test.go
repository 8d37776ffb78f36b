// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package endpoints

import (
	"slices"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestDiffSlices(t *testing.T) {
	slice := func(name, address, version string) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: version},
			Endpoints:  []discoveryv1.Endpoint{{Addresses: []string{address}}},
		}
	}
	type all = []*discoveryv1.EndpointSlice
	for _, test := range []struct {
		name            string
		present, wanted all
		want            []string // verb, name, address, and resource version
	}{
		{name: "nothing"},
		{"new", nil, all{slice("a", "10.0.0.1", "")}, []string{"create a 10.0.0.1 "}},
		{"unchanged", all{slice("a", "10.0.0.1", "7")}, all{slice("a", "10.0.0.1", "")}, nil},
		{"changed", all{slice("a", "10.0.0.1", "7")}, all{slice("a", "10.0.0.2", "")}, []string{"update a 10.0.0.2 7"}},
		{"unwanted", all{slice("a", "10.0.0.1", "7")}, nil, []string{"delete a 10.0.0.1 7"}},
		{"deletions come last", all{slice("a", "10.0.0.1", "7"), slice("b", "10.0.0.2", "8")},
			all{slice("b", "10.0.0.3", ""), slice("c", "10.0.0.4", "")},
			[]string{"update b 10.0.0.3 8", "create c 10.0.0.4 ", "delete a 10.0.0.1 7"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, w := range diffSlices(test.present, test.wanted) {
				got = append(got, string(w.verb)+" "+w.slice.Name+" "+w.slice.Endpoints[0].Addresses[0]+" "+
					w.slice.ResourceVersion)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("writes: got %q, want %q", got, test.want)
			}
		})
	}
}
