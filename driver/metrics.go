// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach/install"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// metrics are the plugin's metrics, except for those that deviceCollector reads on demand. docs/user/operations.md
// explains how to use them.
type metrics struct {
	duration *prometheus.HistogramVec
	reports  *prometheus.CounterVec
	orphans  prometheus.Counter
	degraded *prometheus.GaugeVec
}

// Operations, as values of a metric label.
const (
	operationPrepare   = "prepare"
	operationAttach    = "attach"
	operationDetach    = "detach"
	operationUnprepare = "unprepare"
)

// buckets in seconds: fine where most operations are, and up to the timeouts of
// the kubelet and the hook.
var buckets = []float64{
	.00025,
	.0005,
	.001,
	.002,
	.003,
	.004,
	.005,
	.006,
	.008,
	.01,
	.015,
	.02,
	.03,
	.05,
	.1,
	.2,
	.5,
	1,
	2,
	5,
	10,
	30,
	60,
}

func newMetrics(o Options, records *nodeRecords, kinds kinds) *metrics {
	m := &metrics{
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "dra_shared_operation_duration_seconds",
			Help:    "Duration of preparing, attaching, detaching, or unpreparing one claim or share, by outcome (ok, error).",
			Buckets: buckets,
		}, []string{"operation", "outcome"}),
		reports: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dra_shared_status_reports_total",
			Help: "Attempts to report the status of a claim, by outcome: written, unchanged, gone (the claim was " +
				"deleted, deallocated, or unprepared); conflict, forbidden, throttled, refused, and unreachable are retried.",
		}, []string{"outcome"}),
		orphans: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "dra_shared_orphans_removed_total",
			Help: "Objects of the driver that no claim needed and that garbage collection removed. The log names each.",
		}),
		degraded: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "dra_shared_degraded",
			Help: "1 after the plugin found that the named feature does not work, 0 after it saw the feature recover; some " +
				"stay 1 until the plugin restarts. The log states the consequence.",
		}, []string{"condition"}),
	}
	if o.Metrics != nil {
		devices := &deviceCollector{installation: o.Installation, records: records, kinds: kinds}
		o.Metrics.MustRegister(m.duration, m.reports, m.orphans, m.degraded, devices)
	}
	return m
}

// observe records the duration and outcome of an operation that began at start.
func (m *metrics) observe(operation string, start time.Time, err error) {
	outcome := "ok"
	if err != nil {
		outcome = "error"
	}
	m.duration.WithLabelValues(operation, outcome).Observe(time.Since(start).Seconds())
}

// deviceCollector reads the state of the devices when metrics are collected.
type deviceCollector struct {
	installation *install.Installation // nil if another process installs the hook
	records      *nodeRecords
	kinds        kinds
}

var (
	descShares = prometheus.NewDesc("dra_shared_device_shares",
		"Shares of a device that claims hold on this node.", []string{"kind", "device"}, nil)
	descGranted = prometheus.NewDesc(
		"dra_shared_device_granted",
		"Sum of the grants of a device's capacity. unit is bit_per_second (bandwidth), byte (memory), or integer.",
		[]string{"kind", "device", "capacity", "unit"},
		nil,
	)
	descCapacity = prometheus.NewDesc(
		"dra_shared_device_capacity",
		"Published capacity of a device. unit is bit_per_second (bandwidth), byte (memory), or integer.",
		[]string{"kind", "device", "capacity", "unit"},
		nil,
	)
	descHealthy = prometheus.NewDesc("dra_shared_device_healthy",
		"1 if the device works, 0 if it does not.", []string{"kind", "device"}, nil)
	descUnusable = prometheus.NewDesc(
		"dra_shared_device_unusable",
		"1 for a device that the configuration names and that the plugin cannot share. An event on the node states the "+
			"cause.",
		[]string{"device"},
		nil,
	)
	descHook = prometheus.NewDesc(
		"dra_shared_hook_installed",
		"1 if the runtime can run the hook, without which no container with a share starts; 0 if the hook is missing.",
		nil,
		nil,
	)
)

// Describe implements prometheus.Collector.
func (c *deviceCollector) Describe(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descShares, descGranted, descCapacity, descHealthy, descUnusable, descHook,
	} {
		descriptions <- d
	}
	for _, collector := range kindsOf[MetricsCollector](c.kinds) {
		collector.DescribeMetrics(descriptions)
	}
}

// Collect implements prometheus.Collector.
func (c *deviceCollector) Collect(out chan<- prometheus.Metric) {
	if installation := c.installation; installation != nil {
		installed := 1.0
		if installation.Check() != nil {
			installed = 0
		}
		gauge(out, descHook, installed)
	}
	claims, _ := c.records.claims.List() // unreadable records are logged by restore
	for _, k := range c.kinds.all {
		shares := sharesOf(claims, k.Name())
		for _, device := range k.Devices() {
			collectDevice(out, k.Name(), device, shares)
		}
		if reporter, ok := k.(HealthReporter); ok {
			collectHealth(out, k.Name(), reporter.Health())
		}
		if reporter, ok := k.(ProblemReporter); ok {
			for _, p := range reporter.Problems() {
				gauge(out, descUnusable, 1, p.Device)
			}
		}
		if collector, ok := k.(MetricsCollector); ok {
			collector.CollectMetrics(claims, out)
		}
	}
}

func gauge(out chan<- prometheus.Metric, d *prometheus.Desc, value float64, labels ...string) {
	out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}

func collectDevice(out chan<- prometheus.Metric, kind string, device resourceapi.Device, shares []record.Share) {
	on := slices.DeleteFunc(
		slices.Clone(shares),
		func(s record.Share) bool { return s.Device != device.Name || s.AdminAccess },
	)
	gauge(out, descShares, float64(len(on)), kind, device.Name)
	for name, capacity := range device.Capacity {
		labels := []string{kind, device.Name, string(name), v1alpha1.CapacityUnit(string(name))}
		gauge(out, descCapacity, capacity.Value.AsApproximateFloat64(), labels...)
		sum := 0.0
		for _, s := range on {
			grant := s.Capacity[string(name)]
			sum += grant.AsApproximateFloat64()
		}
		gauge(out, descGranted, sum, labels...)
	}
}

func collectHealth(out chan<- prometheus.Metric, kind string, health []Health) {
	for _, h := range health {
		value := 0.0
		if h.Healthy {
			value = 1
		}
		gauge(out, descHealthy, value, kind, h.Device)
	}
}
