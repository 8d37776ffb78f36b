// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// Kind is a kind of device that several claims can share. The driver keeps the records and calls the Kind for
// everything that depends on the device. A Kind also implements the optional interfaces that it needs: in this file,
// and, for kinds that attach shares to pods, Attacher in attacher.go, and Reserver and Renewer in reserver.go.
type Kind interface {
	// Name returns the name of the kind in records, metrics, and log entries.
	Name() string
	// Refresh discovers the node's devices, and sets up new and changed ones for sharing. shares are all of the kind's
	// recorded shares: Devices keeps returning their devices even if they are missing from the node.
	Refresh(ctx context.Context, shares []record.Share) (Refreshed, error)
	// Devices returns the devices to publish, as of the last Refresh. Devices omits a device that
	// was already missing when the plugin started, because its attributes are unknown: if a device
	// lacks an attribute that a selector reads, the scheduler reports an error and does not
	// allocate any other device either.
	Devices() []resourceapi.Device
	// Has reports whether the kind has, or has had, a device of that name.
	Has(device string) bool
	// Configure decodes, merges, defaults, and validates the opaque parameters of a share. parameters lists the
	// DeviceClass's before the claim's. namespace is the namespace of the claim and of the pods that can use it. The
	// driver records the result, and uses it until the share is released, even if the configuration changes.
	Configure(ctx context.Context, namespace string, share record.Share, parameters [][]byte) (json.RawMessage, error)
	// Admit returns an error if the device has no room for the share in addition to others. It must
	// not modify others.
	Admit(share record.Share, others []*record.Share) error
	// Edits returns the CDI edits of containers with the share.
	Edits(share record.Share) (cdi.Edits, error)
}

// Refreshed is the result of Kind.Refresh.
type Refreshed struct {
	// Changed reports whether the setup of a device was repaired or has changed:
	// then the driver must restore the shares on it.
	Changed bool
	// Affected are the names of the devices where only the shares' status has changed.
	Affected []string
	// RequeueAfter is the time until the driver refreshes again without an event, if less than resyncInterval; 0 means
	// resyncInterval.
	RequeueAfter time.Duration
}

// Watcher is a Kind that observes its devices or its attachments.
type Watcher interface {
	// Watch calls changed for everything that happens, one call at a time, until ctx ends. An error that wraps
	// ErrWatchUnavailable leaves the driver running with periodic resyncs; any other error stops it.
	Watch(ctx context.Context, changed func(Change)) error
}

// ErrWatchUnavailable is wrapped by a Watcher's error if its events are not available on this node and the kind works
// without them.
var ErrWatchUnavailable = errors.New("events of devices are not available")

// Change holds the observations of a Watcher since its last call.
type Change struct {
	// Resync reports whether events may have been lost: then anything may have changed.
	Resync bool
	// Devices reports whether Refresh may find a difference.
	Devices bool
	// Detached selects the attachments in sandboxes that may have ended; nil selects none.
	Detached func(*attach.Record) bool
	// Modified selects the attachments that may have changed; nil selects none.
	Modified func(*attach.Record) bool
	// Unprotected selects the attachments that Protector.Protect applies to, besides the ones that Modified selects;
	// nil selects none.
	Unprotected func(*attach.Record) bool
}

// ReadinessChecker is a Kind that may be unable to prepare or attach shares.
type ReadinessChecker interface {
	// Ready returns the reason why the kind cannot prepare or attach shares, or nil.
	Ready() error
}

// ProblemReporter is a Kind that may be unable to share configured devices.
type ProblemReporter interface {
	// Problems returns the configured devices that are not shared, as of the last
	// Refresh.
	Problems() []Problem
}

// Problem is a configured device that is not shared.
type Problem struct {
	// Device is the name that selects the device in the configuration.
	Device string
	// Message states the cause and the remedy.
	Message string
}

// WarningReporter is a Kind that warns of events on shared devices.
type WarningReporter interface {
	// Warnings returns the current warnings. The driver asks for them after each Refresh.
	Warnings() []Warning
}

// Warning is a problem that the driver reports by an event on the node, and by another event when it is over.
type Warning struct {
	// Device is the name that selects the device in the configuration.
	Device string
	// Reason and Message go into the event. Reason and Device identify the problem.
	Reason, Message string
	// EndReason and EndMessage go into the event when the problem is over.
	EndReason, EndMessage string
}

// TakeoverChecker is a Kind that can check whether it can serve the running plugin's published devices, without
// changing the node.
type TakeoverChecker interface {
	// CheckTakeover returns why the kind cannot serve the published devices that its configuration names, or nil. It
	// does not change the node.
	CheckTakeover(ctx context.Context, published []resourceapi.Device) error
	// RecheckTakeover does the same with the devices of the last Refresh.
	RecheckTakeover(published []resourceapi.Device) error
}

// HealthReporter is a Kind that knows whether its devices work.
type HealthReporter interface {
	// Health returns the health of the devices, as of the last Refresh.
	Health() []Health
}

// Health is the health of one device.
type Health struct {
	Device  string
	Healthy bool
	Message string // the reason if the device is unhealthy
}

// Cleaner is a Kind that leaves state on the node, which must be removed with the driver.
type Cleaner interface {
	// Cleanup restores the node to the state before the driver was installed.
	// The driver calls it only if no claim and no other plugin needs that
	// state.
	Cleanup(ctx context.Context) error
}

// CombinationValidator is a Kind with shares that can conflict within one pod.
type CombinationValidator interface {
	// ValidateCombination refuses shares of one claim that exclude each other.
	ValidateCombination(shares []record.Share) error
}

// MultiNode is a Kind with devices that span nodes. They are in separate pools, which the controller publishes; the
// driver uses Devices only to describe shares to containers.
type MultiNode interface {
	// HasPool reports whether a pool belongs to this kind.
	HasPool(pool string) bool
}

// ConditionReporter is a Kind that reports conditions of shares that are not
// attached to pods.
type ConditionReporter interface {
	// Conditions returns the conditions of a prepared share, including Ready.
	Conditions(share record.Share) []metav1.Condition
}

// MetricsCollector is a Kind with metrics in addition to the driver's metrics for all kinds.
type MetricsCollector interface {
	// DescribeMetrics sends the descriptors of the metrics, before the first Refresh.
	DescribeMetrics(descriptions chan<- *prometheus.Desc)
	// CollectMetrics sends the current values. claims are all of the node's claim records, with shares of this and
	// other kinds; it does not change them.
	CollectMetrics(claims []*record.Claim, out chan<- prometheus.Metric)
}
