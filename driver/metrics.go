package driver

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// metrics of the plugin. docs/user/operations.md has what to watch them for.
type metrics struct {
	seconds  *prometheus.HistogramVec
	reports  *prometheus.CounterVec
	orphans  prometheus.Counter
	degraded *prometheus.GaugeVec
}

// Operations, as the metric has them.
const (
	operationPrepare   = "prepare"
	operationAttach    = "attach"
	operationDetach    = "detach"
	operationUnprepare = "unprepare"
)

// buckets in seconds: a step per millisecond where most attaches and prepares
// are, and up to the limits of kubelet and hook.
var buckets = []float64{.00025, .0005, .001, .002, .003, .004, .005, .006, .008, .01, .015, .02, .03, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60}

func newMetrics(d *Driver) *metrics {
	m := &metrics{
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "dra_shared_operation_duration_seconds", Buckets: buckets,
			Help: "How long preparing, attaching, detaching and unpreparing one claim or share took, by outcome (ok, error).",
		}, []string{"operation", "outcome"}),
		reports: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dra_shared_status_reports_total",
			Help: "Attempts to report a claim's status, by outcome: written, unchanged, gone (nobody is left to read it); tried again after conflict, forbidden, throttled, refused, unreachable.",
		}, []string{"outcome"}),
		orphans: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "dra_shared_orphans_removed_total",
			Help: "What belonged to no claim and was removed. The log names each.",
		}),
		degraded: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "dra_shared_degraded",
			Help: "1 for what does not work on this node or cluster. The log says what follows from it.",
		}, []string{"what"}),
	}
	if r := d.options.Metrics; r != nil {
		r.MustRegister(m.seconds, m.reports, m.orphans, m.degraded, &deviceCollector{d})
	}
	return m
}

// observe notes how long an operation took that began at start.
func (m *metrics) observe(operation string, start time.Time, err error) {
	outcome := "ok"
	if err != nil {
		outcome = "error"
	}
	m.seconds.WithLabelValues(operation, outcome).Observe(time.Since(start).Seconds())
}

// deviceCollector reads what there is of devices when it is asked.
type deviceCollector struct{ driver *Driver }

var (
	descShares   = prometheus.NewDesc("dra_shared_device_shares", "Shares of a device that claims hold on this node.", []string{"device"}, nil)
	descGranted  = prometheus.NewDesc("dra_shared_device_granted", "What is granted of a device's capacity, in its unit (bandwidth: bits per second).", []string{"device", "capacity"}, nil)
	descCapacity = prometheus.NewDesc("dra_shared_device_capacity", "A device's capacity as published, in its unit (bandwidth: bits per second).", []string{"device", "capacity"}, nil)
	descHealthy  = prometheus.NewDesc("dra_shared_device_healthy", "1 if the device works.", []string{"device"}, nil)
	descBits     = prometheus.NewDesc("dra_shared_device_bits_total", "Bits that went through a device's queues, by direction (send, receive), as the kernel counts them.", []string{"device", "direction"}, nil)
)

// Describe implements prometheus.Collector.
func (c *deviceCollector) Describe(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descShares, descGranted, descCapacity, descHealthy, descBits} {
		descriptions <- d
	}
}

// Collect implements prometheus.Collector.
func (c *deviceCollector) Collect(out chan<- prometheus.Metric) {
	claims, _ := c.driver.claims.List() // unreadable ones are told where they matter
	for _, k := range c.driver.options.Kinds {
		c.collectKind(out, k, claims)
	}
}

func (c *deviceCollector) collectKind(out chan<- prometheus.Metric, k Kind, claims []*record.Claim) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	shares := sharesOf(claims, k.Name())
	for _, device := range k.Devices() {
		on := slices.DeleteFunc(slices.Clone(shares), func(s record.Share) bool { return s.Device != device.Name || s.AdminAccess })
		gauge(descShares, float64(len(on)), device.Name)
		for name, capacity := range device.Capacity {
			gauge(descCapacity, capacity.Value.AsApproximateFloat64(), device.Name, string(name))
			sum := 0.0
			for _, s := range on {
				granted := s.Capacity[string(name)]
				sum += granted.AsApproximateFloat64()
			}
			gauge(descGranted, sum, device.Name, string(name))
		}
	}
	for _, h := range k.Health() {
		healthy := 0.0
		if h.Healthy {
			healthy = 1
		}
		gauge(descHealthy, healthy, h.Device)
	}
	if meter, ok := k.(Meter); ok {
		for _, t := range meter.Traffic() {
			for direction, bits := range map[string]uint64{"send": t.SentBits, "receive": t.ReceivedBits} {
				out <- prometheus.MustNewConstMetric(descBits, prometheus.CounterValue, float64(bits), t.Device, direction)
			}
		}
	}
}
