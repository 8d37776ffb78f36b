// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"
	controllermetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/dra-shared/dra-driver-shared/accel"
	"github.com/dra-shared/dra-driver-shared/api"
	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	_ "github.com/dra-shared/dra-driver-shared/controlplane" // registers the metrics of the controller
	"github.com/dra-shared/dra-driver-shared/controlplane/admission"
	"github.com/dra-shared/dra-driver-shared/controlplane/endpoints"
	"github.com/dra-shared/dra-driver-shared/controlplane/metrics"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/accelerator"
	"github.com/dra-shared/dra-driver-shared/driver/fabric"
	"github.com/dra-shared/dra-driver-shared/driver/nic"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

func metricsPage(string) (string, error) {
	plugin, err := pluginMetrics()
	if err != nil {
		return "", err
	}
	registry, ok := controllermetrics.Registry.(prometheus.Collector)
	if !ok {
		return "", fmt.Errorf("the registry %T of the controller cannot describe its metrics", controllermetrics.Registry)
	}
	controller, err := describe(registry)
	if err != nil {
		return "", err
	}
	states, err := describe(&metrics.Collector{}) // registered while a replica leads
	if err != nil {
		return "", err
	}
	counters := prometheus.NewRegistry() // which the controller registers when it starts
	if _, err := admission.NewDenials(counters); err != nil {
		return "", err
	}
	if _, err := endpoints.NewWrites(counters); err != nil {
		return "", err
	}
	counted, err := describe(counters)
	if err != nil {
		return "", err
	}
	controller = slices.Concat(states, counted, controller)
	isStandard := func(d metric) bool {
		return strings.HasPrefix(d.name, "go_") || strings.HasPrefix(d.name, "process_")
	}

	var m markdown
	m.paragraph("Counters have names that end in `_total`. Both components also export the standard metrics " +
		"of the Prometheus client for Go, with the prefixes `go_` and `process_`.")
	m.heading(2, "Plugin")
	m.paragraph("The plugin serves its metrics at the chart's `plugin.metricsAddress`, path `/metrics`.")
	m.metrics(slices.DeleteFunc(plugin, isStandard))
	m.heading(2, "Controller")
	m.paragraph("The controller serves its metrics at the chart's `controller.metricsAddress`, path `/metrics`. " +
		"The leading replica exports the gauges with the prefix `dra_shared_`, and each replica counts what it denies. " +
		"The metrics without the prefix come from controller-runtime and client-go.")
	m.metrics(slices.DeleteFunc(controller, isStandard))
	return m.String(), nil
}

// pluginMetrics returns the metrics that the plugin registers. Creating a driver without starting
// it only creates directories.
func pluginMetrics() ([]metric, error) {
	dir, err := os.MkdirTemp("", "reference")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	registry := prometheus.NewRegistry()
	nics, err := nic.New(nic.Options{
		Node: &netdev.Node{}, Inventory: netdev.NewInventory("/sys"), Config: &config.DriverConfig{},
	})
	if err != nil {
		return nil, err
	}
	if _, err := driver.New(driver.Options{
		DriverName: api.DriverName, NodeName: "node", Client: &kubernetes.Clientset{}, Hook: "/hook", Metrics: registry,
		PluginDir: filepath.Join(dir, "plugin"), RegistryDir: filepath.Join(dir, "registry"),
		CDIDir: filepath.Join(dir, "cdi"), RunDir: filepath.Join(dir, "run"),
		Kinds: []driver.Kind{nics, accelerator.New(accel.Host{}, nil, ""), fabric.New(&config.DriverConfig{}, "")},
	}); err != nil {
		return nil, err
	}
	return describe(registry)
}

// metric is a registered metric.
type metric struct {
	name, help string
	labels     []string
}

// A Desc can only be formatted.
var description = regexp.MustCompile(
	`^Desc\{fqName: "([^"]*)", help: "(.*?)"(?:, unit: "[^"]*")?, constLabels: .*variableLabels: \{(.*)\}\}$`)

// describe returns the metrics of a collector, by name.
func describe(c prometheus.Collector) (metrics []metric, err error) {
	descriptions := make(chan *prometheus.Desc)
	go func() {
		c.Describe(descriptions)
		close(descriptions)
	}()
	for d := range descriptions {
		match := description.FindStringSubmatch(d.String())
		if match == nil {
			err = fmt.Errorf("unexpected format of a metric's description: %s", d)
			continue
		}
		m := metric{name: match[1], help: strings.ReplaceAll(match[2], `\"`, `"`)}
		if match[3] != "" {
			m.labels = strings.Split(match[3], ",")
		}
		metrics = append(metrics, m)
	}
	slices.SortFunc(metrics, func(a, b metric) int { return strings.Compare(a.name, b.name) })
	return slices.CompactFunc(metrics, func(a, b metric) bool { return a.name == b.name }), err
}

func (m *markdown) metrics(metrics []metric) {
	for _, d := range metrics {
		term := code(d.name)
		if len(d.labels) > 0 {
			labels := slices.Clone(d.labels)
			for i, label := range labels {
				labels[i] = code(label)
			}
			term += " (labels " + strings.Join(labels, ", ") + ")"
		}
		m.item(term, escape(d.help))
	}
}
