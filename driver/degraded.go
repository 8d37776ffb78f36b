// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"

	"k8s.io/klog/v2"
)

// degraded reports a feature that does not work on this node or cluster: once in the log,
// and in a metric until recovered is called.
func (d *Driver) degraded(ctx context.Context, condition, consequence string, err error) {
	if _, logged := d.degradedLogged.LoadOrStore(condition, true); !logged {
		klog.FromContext(ctx).Error(err, "Feature unavailable", "condition", condition, "consequence", consequence)
	}
	d.metrics.degraded.WithLabelValues(condition).Set(1)
}

// recovered resets the metric of a condition. If the feature fails again, that is logged again.
func (d *Driver) recovered(condition string) {
	if _, degraded := d.degradedLogged.LoadAndDelete(condition); degraded {
		d.metrics.degraded.WithLabelValues(condition).Set(0)
	}
}

// isDegraded reports whether a condition was reported and still holds.
func (d *Driver) isDegraded(condition string) bool {
	_, degraded := d.degradedLogged.Load(condition)
	return degraded
}
