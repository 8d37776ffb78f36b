// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package chart tests which values the Helm chart accepts, and the objects that it renders. test/monitoring tests the
// Prometheus operator's objects.
package chart

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const root = "../.."

var chart = filepath.Join(root, "deployments/helm/dra-driver-shared")

// everything are values that make the chart render all its objects, each with a value.
const everything = "controller.certManager=true,monitoring.podMonitor=true,monitoring.prometheusRule=true"

// objects are those that the chart renders, by kind and name.
type objects map[string]*unstructured.Unstructured

// render renders the chart as the release. set is as for Helm's --set, and flags are additional flags.
func render(t *testing.T, release, set string, flags ...string) (objects, error) {
	t.Helper()
	touchChart(t)
	args := append([]string{"template", release, chart, "--namespace", "ns"}, flags...)
	if set != "" {
		args = append(args, "--set", set)
	}
	out, err := exec.Command(filepath.Join(root, "bin/helm"), args...).Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil, errors.New(string(exit.Stderr))
	}
	if err != nil {
		t.Fatalf("render the chart: %v: does bin/helm exist (make bin/helm)?", err)
	}
	rendered := objects{}
	for document := range strings.SplitSeq(string(out), "\n---\n") {
		o := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict([]byte(document), &o.Object); err != nil {
			t.Fatalf("decode an object of the chart: %v\n%s", err, document)
		}
		if o.Object != nil {
			rendered[o.GetKind()+"/"+o.GetName()] = o
		}
	}
	return rendered, nil
}

// mustRender renders the chart as the release x.
func mustRender(t *testing.T, set string) objects {
	t.Helper()
	rendered, err := render(t, "x", set)
	if err != nil {
		t.Fatalf("render the chart with %s: %v", set, err)
	}
	return rendered
}

