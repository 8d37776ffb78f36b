// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// Kind is a kind of device that several claims can share. The driver keeps the records and calls
// the Kind for everything that depends on the device. A Kind also implements the optional interfaces
// in this file that it needs.
type Kind interface {
	// Name returns the name of the kind in records, metrics, and log entries.
	Name() string
	// Refresh discovers the devices of the node, and sets up for sharing those that are not set up
	// yet or have changed. shares are all recorded shares of the kind: Devices keeps returning
	// their devices even if these are missing from the node.
	Refresh(ctx context.Context, shares []record.Share) (Refreshed, error)
	// Devices returns the devices to publish, as of the last Refresh. Devices omits a device that
	// was already missing when the plugin started, because its attributes are unknown: if a device
	// lacks an attribute that a selector reads, the scheduler reports an error and does not
	// allocate any other device either.
	Devices() []resourceapi.Device
	// Has reports whether the kind has, or has had, a device of that name.
	Has(device string) bool
	// Configure decodes, merges, defaults, and validates the opaque parameters of a share.
	// parameters lists those of the DeviceClass before those of the claim. namespace is the
	// namespace of the claim and of the pods that can use it. The driver records the result, and
	// uses it until the share is released, even if the configuration changes.
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
	// Affected are the names of the devices of which only the status of shares has changed.
	Affected []string
	// RequeueAfter is the time after which the driver refreshes again without an event, if that
	// is less than resyncInterval; 0 means resyncInterval.
	RequeueAfter time.Duration
}

// Watcher is a Kind that observes its devices or its attachments.
type Watcher interface {
	// Watch calls changed for everything that happened, one call at a time,
	// until ctx ends. An error that wraps ErrWatchUnavailable leaves the driver
	// running with periodic resyncs; any other error stops it.
	Watch(ctx context.Context, changed func(Change)) error
}

// ErrWatchUnavailable is wrapped by the error of a Watcher whose events are not
// available on this node, and without which the kind works.
var ErrWatchUnavailable = errors.New("events of devices are not available")

// Change holds the observations of a Watcher since its last call.
type Change struct {
	// Resync reports whether events may have been lost: then anything may have changed.
	Resync bool
	// Devices reports whether Refresh may find a difference.
	Devices bool
	// Detached selects the attachments whose sandboxes may have ended; nil
	// selects none.
	Detached func(*attach.Record) bool
	// Modified selects the attachments whose state may have changed; nil
	// selects none.
	Modified func(*attach.Record) bool
	// Unprotected selects the attachments to which Protector.Protect applies, besides
	// those of Modified; nil selects none.
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
	// Device is the name by which the configuration selects the device.
	Device string
	// Message states the cause and the remedy.
	Message string
}

// WarningReporter is a Kind that warns of events on shared devices.
type WarningReporter interface {
	// Warnings returns the current warnings. The driver asks for them after each Refresh.
	Warnings() []Warning
}

// Warning is a problem that the driver reports by an event on the node, and by another one when it
// is over.
type Warning struct {
	// Device is the name by which the configuration selects the device.
	Device string
	// Reason and Message go into the event. Reason and Device identify the problem.
	Reason, Message string
	// EndReason and EndMessage go into the event when the problem is over.
	EndReason, EndMessage string
}

// TakeoverChecker is a Kind that can check, without changing the node, whether it can serve the
// devices that the running plugin published.
type TakeoverChecker interface {
	// CheckTakeover returns the reason why the kind cannot serve as many of the
	// published devices as its configuration names, or nil. It does not change the
	// node.
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

// CombinationValidator is a Kind whose shares can conflict within one pod.
type CombinationValidator interface {
	// ValidateCombination refuses shares of one claim that exclude each other.
	ValidateCombination(shares []record.Share) error
}

// MultiNode is a Kind whose devices span nodes. They are in separate pools,
// which the controller publishes; the driver uses Devices only to describe
// shares to containers.
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
	// CollectMetrics sends the current values. claims are the records of all claims of the node,
	// which hold the shares of this and other kinds; it does not change them.
	CollectMetrics(claims []*record.Claim, out chan<- prometheus.Metric)
}

