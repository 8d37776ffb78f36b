// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

// degradations are the features that do not work on this node or cluster. Conditions name them; see package v1alpha1.
type degradations struct {
	gauge  *prometheus.GaugeVec
	logged sync.Map // names of conditions that were logged and hold
}

// report reports that a condition holds: once in the log, and in a metric until end is called.
func (d *degradations) report(ctx context.Context, condition, consequence string, err error) {
	if _, logged := d.logged.LoadOrStore(condition, true); !logged {
		klog.FromContext(ctx).Error(err, "Feature does not work", "condition", condition, "consequence", consequence)
	}
	d.gauge.WithLabelValues(condition).Set(1)
}

// end resets the metric of a condition. If the feature fails again, that is logged again.
func (d *degradations) end(condition string) {
	if _, reported := d.logged.LoadAndDelete(condition); reported {
		d.gauge.WithLabelValues(condition).Set(0)
	}
}

// has reports whether a condition was reported and still holds.
func (d *degradations) has(condition string) bool {
	_, reported := d.logged.Load(condition)
	return reported
}
