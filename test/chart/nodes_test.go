// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// documentedValue matches a value of the chart in a sentence, such as `plugin.hookDir: /opt/cni/bin`.
var documentedValue = regexp.MustCompile("`((?:plugin|controller)[.][a-zA-Z.]+|runAsUser): ([^`]+)`")

// valuesBlock matches an example of values.
var valuesBlock = regexp.MustCompile("(?s)```yaml\n((?:plugin|controller|runAsUser|config):.*?)```")

// nodesDocument returns the page about nodes.
func nodesDocument(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(root, "docs/user/nodes.md"))
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// flatten returns values as for Helm's --set.
func flatten(t *testing.T, key, value string) (set []string) {
	t.Helper()
	var decoded any
	if err := yaml.Unmarshal([]byte(value), &decoded); err != nil {
		t.Fatalf("%s: %s: %v", key, value, err)
	}
	fields, isMap := decoded.(map[string]any)
	if !isMap {
		return []string{fmt.Sprintf("%s=%v", key, value)}
	}
	for name, field := range fields {
		set = append(set, fmt.Sprintf("%s.%s=%v", key, name, field))
	}
	return set
}

// Each row of the table of systems renders, with its values in the pods of the plugin.
func TestChart_valuesOfSystems(t *testing.T) {
	documented := map[string][]string{}
	for line := range strings.Lines(nodesDocument(t)) {
		cells := strings.Split(line, "|")
		if len(cells) != 5 {
			continue
		}
		for _, match := range documentedValue.FindAllStringSubmatch(cells[2], -1) {
			system := strings.TrimSpace(cells[1])
			documented[system] = append(documented[system], flatten(t, match[1], match[2])...)
		}
	}
	for system, want := range map[string][]string{
		"Container-Optimized OS": {"plugin.hookDir=/home/kubernetes/bin"},
		"Talos":                  {"plugin.cdiDir=/var/cdi/dynamic", "plugin.hookDir=/opt/cni/bin"},
		"Bottlerocket":           {"plugin.hookDir=/opt/cni/bin", "plugin.seLinuxOptions.type=super_t"},
		"OpenShift":              {"plugin.seLinuxOptions.type=spc_t"},
	} {
		got := documented[system]
		delete(documented, system)
		if !slices.Equal(got, want) {
			t.Errorf("%s: the document has the values %v, want %v", system, got, want)
			continue
		}
		set := strings.Join(want, ",")
		if system == "OpenShift" {
			set += ",runAsUser=null" // below the table
		}
		pod := decode[appsv1.DaemonSet](t, mustRender(t, set), "DaemonSet/x-plugin").Spec.Template.Spec
		for _, value := range want {
			expectInPlugin(t, system, pod, value)
		}
	}
	if len(documented) > 0 {
		t.Errorf("systems that this test does not render: %v", documented)
	}
}

// expectInPlugin fails the test unless a value reaches the plugin's container.
func expectInPlugin(t *testing.T, system string, pod corev1.PodSpec, set string) {
	t.Helper()
	plugin := pod.Containers[0]
	key, value, _ := strings.Cut(set, "=")
	switch key {
	case "plugin.hookDir":
		expectDirectory(t, system, pod, "hook", "--hook-dir="+value, value)
	case "plugin.cdiDir":
		expectDirectory(t, system, pod, "cdi", "--cdi-dir="+value, value)
	case "plugin.seLinuxOptions.type":
		if o := plugin.SecurityContext.SELinuxOptions; o == nil || o.Type != value {
			t.Errorf("%s: got the SELinux options %v, want the type %s", system, o, value)
		}
	default:
		t.Errorf("%s: this test does not know the value %s", system, key)
	}
}

// expectDirectory fails the test unless the plugin's container has an argument, and a directory of the node at the same
// path, writable.
func expectDirectory(t *testing.T, system string, pod corev1.PodSpec, volume, argument, path string) {
	t.Helper()
	plugin := pod.Containers[0]
	if !slices.Contains(plugin.Args, argument) {
		t.Errorf("%s: the plugin has the arguments %v, want %s", system, plugin.Args, argument)
	}
	if !slices.ContainsFunc(plugin.VolumeMounts, func(m corev1.VolumeMount) bool {
		return m.Name == volume && m.MountPath == path && !m.ReadOnly
	}) {
		t.Errorf("%s: the plugin has the mounts %v, want %s at %s", system, plugin.VolumeMounts, volume, path)
	}
	if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool {
		return v.Name == volume && v.HostPath != nil && v.HostPath.Path == path
	}) {
		t.Errorf("%s: the pod has the volumes %v, want %s with %s", system, pod.Volumes, volume, path)
	}
}

// The schema accepts every value and every example on the page.
func TestChart_acceptsDocumentedValues(t *testing.T) {
	document := nodesDocument(t)
	values := documentedValue.FindAllStringSubmatch(document, -1)
	blocks := valuesBlock.FindAllStringSubmatch(document, -1)
	if len(values) < 8 || len(blocks) < 3 {
		t.Fatalf("found %d values and %d examples: does the page still have its form?", len(values), len(blocks))
	}
	for _, match := range values {
		mustRender(t, strings.Join(flatten(t, match[1], match[2]), ","))
	}
	for _, match := range blocks {
		file := filepath.Join(t.TempDir(), "values.yaml")
		if err := os.WriteFile(file, []byte(match[1]), 0o600); err != nil {
			t.Fatal(err)
		}
		all, err := render(t, "x", "", "--values", file)
		if err != nil {
			t.Errorf("%v with\n%s", err, match[1])
			continue
		}
		podTemplates(t, all) // fails if a pod has unknown fields
	}
}