// Attacher is a Kind whose shares become part of a pod when it starts.
type Attacher interface {
	// Attaches reports whether the share is attached to pods. A share with admin access, for
	// example, may serve observation only.
	Attaches(share record.Share) bool
	// ValidateConsumers refuses another pod for a share that cannot serve
	// several. others are the pods that use the share, as namespace/name.
	ValidateConsumers(share record.Share, others []string) error
	// Attach sets up a share in a sandbox. If it fails, it has removed everything that it created,
	// unless the error wraps ErrRemains. If the error wraps ErrRetryAttach, the hook tries again
	// for some time.
	Attach(ctx context.Context, share record.Share, request attach.Request, sandbox Sandbox) (Attached, error)
	// Restore repairs the state on the node that Attach has set up and that has changed since. It
	// reports whether the attachment's sandbox exists; if so, the driver keeps the attachment, even
	// if Restore fails.
	Restore(ctx context.Context, share record.Share, r attach.Record) (exists bool, err error)
	// Detach undoes Attach, even if the sandbox has ended.
	Detach(ctx context.Context, r attach.Record) error
	// Release removes the state on the node that all attachments of a share have in common, after
	// they have been detached.
	Release(ctx context.Context, share record.Share) error
	// Read returns the state of an attachment in the kernel. It may change the state first: a Protector blocks or
	// unblocks the attachment, as Protect does.
	Read(ctx context.Context, share record.Share, r attach.Record) (State, error)
	// StatusData returns the contents of status.devices[].data for the
	// attachments of one share, of which there is at least one. failed is the
	// number of pods to which attaching the share failed.
	StatusData(attachments []PodState, failed int) any
	// Orphans returns the kernel objects of this kind that none of the shares
	// and attachments needs.
	Orphans(ctx context.Context, shares []record.Share, attachments []attach.Record) ([]Orphan, error)
}

// Protector is an Attacher that protects the node and other pods from a pod that has changed
// its attachment.
type Protector interface {
	// Protect blocks or unblocks an attachment, depending on its state. The driver calls it before
	// it reads the state of an attachment that may have changed, without the claim's lock, and
	// without waiting for earlier reports of the claim's status.
	Protect(r attach.Record) error
}

// ErrRetryAttach is wrapped by an error of Attach whose cause the driver is about to repair. A pod
// whose restart policy is Never would otherwise fail.
var ErrRetryAttach = errors.New("trying again")

// ErrRemains is wrapped by an error of Attach if a part of the attachment may still exist and use the
// reservation. The next attempt to attach, or the end of the pod, removes it.
var ErrRemains = errors.New("the reservation is kept until the share is attached or the pod ends")

// ErrPacketNeeded is wrapped by an error of Attach that needs Sandbox.Packet. The hook then opens the
// socket, and Attach is called again.
var ErrPacketNeeded = errors.New(
	"the hook must open a packet socket in the pod; a hook of an earlier release cannot do that")

// Renewer is an Attacher whose attachments must be updated while their pods run, such as those with
// leased addresses.
type Renewer interface {
	// Renew keeps the attachments of the kind up to date until ctx ends.
	Renew(ctx context.Context, attachments Attachments)
}

// Attachments are the attachments that a Renewer keeps up to date.
type Attachments interface {
	// List returns the selected attachments of the kind. While a newer plugin runs, which keeps them up
	// to date, it returns none.
	List(selected func(*attach.Record) bool) ([]Attachment, error)
	// Update calls change with the current record of an attachment, while it holds the lock of the
	// claim. change calls write to record another payload. Afterwards, Update has the status of the
	// claim reported. If the attachment is no longer recorded, Update returns ErrEnded; if a newer
	// plugin runs, ErrOutdated.
	Update(ctx context.Context, r attach.Record,
		change func(a Attachment, write func(payload json.RawMessage) error) error) error
}

// ErrOutdated means that the caller must not change an attachment.
var ErrOutdated = errors.New("the attachment has ended, or a newer plugin runs")

// ErrEnded wraps ErrOutdated and means that the attachment has ended.
var ErrEnded = fmt.Errorf("it is no longer recorded: %w", ErrOutdated)

// Comparer is an Attacher that compares all its attachments with the kernel at once.
// After a restart, and when events were lost, the driver then restores only the altered
// ones.
type Comparer interface {
	// Altered returns the attachments that Restore may have to change, or whose sandbox
	// has ended.
	Altered(ctx context.Context, attachments []Attachment) ([]Attachment, error)
}

// Attachment is the record of an attachment together with its share.
type Attachment struct {
	Share  record.Share
	Record attach.Record
}

