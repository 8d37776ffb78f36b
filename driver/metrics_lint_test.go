// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

// describingRegistry is a registry that keeps the collectors, so that a test can
// read the descriptions of metrics that have no value yet.
type describingRegistry struct {
	*prometheus.Registry
	collectors []prometheus.Collector
}

func (r *describingRegistry) MustRegister(collectors ...prometheus.Collector) {
	r.collectors = append(r.collectors, collectors...)
	r.Registry.MustRegister(collectors...)
}

// descriptions returns the descriptions of all registered metrics.
func (r *describingRegistry) descriptions() []string {
	var descriptions []string
	for _, c := range r.collectors {
		described := make(chan *prometheus.Desc)
		go func() {
			c.Describe(described)
			close(described)
		}()
		for d := range described {
			descriptions = append(descriptions, d.String())
		}
	}
	return descriptions
}

var (
	descriptionParts = regexp.MustCompile(`^Desc\{fqName: "([^"]+)", help: "([^"]*)".*variableLabels: \{(.*)\}\}$`)
	labelName        = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)
	// derivedUnit matches units that are multiples or parts of a base unit.
	derivedUnit = regexp.MustCompile(`_(bits?|kbits?|mbits?|milliseconds|microseconds|minutes|hours|percent)(_|$)`)
)

// TestMetrics_exposition lints the metrics of a plugin with a prepared claim with
// promlint, and the descriptions of all metrics, including those without values.
func TestMetrics_exposition(t *testing.T) {
	p := newPlugin(t)
	p.stop()
	registry := &describingRegistry{Registry: prometheus.NewRegistry()}
	p.options.Metrics = registry
	p.start()
	claim := p.claim("metrics", "100M", "")
	p.mustPrepare(claim)

	families, err := registry.Gather()
	if err != nil {
		t.Fatalf("gather the plugin's metrics: %v", err)
	}
	gathered := map[string]bool{}
	for _, family := range families {
		gathered[family.GetName()] = true
	}
	for _, want := range []string{"dra_shared_operation_duration_seconds", "dra_shared_device_shares"} {
		if !gathered[want] {
			t.Errorf("metric %s has no value after a claim was prepared", want)
		}
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatalf("lint the plugin's metrics: %v", err)
	}
	for _, problem := range problems {
		t.Errorf("metric %s: %s", problem.Metric, problem.Text)
	}

	descriptions := registry.descriptions()
	if len(descriptions) < len(families) {
		t.Errorf("%d metrics are described and %d have values", len(descriptions), len(families))
	}
	for _, description := range descriptions {
		parts := descriptionParts.FindStringSubmatch(description)
		if parts == nil {
			t.Errorf("cannot parse the description %s", description)
			continue
		}
		lintDescription(t, parts[1], parts[2], parts[3])
	}
	p.unprepare(claim)
}

// lintDescription checks what promlint checks only for metrics that have
// values, and conventions that promlint does not check.
func lintDescription(t *testing.T, name, help, labels string) {
	t.Helper()
	if !strings.HasPrefix(name, "dra_shared_") {
		t.Errorf("metric %s: the name does not start with dra_shared_", name)
	}
	if unit := derivedUnit.FindString(name); unit != "" {
		t.Errorf("metric %s: %s is not a base unit of Prometheus", name, strings.Trim(unit, "_"))
	}
	if !strings.HasSuffix(help, ".") {
		t.Errorf("metric %s: the help text %q is not a sentence", name, help)
	}
	for label := range strings.SplitSeq(labels, ",") {
		switch {
		case label == "":
		case !labelName.MatchString(label):
			t.Errorf("metric %s: label %q is not in snake case", name, label)
		case label == "what" || label == "type" || label == "name":
			t.Errorf("metric %s: label %q does not say what its values are", name, label)
		}
	}
}
