// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"sigs.k8s.io/yaml"
)

// alert is a rule of Prometheus that fires.
type alert struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for"`
	Labels      map[string]string `json:"labels"`
	Annotations struct {
		Summary     string `json:"summary"`
		Description string `json:"description"`
	} `json:"annotations"`
}

// alertRules is a file of rules of Prometheus.
type alertRules struct {
	Groups []struct {
		Name  string  `json:"name"`
		Rules []alert `json:"rules"`
	} `json:"groups"`
}

// readAlerts returns the alerts of the chart.
func readAlerts(root string) (alerts []alert, err error) {
	path := filepath.Join(root, chart, "alerts.yaml")
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var rules alertRules
	if err := yaml.UnmarshalStrict(raw, &rules); err != nil {
		return nil, fmt.Errorf("parse %s: %w", path, err)
	}
	for _, g := range rules.Groups {
		alerts = append(alerts, g.Rules...)
	}
	return alerts, nil
}

var (
	labelInTemplate = regexp.MustCompile(`{{ \$labels\.(\w+) }}`)
	userPage        = regexp.MustCompile(`docs/user/((\w+)\.md#[\w-]+)`)
)

func alertsPage(root string) (string, error) {
	alerts, err := readAlerts(root)
	if err != nil {
		return "", err
	}
	var m markdown
	m.paragraph("The chart creates a PrometheusRule with these alerts if `monitoring.prometheusRule` is set. " +
		"A Prometheus without the operator reads `alerts.yaml` of the chart with `rule_files`.")
	for _, a := range alerts {
		m.heading(2, a.Alert)
		m.paragraph(labelInTemplate.ReplaceAllString(a.Annotations.Summary, "`$1`"))
		condition := "```promql\n" + a.Expr + "\n```"
		duration := "at once"
		if a.For != "" {
			duration = "after " + a.For
		}
		fmt.Fprintf(&m, "\n%s\n", condition)
		m.paragraph("Severity " + code(a.Labels["severity"]) + ", " + duration + ". " +
			userPage.ReplaceAllString(a.Annotations.Description, "[$2](../$1)"))
	}
	return m.String(), nil
}