// Reserver is an Attacher whose attachments need resources, such as addresses, that no other
// attachment may get while this one exists. The driver records the reservation before it calls
// Attach, and removes the record after Detach, so that a crash does not lose the reservation.
type Reserver interface {
	// ReserveForClaim acquires the resources that only this claim may use, such as the addresses that its
	// parameters name. The driver calls it while it prepares the claim, after it has written the claim
	// record.
	ReserveForClaim(ctx context.Context, share record.Share, claim ReservingClaim, records Records) error
	// UnreserveForClaim gives up the resources that ReserveForClaim acquired for a share. The driver calls
	// it after it has removed the claim record.
	UnreserveForClaim(share record.Share)
	// Reserve calls record with the reservation for an attachment: the namespace, and a payload
	// that Attach gets in Sandbox.Reserved. If record fails, Reserve releases the reservation and
	// returns the error. If Reserve fails for another reason, a recorded reservation lasts until
	// the next attempt or the end of the pod, because an interrupted attempt may have left state
	// that uses it. Reserve does not call record if the share needs no reservation.
	Reserve(ctx context.Context, share record.Share, r attach.Request, sandbox Sandbox,
		records Records, record func(Attached) error) error
	// Unreserve releases the reservation of an attachment. The driver calls it after it has removed
	// the attachment record.
	Unreserve(r attach.Record)
	// RecoverReservations finds, before the driver serves, the attachments that have lost their
	// reservations while no plugin ran, and returns the change. After an error, or if it takes
	// long, the driver serves without the change, and MaintainReservations finds it later.
	RecoverReservations(ctx context.Context, records Records) (Change, error)
	// MaintainReservations keeps reservations available until ctx ends.
	MaintainReservations(ctx context.Context, records Records)
}

// ReservingClaim is a claim that is being prepared.
type ReservingClaim struct {
	UID, Namespace string
	// Pods are those for which the claim is reserved.
	Pods []string
}

// Records gives access to the claim records and attachment records of the node.
type Records interface {
	// Claims returns the readable records of claims that are prepared or are being prepared. It fails if the
	// records cannot be listed. The caller must not modify them.
	Claims() ([]*record.Claim, error)
	// List returns the attachment records. It fails if some of them cannot be read.
	List() ([]attach.Record, error)
	// Aside returns the UIDs of the claims of attachment records that were set aside, by the path of the record. Such a
	// record cannot be read, and its attachment may exist. Call Aside after List: a record may be set aside at
	// any time.
	Aside() (claimUIDs map[string]string, err error)
}

// Sandbox is a pod's network namespace as the hook passed it. The Attacher must not keep the files. Packet is nil
// unless the hook was asked for it; see ErrPacketNeeded.
type Sandbox struct {
	attach.Sockets
	// Reserved is the payload of a Reserver, or nil.
	Reserved json.RawMessage
}

// Attached is the result of Attacher.Attach.
type Attached struct {
	// Namespace identifies the sandbox in later events.
	Namespace attach.Namespace
	// Payload is recorded and given back to the kind in attach.Record.
	Payload json.RawMessage
	// NetworkData and Attributes equal the fields of the State that Read would return now. The driver writes
	// them to the device metadata without another reading of the kernel.
	NetworkData *resourceapi.NetworkDeviceData
	Attributes  attribute.Map
}

// State is the state of an attachment in the kernel.
type State struct {
	// Exists reports whether the attachment is in the sandbox, working or not. It is also true if the attachment
	// may be there, because an attempt to attach it has not finished.
	Exists bool
	// Pending reports whether Reserver.Reserve has written the record and Attach has not succeeded, or whether
	// the sandbox has ended and Detach follows. Such an attachment has no status.
	Pending bool
	// Ready reports whether the attachment exists and works.
	Ready bool
	// Reason (CamelCase) and Message explain why it does not.
	Reason, Message string
	// NetworkData describes the attachment in the claim's status and in the
	// device metadata; nil if it does not exist.
	NetworkData *resourceapi.NetworkDeviceData
	// Attributes are added to the device metadata.
	Attributes attribute.Map
	// Conditions are reported in addition to Ready.
	Conditions []metav1.Condition
	// Data is opaque to the driver; the kind reads it in StatusData.
	Data any
}

// PodState is the state of an attachment with its pod.
type PodState struct {
	Pod attach.Pod
	State
}

// Orphan is an object of the driver that no claim and no pod needs.
type Orphan struct {
	// Description names the object. Two orphans with the same description are
	// the same object.
	Description string
	Remove      func(context.Context) error
	// grace is the time for which the object must have been an orphan, if longer than Options.OrphanGrace.
	grace time.Duration
}
