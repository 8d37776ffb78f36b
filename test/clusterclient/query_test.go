// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterclient

import (
	"reflect"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/scheme"

	corev1 "k8s.io/api/core/v1"
)

func TestParseQuery(t *testing.T) {
	for _, tc := range []struct {
		name string
		args []string
		want query // empty if only kubectl understands the arguments
	}{
		{
			"an object",
			[]string{"-n", "a", "get", "pod", "p", "-o", "jsonpath={.status.phase}"},
			query{namespace: "a", resource: "pod", name: "p", template: "{.status.phase}"},
		},
		{
			"a template with equals signs",
			[]string{"get", "pod", "p", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`},
			query{
				namespace: "default", resource: "pod", name: "p",
				template: `{.status.conditions[?(@.type=="Ready")].status}`,
			},
		},
		{
			"a list with selectors",
			[]string{"get", "pods", "-l", "app=web", "--field-selector", "spec.nodeName=n1", "-o=jsonpath={.items}", "-A"},
			query{
				resource: "pods", template: "{.items}",
				selectors: metav1.ListOptions{LabelSelector: "app=web", FieldSelector: "spec.nodeName=n1"},
			},
		},
		{"a table", []string{"get", "pods"}, query{}},
		{"names", []string{"get", "pods", "-o", "name"}, query{}},
		{"sorted", []string{"get", "pods", "--sort-by=.metadata.name", "-o", "jsonpath={.items}"}, query{}},
		{"two objects", []string{"get", "pod", "a", "b", "-o", "jsonpath={.items}"}, query{}},
		{"two resources", []string{"get", "pods,nodes", "-o", "jsonpath={.items}"}, query{}},
		{"another command", []string{"wait", "pod", "a", "-o", "jsonpath={.items}"}, query{}},
		{"no resource", []string{"get", "-o", "jsonpath={.items}"}, query{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, ok := parseQuery(tc.args)
			if want := tc.want.resource != ""; ok != want {
				t.Fatalf("is a query: got %t, want %t", ok, want)
			}
			if ok && !reflect.DeepEqual(got, tc.want) {
				t.Errorf("query: got %+v, want %+v", got, tc.want)
			}
		})
	}
}

func TestQueryClient_run(t *testing.T) {
	pod := func(namespace, name, app string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": app}},
			Status:     corev1.PodStatus{Phase: corev1.PodRunning},
		}
	}
	mapper := meta.NewDefaultRESTMapper([]schema.GroupVersion{corev1.SchemeGroupVersion})
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Pod"), meta.RESTScopeNamespace)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Node"), meta.RESTScopeRoot)
	group := schema.GroupVersion{Group: "scheduling.example.com", Version: "v1"}
	mapper.Add(group.WithKind("PodGroup"), meta.RESTScopeNamespace)
	client := &queryClient{
		objects: fake.NewSimpleDynamicClient(scheme.Scheme, pod("a", "p", "web"), pod("a", "q", "db"), pod("b", "r", "web"),
			&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}),
		mapper: mapper,
	}
	for _, tc := range []struct {
		name string
		args []string
		want string
	}{
		{"an object", []string{"-n", "a", "get", "pod", "p", "-o", "jsonpath={.status.phase}"}, "Running"},
		{"a missing field", []string{"-n", "a", "get", "pod", "p", "-o", "jsonpath={.status.reason}"}, ""},
		{"a list", []string{"-n", "a", "get", "pods", "-o", "jsonpath={.items[*].metadata.name}"}, "p q"},
		{"an empty list", []string{"-n", "c", "get", "pods", "-o", "jsonpath={.items[*].metadata.name}"}, ""},
		{
			"a selector in all namespaces",
			[]string{"get", "pods", "-A", "-l", "app=web", "-o", "jsonpath={.items[*].metadata.name}"}, "p r",
		},
		{
			"a resource without namespace",
			[]string{"-n", "a", "get", "nodes", "-o", "jsonpath={.items[*].metadata.name}"}, "n1",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			q, ok := parseQuery(tc.args)
			if !ok {
				t.Fatal("the arguments are not a query")
			}
			got, err := client.run(t.Context(), q)
			if err != nil || got != tc.want {
				t.Errorf("output: got %q, %v, want %q", got, err, tc.want)
			}
		})
	}
	for _, arg := range []string{"podgroups.scheduling.example.com", "podgroups.v1.scheduling.example.com"} {
		got, err := client.resource(arg)
		if want := group.WithResource("podgroups"); err != nil || got != want {
			t.Errorf("resource %s: got %v, %v, want %v", arg, got, err, want)
		}
	}
	q, _ := parseQuery([]string{"-n", "a", "get", "pod", "missing", "-o", "jsonpath={.status.phase}"})
	if out, err := client.run(t.Context(), q); err == nil {
		t.Errorf("query of an object that does not exist: got output %q, want an error", out)
	}
}
