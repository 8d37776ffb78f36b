// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package retry limits the time between two attempts of a controller to reconcile an object.
package retry

import (
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// minInterval is the time after the first failure of a reconcile. It doubles with each subsequent failure up to
// MaxInterval. It is short because pods wait.
const minInterval = 5 * time.Millisecond

// MaxInterval is the longest time after a failure of a reconcile. The default of controller-runtime, 1000 s, would
// delay the reconcile of an object without events by up to 16 minutes after an outage of the API server.
const MaxInterval = 30 * time.Second

// Options returns the options of a controller that retries after at most MaxInterval. It has one worker.
func Options() controller.Options {
	return controller.Options{
		RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](minInterval, MaxInterval),
	}
}
