// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package metricslint checks that the metrics of a component follow the conventions of Prometheus and of this
// project. Only tests import it.
package metricslint

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

// Registry is a registry that keeps the collectors, so it can read the descriptions of metrics that do not have a value
// yet.
type Registry struct {
	*prometheus.Registry
	collectors []prometheus.Collector
}

// NewRegistry returns an empty Registry.
func NewRegistry() *Registry { return &Registry{Registry: prometheus.NewRegistry()} }

// Register implements prometheus.Registerer.
func (r *Registry) Register(c prometheus.Collector) error {
	if err := r.Registry.Register(c); err != nil {
		return err
	}
	r.collectors = append(r.collectors, c)
	return nil
}

// MustRegister implements prometheus.Registerer.
func (r *Registry) MustRegister(collectors ...prometheus.Collector) {
	for _, c := range collectors {
		if err := r.Register(c); err != nil {
			panic(err)
		}
	}
}

// Check lints the registered metrics with promlint, and the descriptions of all metrics, including those without
// values. The named metrics must have values. Otherwise, promlint does not see them.
func (r *Registry) Check(t testing.TB, names ...string) {
	t.Helper()
	problems, err := r.problems(names)
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		t.Error(problem)
	}
}

func (r *Registry) problems(names []string) (problems []string, err error) {
	families, err := r.Gather()
	if err != nil {
		return nil, fmt.Errorf("gather the metrics: %w", err)
	}
	gathered := map[string]bool{}
	for _, family := range families {
		gathered[family.GetName()] = true
	}
	for _, name := range names {
		if !gathered[name] {
			problems = append(problems, fmt.Sprintf("metric %s has no value", name))
		}
	}
	found, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		return nil, fmt.Errorf("lint the metrics: %w", err)
	}
	for _, problem := range found {
		problems = append(problems, fmt.Sprintf("metric %s: %s", problem.Metric, problem.Text))
	}
	descriptions := r.descriptions()
	if len(descriptions) < len(families) {
		problems = append(problems, fmt.Sprintf("%d metrics are described and %d have values",
			len(descriptions), len(families)))
	}
	for _, description := range descriptions {
		problems = append(problems, lintDescription(description)...)
	}
	return problems, nil
}

// descriptions returns the descriptions of all registered metrics.
func (r *Registry) descriptions() (descriptions []string) {
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

// lintDescription checks what promlint checks only for metrics that have
// values, and conventions that promlint does not check.
func lintDescription(description string) (problems []string) {
	parts := descriptionParts.FindStringSubmatch(description)
	if parts == nil {
		return []string{"cannot parse the description " + description}
	}
	name, help, labels := parts[1], parts[2], parts[3]
	add := func(format string, args ...any) {
		problems = append(problems, fmt.Sprintf("metric "+name+": "+format, args...))
	}
	if !strings.HasPrefix(name, "dra_shared_") {
		add("the name does not start with dra_shared_")
	}
	if unit := derivedUnit.FindString(name); unit != "" {
		add("%s is not a base unit of Prometheus", strings.Trim(unit, "_"))
	}
	if !strings.HasSuffix(help, ".") {
		add("the help text %q is not a sentence", help)
	}
	for label := range strings.SplitSeq(labels, ",") {
		switch {
		case label == "":
		case !labelName.MatchString(label):
			add("label %q is not in snake case", label)
		case label == "what" || label == "type" || label == "name":
			add("label %q does not say what its values are", label)
		}
	}
	return problems
}