// touchChart opens the files of the chart: cached results of tests depend only on the files that the test itself opens.
func touchChart(t *testing.T) {
	t.Helper()
	if err := filepath.WalkDir(chart, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		_, err = os.ReadFile(path)
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// decode returns an object of the type T.
func decode[T any](t *testing.T, all objects, key string) T {
	t.Helper()
	var object T
	if all[key] == nil {
		t.Fatalf("the chart renders no %s", key)
	}
	raw, err := yaml.Marshal(all[key].UnstructuredContent())
	if err != nil {
		t.Fatalf("%s: %v", key, err)
	}
	if err := yaml.UnmarshalStrict(raw, &object); err != nil {
		t.Fatalf("%s: %v", key, err)
	}
	return object
}

// podTemplates returns the pod templates of the plugin, the controller, and the uninstall check.
func podTemplates(t *testing.T, all objects) map[string]corev1.PodTemplateSpec {
	t.Helper()
	return map[string]corev1.PodTemplateSpec{
		"plugin":          decode[appsv1.DaemonSet](t, all, "DaemonSet/x-plugin").Spec.Template,
		"controller":      decode[appsv1.Deployment](t, all, "Deployment/x-controller").Spec.Template,
		"uninstall-check": decode[batchv1.Job](t, all, "Job/x-uninstall-check").Spec.Template,
	}
}

// Argo CD does not create Leases: without the right to create one, no replica would ever lead.
func TestChart_controllerCreatesLease(t *testing.T) {
	role := decode[rbacv1.Role](t, mustRender(t, ""), "Role/x-controller")
	for _, rule := range role.Rules {
		// The API server does not know the name of an object that is created, so a rule with names never permits it.
		if slices.Contains(rule.Resources, "leases") && slices.Contains(rule.Verbs, "create") && rule.ResourceNames == nil {
			return
		}
	}
	t.Errorf("the controller cannot create a Lease; its rules: %v", role.Rules)
}

func TestChart_updateStrategyOfPlugin(t *testing.T) {
	for set, want := range map[string][2]string{
		"":                  {"10%", "0"},
		"plugin.maxSurge=3": {"3", "0"},
		"plugin.maxSurge=0,plugin.maxUnavailable=10%": {"0", "10%"},
	} {
		plugin := decode[appsv1.DaemonSet](t, mustRender(t, set), "DaemonSet/x-plugin")
		update := plugin.Spec.UpdateStrategy.RollingUpdate
		if got := [2]string{update.MaxSurge.String(), update.MaxUnavailable.String()}; got != want {
			t.Errorf("with %q: got maxSurge and maxUnavailable %v, want %v", set, got, want)
		}
	}
	// The API server refuses a DaemonSet with both or without either.
	for _, set := range []string{
		"plugin.maxUnavailable=1", "plugin.maxSurge=0", "plugin.maxSurge=0%", "plugin.maxSurge=-1", "plugin.maxSurge=101%",
		"plugin.maxSurge=ten",
	} {
		expectRefused(t, set, "at '/plugin")
	}
}

// The image has programs for Linux only. The plugin tolerates all taints, including taints of Windows and virtual
// nodes.
func TestChart_podsRunOnLinux(t *testing.T) {
	const os = `kubernetes\.io/os`
	all := mustRender(t, "plugin.nodeSelector.a=b,controller.nodeSelector.a=b,plugin.nodeSelector."+os+"=windows")
	for name, pod := range podTemplates(t, all) {
		if got := pod.Spec.NodeSelector; got["kubernetes.io/os"] != "linux" || got["a"] != "b" || len(got) != 2 {
			t.Errorf("%s: got the nodeSelector %v, want a=b and kubernetes.io/os=linux", name, got)
		}
	}
}

// The hook's Job needs what admission of a cluster may require, and its message must outlast a failure.
func TestChart_uninstallCheck(t *testing.T) {
	all := mustRender(t, "controller.tolerations[0].key=infra")
	job := decode[batchv1.Job](t, all, "Job/x-uninstall-check")
	pod := job.Spec.Template.Spec
	check := pod.Containers[0]
	if d := job.Spec.ActiveDeadlineSeconds; d == nil || *d != 120 {
		t.Errorf("got activeDeadlineSeconds %v, want 120", d)
	}
	if strings.Contains(job.Annotations["helm.sh/hook-delete-policy"], "hook-failed") {
		t.Error("Helm deletes the Job that has failed, and its message")
	}
	if check.TerminationMessagePolicy != corev1.TerminationMessageFallbackToLogsOnError {
		t.Errorf("got terminationMessagePolicy %q", check.TerminationMessagePolicy)
	}
	if len(check.Resources.Requests) != 2 {
		t.Errorf("got the requests %v, want CPU and memory", check.Resources.Requests)
	}
	if s := pod.SecurityContext; s == nil || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("got the security context %v of the pod, want the seccomp profile RuntimeDefault", s)
	}
	if len(pod.Tolerations) != 1 || pod.Tolerations[0].Key != "infra" {
		t.Errorf("got the tolerations %v, want those of the controller", pod.Tolerations)
	}
}

// Clusters may require labels of all objects. The definitions do not have labels, because `make generate` writes them.
func TestChart_commonLabels(t *testing.T) {
	all := mustRender(t, everything+",commonLabels.team=net,plugin.mountBPFFS=true")
	for key, o := range all {
		if o.GetKind() != "CustomResourceDefinition" && o.GetLabels()["team"] != "net" {
			t.Errorf("%s has the labels %v, without commonLabels", key, o.GetLabels())
		}
	}
	for name, pod := range podTemplates(t, all) {
		if pod.Labels["team"] != "net" {
			t.Errorf("the pods of %s have the labels %v, without commonLabels", name, pod.Labels)
		}
	}
}

// Selectors of a DaemonSet and of a Deployment cannot change.
func TestChart_selectorsOmitPodLabels(t *testing.T) {
	all := mustRender(t, "commonLabels.team=net,plugin.podLabels.a=b,controller.podLabels.a=b,"+
		"plugin.podAnnotations.c=d,controller.podAnnotations.c=d")
	selectors := map[string]*metav1.LabelSelector{
		"plugin":     decode[appsv1.DaemonSet](t, all, "DaemonSet/x-plugin").Spec.Selector,
		"controller": decode[appsv1.Deployment](t, all, "Deployment/x-controller").Spec.Selector,
	}
	pods := podTemplates(t, all)
	for name, selector := range selectors {
		want := map[string]string{
			"app.kubernetes.io/name":      "dra-driver-shared",
			"app.kubernetes.io/instance":  "x",
			"app.kubernetes.io/component": name,
		}
		if len(selector.MatchLabels) != len(want) {
			t.Errorf("%s: got the selector %v, want %v", name, selector.MatchLabels, want)
		}
		for key, value := range want {
			if selector.MatchLabels[key] != value || pods[name].Labels[key] != value {
				t.Errorf("%s: the selector %v or the labels %v of the pods lack %s=%s",
					name, selector.MatchLabels, pods[name].Labels, key, value)
			}
		}
		if pods[name].Labels["a"] != "b" || pods[name].Annotations["c"] != "d" {
			t.Errorf("%s: the pods have the labels %v and the annotations %v, without podLabels or podAnnotations",
				name, pods[name].Labels, pods[name].Annotations)
		}
	}
}

func TestChart_schemaRefusesLabelsOfChart(t *testing.T) {
	for set, want := range map[string]string{
		`commonLabels.app\.kubernetes\.io/name=other`:             "invalid propertyName 'app.kubernetes.io/name'",
		`plugin.podLabels.app\.kubernetes\.io/component=other`:    "invalid propertyName 'app.kubernetes.io/component'",
		`controller.podLabels.app\.kubernetes\.io/instance=other`: "invalid propertyName 'app.kubernetes.io/instance'",
		`plugin.podAnnotations.dra-shared\.dev/config=other`:      "invalid propertyName 'dra-shared.dev/config'",
		`commonLabels.team=two words`:                             "at '/commonLabels/team'",
	} {
		expectRefused(t, set, want)
	}
}

// Charts that depend on this one set enabled, for the field condition of the dependency.
func TestChart_acceptsConditionOfDependency(t *testing.T) {
	mustRender(t, "enabled=true")
}

// The API server would refuse names that begin with the release's name; the Job's name only at the removal.
func TestChart_releaseNames(t *testing.T) {
	const message = "must be at most 47 characters, start with a letter, and have no dots"
	for release, want := range map[string]bool{
		"dra-shared":            true,
		strings.Repeat("a", 47): true,
		strings.Repeat("a", 48): false,
		"dra.shared":            false,
		"4-shared":              false,
	} {
		_, err := render(t, release, "")
		if (err == nil) != want {
			t.Errorf("release %s: got the error %v, accepted: want %t", release, err, want)
		}
		if err != nil && !strings.Contains(err.Error(), message) {
			t.Errorf("release %s: got the error %v", release, err)
		}
	}
}
