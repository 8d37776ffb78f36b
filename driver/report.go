// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"hash/fnv"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// reporter writes the state of shares to the status of their claims. It has a separate queue, so a slow API server
// does not delay pods. It retries a claim until the status is written or the claim no longer exists.
type reporter struct {
	driverName string
	client     kubernetes.Interface
	events     events.EventRecorder
	records    *nodeRecords
	apiClaims  claimReader
	observer   *observer
	outcomes   *prometheus.CounterVec
	queue      workqueue.TypedRateLimitingInterface[types.UID]

	// written has the status that the reporter last wrote to each claim.
	written *claimstatus.Log
}

const (
	reportWorkers  = 4
	reportRetryMin = 50 * time.Millisecond
	reportRetryMax = 30 * time.Second
	reportTimeout  = 20 * time.Second
	// reportDelay delays a status that will probably change at once: the first
	// container starts about 0.2 s after Prepare, and one write replaces two.
	reportDelay = 500 * time.Millisecond
	// writeInterval is the shortest time between two attempts to write to one claim. It limits the writes that a pod
	// causes by repeatedly changing its attachment.
	writeInterval = time.Second
	// statusRounds is the number of resyncs that it takes to read each claim's status once.
	statusRounds = 10
	// checkInterval is how old a written status must be for the plugin to read the claim again, because another client
	// may have changed it. It is also about the time between two such reads.
	checkInterval = statusRounds*resyncInterval - resyncInterval/2
)

func newReporter(o Options, records *nodeRecords, observer *observer, outcomes *prometheus.CounterVec) *reporter {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](reportRetryMin, reportRetryMax)
	return &reporter{
		driverName: o.DriverName,
		client:     o.Client,
		events:     o.Events,
		records:    records,
		apiClaims:  claimReader{o.Client},
		observer:   observer,
		outcomes:   outcomes,
		queue:      workqueue.NewTypedRateLimitingQueue(limiter),
		written:    claimstatus.NewLog(clock.RealClock{}, checkInterval),
	}
}

// enqueue makes a worker report a claim.
func (r *reporter) enqueue(uid types.UID) { r.queue.Add(uid) }

// enqueueSoon makes a worker report a claim after reportDelay.
func (r *reporter) enqueueSoon(uid types.UID) { r.queue.AddAfter(uid, reportDelay) }

// enqueueClaimsOf makes a worker report the claims that hold shares of the devices.
func (r *reporter) enqueueClaimsOf(claims []*record.Claim, devices []string) {
	if len(devices) == 0 {
		return
	}
	for _, c := range claims {
		if slices.ContainsFunc(c.Shares, func(s record.Share) bool { return slices.Contains(devices, s.Device) }) {
			r.enqueue(c.UID)
		}
	}
}

// run reports the claims in the queue until ctx ends.
func (r *reporter) run(ctx context.Context) {
	var workers sync.WaitGroup
	for range reportWorkers {
		workers.Go(func() {
			for r.processNext(ctx) {
			}
		})
	}
	<-ctx.Done()
	r.queue.ShutDown()
	workers.Wait()
}

// enqueueRound makes the workers report the claims that are due in a round.
func (r *reporter) enqueueRound(round uint32) {
	claims, _ := r.records.claims.List() // unreadable records are logged by restore
	for _, c := range claims {
		if r.isDue(c, round) {
			r.enqueue(c.UID)
		}
	}
}

// isDue reports whether a claim is reported in a round. Each claim is, in one of statusRounds rounds. Claims with
// shares that should be attached but are not are reported in every round, because their status can change without an
// event.
func (r *reporter) isDue(claim *record.Claim, round uint32) bool {
	return isInRound(claim.UID, round) || !r.observer.isFullyAttached(claim)
}

// isInRound reports whether a claim's status is read in a round.
func isInRound(uid types.UID, round uint32) bool {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(uid)) // never fails
	return hash.Sum32()%statusRounds == round%statusRounds
}

// processNext reports the next claim in the queue. It returns false after the
// queue has shut down.
func (r *reporter) processNext(ctx context.Context) bool {
	uid, shutdown := r.queue.Get()
	if shutdown {
		return false
	}
	defer r.queue.Done(uid)
	if age, written := r.written.Age(uid); written && age < writeInterval {
		r.queue.AddAfter(uid, writeInterval-age) // one report then covers all changes until then
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	outcome, err := r.report(ctx, uid)
	if err == nil {
		r.outcomes.WithLabelValues(outcome).Inc()
		r.queue.Forget(uid)
		return true
	}
	if ctx.Err() == context.Canceled {
		return true // the plugin is stopping
	}
	r.written.Fail(uid)
	r.outcomes.WithLabelValues(failureOutcome(err)).Inc()
	klog.FromContext(ctx).
		Error(err, "Failed to report claim status; retrying", "claimUID", uid, "attempts", r.queue.NumRequeues(uid)+1)
	r.queue.AddRateLimited(uid)
	return true
}

// Outcomes of a report, as values of a metric label.
const (
	outcomeWritten   = "written"
	outcomeUnchanged = "unchanged" // the API server already has the status
	outcomeGone      = "gone"      // the claim is deleted, deallocated, or unprepared
)

// failureOutcome returns the outcome of a report that is retried.
func failureOutcome(err error) string {
	switch {
	case apierrors.IsConflict(err):
		return "conflict"
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return "forbidden"
	case apierrors.IsTooManyRequests(err):
		return "throttled"
	case apierrors.ReasonForError(err) != metav1.StatusReasonUnknown:
		return "refused"
	default:
		return "unreachable"
	}
}

// report writes the status of a claim if it differs from the written one.
func (r *reporter) report(ctx context.Context, uid types.UID) (outcome string, err error) {
	prepared, err := r.records.preparedClaim(uid)
	if err != nil || prepared == nil {
		r.written.Forget(uid)
		return outcomeGone, err
	}
	states, err := r.observer.observe(ctx, prepared)
	if err != nil || len(states) == 0 {
		return outcomeUnchanged, err
	}
	entries, err := deviceStatuses(r.driverName, states)
	if err != nil {
		return "", err
	}
	digest, err := claimstatus.DigestOf(entries)
	if err != nil || r.written.Has(uid, digest) {
		return outcomeUnchanged, err
	}
	read, repeated := r.apiClaims.current, r.written.Wrote(uid, digest)
	if repeated {
		read = r.apiClaims.cached // an older state causes at most a write that changes nothing
	}
	claim, err := read(ctx, prepared)
	if err != nil {
		return "", err
	}
	if claim == nil {
		return outcomeGone, nil
	}
	// After a restart, a former plugin may have written more than these entries.
	if repeated && claimstatus.Matches(claim, entries) || claimstatus.IsWritten(claim, entries) {
		r.written.Record(uid, digest)
		return outcomeUnchanged, nil
	}
	if err := claimstatus.Apply(ctx, r.client, claim, v1alpha1.FieldManagerPlugin, entries); err != nil {
		return "", err
	}
	klog.FromContext(ctx).V(4).Info("Wrote status of claim", "claim", klog.KObj(claim), "claimUID", uid,
		"deviceCount", len(entries))
	recordEvents(r.events, claim, states, entries)
	r.written.Record(uid, digest)
	return outcomeWritten, nil
}
