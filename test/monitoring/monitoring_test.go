// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package monitoring tests the chart's objects and rules for Prometheus and its operator. It is a
// separate module because of their dependencies.
package monitoring

import (
	"bytes"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/relabel"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	goyaml "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

const chart = "../../deployments/helm/dra-driver-shared"

// The operator's API server would refuse unknown fields.
func TestChart_objectsOfOperator(t *testing.T) {
	monitor, rule := objectsOfOperator(t, "monitoring.labels.release=y")
	if monitor.Labels["release"] != "y" || rule.Labels["release"] != "y" {
		t.Errorf("got the labels %v and %v, want release=y", monitor.Labels, rule.Labels)
	}
	if n := len(rule.Spec.Groups); n != 1 || len(rule.Spec.Groups[0].Rules) != len(alerts(t)) {
		t.Errorf("PrometheusRule: got %d groups, want one with all alerts", n)
	}
}

// objectsOfOperator returns the PodMonitor and the PrometheusRule of the chart, in the namespace ns.
func objectsOfOperator(
	t *testing.T, set string,
) (monitor monitoringv1.PodMonitor, rule monitoringv1.PrometheusRule) {
	t.Helper()
	out, err := exec.Command("../../bin/helm", "template", "x", chart, "--show-only", "templates/monitoring.yaml",
		"--namespace", "ns", "--set", "monitoring.podMonitor=true,monitoring.prometheusRule=true,"+set).Output()
	if err != nil {
		t.Fatalf("render the chart: %v: does bin/helm exist (make bin/helm)?", err)
	}
	decoded := 0
	for document := range strings.SplitSeq(string(out), "\n---\n") {
		var err error
		switch {
		case strings.Contains(document, "kind: PodMonitor"):
			decoded, err = decoded+1, yaml.UnmarshalStrict([]byte(document), &monitor)
		case strings.Contains(document, "kind: PrometheusRule"):
			decoded, err = decoded+1, yaml.UnmarshalStrict([]byte(document), &rule)
		}
		if err != nil {
			t.Error(err)
		}
	}
	if decoded != 2 {
		t.Errorf("got %d objects, want 2", decoded)
	}
	return monitor, rule
}

// A Lease has the name of the driver, and the controller exports its metric with this name.
func TestChart_alertsOfAnotherDriver(t *testing.T) {
	_, rule := objectsOfOperator(t, "driverName=nic.example.com")
	var all strings.Builder
	for _, r := range rule.Spec.Groups[0].Rules {
		all.WriteString(r.Expr.String() + "\n" + r.Annotations["description"] + "\n")
	}
	lease := `leader_election_master_status{name="nic.example.com"}`
	for _, want := range []string{lease, "`kubectl -n ns describe pod`"} {
		if !strings.Contains(all.String(), want) {
			t.Errorf("no alert contains %s", want)
		}
	}
	for _, other := range []string{`name="dra-shared.dev"`, "dra-shared-system"} {
		if strings.Contains(all.String(), other) {
			t.Errorf("an alert contains %s, of another driver or namespace", other)
		}
	}
}

// Both the PodMonitor and the job in the documentation scrape pods with addresses of either family.
func TestScrape_addressesOfPods(t *testing.T) {
	monitor, _ := objectsOfOperator(t, "commonLabels.a=b")
	raw, err := yaml.Marshal(monitor.Spec.PodMetricsEndpoints[0].RelabelConfigs)
	if err != nil {
		t.Fatal(err)
	}
	for name, configs := range map[string][]*relabel.Config{
		"PodMonitor":    relabelConfigs(t, snakeCase(string(raw))),
		"operations.md": documentedRelabelConfigs(t),
	} {
		for ip, want := range map[string]string{"10.0.0.1": "10.0.0.1:9464", "fd00::12": "[fd00::12]:9464"} {
			target := labels.NewBuilder(labels.FromMap(map[string]string{
				"__meta_kubernetes_pod_annotation_prometheus_io_scrape": "true",
				"__meta_kubernetes_pod_annotation_prometheus_io_port":   "9464",
				"__meta_kubernetes_pod_container_name":                  "plugin",
				"__meta_kubernetes_pod_node_name":                       "n1",
				"__meta_kubernetes_pod_ip":                              ip,
			}))
			kept := relabel.ProcessBuilder(target, configs...)
			if got := target.Get("__address__"); !kept || got != want || target.Get("node") != "n1" {
				t.Errorf("%s: pod %s: got the target %v, want the address %s and node n1", name, ip, target.Labels(), want)
			}
		}
	}
}

// snakeCase renames the fields of the operator's relabelings to Prometheus' names.
func snakeCase(relabelings string) string {
	return strings.NewReplacer("sourceLabels:", "source_labels:", "targetLabel:", "target_label:").Replace(relabelings)
}

// relabelConfigs decodes a list of relabelings, with the defaults of Prometheus.
func relabelConfigs(t *testing.T, raw string) []*relabel.Config {
	t.Helper()
	var configs []*relabel.Config
	if err := goyaml.Unmarshal([]byte(raw), &configs); err != nil {
		t.Fatalf("decode relabelings: %v\n%s", err, raw)
	}
	for _, c := range configs {
		if err := c.Validate(model.UTF8Validation); err != nil {
			t.Fatalf("%v: %v", c, err)
		}
	}
	return configs
}

// documentedRelabelConfigs returns the relabelings of the scrape job in operations.md.
func documentedRelabelConfigs(t *testing.T) []*relabel.Config {
	t.Helper()
	raw, err := os.ReadFile("../../docs/user/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, job, found := strings.Cut(string(raw), "- job_name: dra-shared\n")
	job, _, ended := strings.Cut(job, "```")
	_, configs, listed := strings.Cut(job, "relabel_configs:\n")
	if !found || !ended || !listed {
		t.Fatal("operations.md has no scrape job dra-shared with relabelings")
	}
	return relabelConfigs(t, configs)
}

// An upgrade with --reuse-values from an earlier release does not set these values.
func TestChart_withoutValues(t *testing.T) {
	out, err := exec.Command("../../bin/helm", "template", "x", chart, "--set", "monitoring=null").CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("monitoring.coreos.com")) {
		t.Errorf("render the chart without the value monitoring: %v, want no objects of the operator:\n%s", err, out)
	}
}

// alerts returns the rules of the chart, by name.
func alerts(t *testing.T) map[string]rulefmt.Rule {
	t.Helper()
	raw, err := os.ReadFile(chart + "/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	syntax := parser.NewParser(parser.Options{})
	groups, errs := rulefmt.Parse(raw, false, model.UTF8Validation, syntax, slog.New(slog.DiscardHandler))
	for _, err := range errs {
		t.Error(err)
	}
	rules := map[string]rulefmt.Rule{}
	for _, group := range groups.Groups {
		for _, rule := range group.Rules {
			rules[rule.Alert] = rule
		}
	}
	return rules
}

// Each alert fires with the first series, and not with the second. The series have a value per minute
// for an hour.
func TestAlerts(t *testing.T) {
	rules := alerts(t)
	tests := map[string][2]string{
		"DRASharedTargetDown": {`up{job="dra-shared"} 0x60`, `up{job="dra-shared"} 1x60`},
		"DRASharedPodsRefused": {
			`dra_shared_operation_duration_seconds_count{operation="attach",outcome="error"} 0+1x60`,
			`dra_shared_operation_duration_seconds_count{operation="attach",outcome="ok"} 0+1x60`,
		},
		"DRASharedAttachSlow": {
			`dra_shared_operation_duration_seconds_bucket{operation="attach",le="0.1"} 0+1x60
			dra_shared_operation_duration_seconds_bucket{operation="attach",le="1"} 0+10x60
			dra_shared_operation_duration_seconds_bucket{operation="attach",le="+Inf"} 0+10x60`,
			`dra_shared_operation_duration_seconds_bucket{operation="attach",le="0.1"} 0+10x60
			dra_shared_operation_duration_seconds_bucket{operation="attach",le="1"} 0+10x60
			dra_shared_operation_duration_seconds_bucket{operation="attach",le="+Inf"} 0+10x60`,
		},
		"DRASharedStatusNotWritten": {
			`dra_shared_status_reports_total{instance="n1",outcome="forbidden"} 0+1x60
			dra_shared_status_reports_total{instance="n1",outcome="written"} 5x60
			dra_shared_status_reports_total{instance="n2",outcome="written"} 0+1x60`,
			`dra_shared_status_reports_total{instance="n1",outcome="forbidden"} 0+1x60
			dra_shared_status_reports_total{instance="n1",outcome="written"} 0+1x60`,
		},
		"DRASharedDeviceDown":     {`dra_shared_device_healthy 0x60`, `dra_shared_device_healthy 1x60`},
		"DRASharedDeviceUnusable": {`dra_shared_device_unusable 1x60`, `dra_shared_device_unusable 0x60`},
		"DRASharedDeviceGuarded":  {`dra_shared_device_guarded 1x60`, `dra_shared_device_guarded 0x60`},
		"DRASharedLeasesNotRenewed": {
			`dra_shared_leases{state="Rebinding"} 1x60`,
			`dra_shared_leases{state="Bound"} 1x60
			dra_shared_leases{state="Expired"} 0x60`,
		},
		"DRASharedHookMissing": {`dra_shared_hook_installed 0x60`, `dra_shared_hook_installed 1x60`},
		"DRASharedDeviceTooSlow": {
			`dra_shared_device_granted{device="a",capacity="bandwidth"} 2x60
			dra_shared_device_capacity{device="a",capacity="bandwidth"} 1x60`,
			`dra_shared_device_granted{device="a",capacity="bandwidth"} 1x60
			dra_shared_device_capacity{device="a",capacity="bandwidth"} 1x60`,
		},
		"DRASharedNodeLosesState": {`dra_shared_orphans_removed_total 0+1x60`, `dra_shared_orphans_removed_total 2x60`},
		"DRASharedNoControllerLeads": {
			`leader_election_master_status{name="dra-shared.dev"} 0x60`,
			`leader_election_master_status{name="dra-shared.dev",pod="a"} 0x60
			leader_election_master_status{name="dra-shared.dev",pod="b"} 1x60`,
		},
		"DRASharedGroupsWithoutClaims": {
			`dra_shared_podgroups{state="NoRoom"} 1x60`,
			`dra_shared_podgroups{state="NoRoom"} 0x60
			dra_shared_podgroups{state="Held"} 1x60`,
		},
		"DRASharedPodsGated": {`dra_shared_gated_pods_age_seconds 601x60`, `dra_shared_gated_pods_age_seconds 1x60`},
		"DRASharedClaimsHeldWithoutPods": {
			`dra_shared_unused_held_claims_age_seconds 90000x60`, `dra_shared_unused_held_claims_age_seconds 1x60`,
		},
		"DRASharedClaimsNotHeld": {
			`dra_shared_reserved_for_claims{reason="HolderMissing"} 1x60`,
			`dra_shared_reserved_for_claims{reason="Held"} 1x60`,
		},
		"DRASharedAdmissionDenials": {
			`dra_shared_admission_denials_total{kind="Pod",reason="Owner"} 0+1x60`,
			`dra_shared_admission_denials_total{kind="Pod",reason="Owner"} 5x60`,
		},
	}
	for name := range rules {
		if _, ok := tests[name]; !ok {
			t.Errorf("alert %s has no test", name)
		}
	}
	for name, series := range tests {
		t.Run(name, func(t *testing.T) {
			rule, ok := rules[name]
			if !ok {
				t.Fatal("the chart has no such alert")
			}
			for i, fires := range []bool{true, false} {
				if got := result(t, rule.Expr, series[i]); (len(got) > 0) != fires {
					t.Errorf("%s\nwith %s\ngot %v, want fires=%t", rule.Expr, series[i], got, fires)
				}
			}
		})
	}
}

// result returns the value of an expression after an hour.
func result(t *testing.T, expression, series string) promql.Vector {
	t.Helper()
	var load bytes.Buffer
	load.WriteString("load 1m\n")
	for line := range strings.Lines(series) {
		load.WriteString("  " + strings.TrimSpace(line) + "\n")
	}
	storage := promqltest.LoadedStorage(t, load.String())
	defer storage.Close()
	engine := promqltest.NewTestEngine(t, false, 0, promqltest.DefaultMaxSamplesPerQuery)
	query, err := engine.NewInstantQuery(t.Context(), storage, nil, expression, time.Unix(3600, 0))
	if err != nil {
		t.Fatal(err)
	}
	defer query.Close()
	vector, err := query.Exec(t.Context()).Vector()
	if err != nil {
		t.Fatal(err)
	}
	return vector
}
