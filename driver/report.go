package driver

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// reporter writes the state of shares to the status of their claims. It has a
// queue of its own, so that a slow API server delays no pod. It retries a claim
// until the status is written or the claim is gone.
type reporter struct {
	driver *Driver
	queue  workqueue.TypedRateLimitingInterface[types.UID]

	mu      sync.Mutex
	written map[types.UID]writtenStatus
}

// writtenStatus identifies the status that the reporter wrote last.
type writtenStatus struct {
	hash [sha256.Size]byte
	at   time.Time
}

const (
	reportWorkers  = 4
	reportRetryMin = 50 * time.Millisecond
	reportRetryMax = 30 * time.Second
	reportTimeout  = 20 * time.Second
	// reportDelay delays a status that will probably change at once: the first
	// container starts about 0.2 s after Prepare, and one write replaces two.
	reportDelay = 500 * time.Millisecond
	// rewriteInterval bounds the time for which a status that another client
	// changed remains wrong.
	rewriteInterval = 5 * time.Minute
)

func newReporter(d *Driver) *reporter {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](reportRetryMin, reportRetryMax)
	return &reporter{
		driver:  d,
		queue:   workqueue.NewTypedRateLimitingQueue(limiter),
		written: map[types.UID]writtenStatus{},
	}
}

// enqueue makes a worker report a claim.
func (r *reporter) enqueue(uid types.UID) { r.queue.Add(uid) }

// enqueueSoon makes a worker report a claim after reportDelay.
func (r *reporter) enqueueSoon(uid types.UID) { r.queue.AddAfter(uid, reportDelay) }

// forget drops what the reporter knows of a claim.
func (r *reporter) forget(uid types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.written, uid)
}

// forgetAll makes the reporter write every status again.
func (r *reporter) forgetAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.written)
}

// run reports claims until ctx ends: those in the queue, and from time to time
// all.
func (r *reporter) run(ctx context.Context) {
	var workers sync.WaitGroup
	for range reportWorkers {
		workers.Go(func() {
			for r.processNext(ctx) {
			}
		})
	}
	tick := time.NewTicker(resyncInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			r.queue.ShutDown()
			workers.Wait()
			return
		case <-tick.C:
			r.enqueueAll()
		}
	}
}

func (r *reporter) enqueueAll() {
	if !r.driver.handover.isNewest() {
		return
	}
	claims, _ := r.driver.claims.List() // unreadable records are logged by restore
	for _, c := range claims {
		r.enqueue(c.UID)
	}
}

// processNext reports the next claim in the queue. It returns false after the
// queue has shut down.
func (r *reporter) processNext(ctx context.Context) bool {
	uid, shutdown := r.queue.Get()
	if shutdown {
		return false
	}
	defer r.queue.Done(uid)
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	outcome, err := r.report(ctx, uid)
	if err == nil {
		r.driver.metrics.reports.WithLabelValues(outcome).Inc()
		r.queue.Forget(uid)
		return true
	}
	if ctx.Err() == context.Canceled {
		return true // the plugin is stopping
	}
	r.driver.metrics.reports.WithLabelValues(failureOutcome(err)).Inc()
	klog.FromContext(ctx).Error(err, "Failed to report claim status; retrying", "claimUID", uid, "attempts", r.queue.NumRequeues(uid)+1)
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

// report writes the status of a claim if it differs from what was written.
func (r *reporter) report(ctx context.Context, uid types.UID) (outcome string, err error) {
	prepared, err := r.driver.preparedClaim(uid)
	if err != nil || prepared == nil {
		r.forget(uid)
		return outcomeGone, err
	}
	states, err := r.driver.observe(ctx, prepared)
	if err != nil || len(states) == 0 {
		return outcomeUnchanged, err
	}
	rows, err := r.driver.statusRows(states)
	if err != nil {
		return "", err
	}
	hash, err := hashOf(rows)
	if err != nil || r.isWritten(uid, hash) {
		return outcomeUnchanged, err
	}
	claim, err := r.driver.currentClaim(ctx, prepared)
	if err != nil {
		return "", err
	}
	if claim == nil {
		return outcomeGone, nil
	}
	if err := r.write(ctx, claim, rows); err != nil {
		return "", err
	}
	r.driver.recordEvents(claim, states, rows)
	r.setWritten(uid, hash)
	return outcomeWritten, nil
}

func hashOf(rows []resourceapi.AllocatedDeviceStatus) (hash [sha256.Size]byte, err error) {
	raw, err := json.Marshal(rows)
	return sha256.Sum256(raw), err
}

// isWritten reports whether the reporter has written this status recently. An
// older one is written again, because another client may have removed it.
func (r *reporter) isWritten(uid types.UID, hash [sha256.Size]byte) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	w, ok := r.written[uid]
	return ok && w.hash == hash && time.Since(w.at) < rewriteInterval
}

func (r *reporter) setWritten(uid types.UID, hash [sha256.Size]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.written[uid] = writtenStatus{hash: hash, at: time.Now()}
}

// currentClaim gets the claim of a record from the API server. It returns nil
// if the claim is gone, deallocated, or replaced by another of its name.
func (d *Driver) currentClaim(ctx context.Context, recorded *record.Claim) (*resourceapi.ResourceClaim, error) {
	claim, err := d.options.Client.ResourceV1().ResourceClaims(recorded.Namespace).Get(ctx, recorded.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && (claim.UID != recorded.UID || claim.Status.Allocation == nil) {
		return nil, nil
	}
	return claim, err
}

// write applies the driver's entries to a claim's status. The claim's UID is a
// precondition: it may have been replaced by another of its name.
func (r *reporter) write(ctx context.Context, claim *resourceapi.ResourceClaim, rows []resourceapi.AllocatedDeviceStatus) error {
	status := resourceapply.ResourceClaimStatus()
	for _, row := range rows {
		if isAllocatedIn(claim, row) {
			status.WithDevices(applyRow(keepTransitionTimes(row, claim)))
		}
	}
	apply := resourceapply.ResourceClaim(claim.Name, claim.Namespace).WithUID(claim.UID).WithStatus(status)
	api := r.driver.options.Client.ResourceV1().ResourceClaims(claim.Namespace)
	_, err := api.ApplyStatus(ctx, apply, metav1.ApplyOptions{FieldManager: params.FieldManagerPlugin, Force: true})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write status of claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	return nil
}

// isAllocatedIn reports whether an entry belongs to a result of the claim's
// allocation. The API server accepts no other entries.
func isAllocatedIn(claim *resourceapi.ResourceClaim, row resourceapi.AllocatedDeviceStatus) bool {
	return slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == row.Driver && r.Pool == row.Pool && r.Device == row.Device &&
			ptr.Deref(r.ShareID, "") == types.UID(ptr.Deref(row.ShareID, ""))
	})
}

// keepTransitionTimes copies the transition times of unchanged conditions.
func keepTransitionTimes(row resourceapi.AllocatedDeviceStatus, claim *resourceapi.ResourceClaim) resourceapi.AllocatedDeviceStatus {
	old := conditionsOf(claim, row)
	conditions := row.Conditions
	row.Conditions = nil
	for _, c := range conditions {
		merged := slices.Clone(old) // SetStatusCondition modifies it
		meta.SetStatusCondition(&merged, c)
		row.Conditions = append(row.Conditions, *meta.FindStatusCondition(merged, c.Type))
	}
	return row
}

// conditionsOf returns the conditions that the claim has for an entry.
func conditionsOf(claim *resourceapi.ResourceClaim, row resourceapi.AllocatedDeviceStatus) []metav1.Condition {
	for _, old := range claim.Status.Devices {
		if old.Driver == row.Driver && old.Pool == row.Pool && old.Device == row.Device && ptr.Equal(old.ShareID, row.ShareID) {
			return old.Conditions
		}
	}
	return nil
}

func applyRow(row resourceapi.AllocatedDeviceStatus) *resourceapply.AllocatedDeviceStatusApplyConfiguration {
	a := resourceapply.AllocatedDeviceStatus().WithDriver(row.Driver).WithPool(row.Pool).WithDevice(row.Device)
	if row.ShareID != nil {
		a.WithShareID(*row.ShareID)
	}
	for _, c := range row.Conditions {
		a.WithConditions(metaapply.Condition().WithType(c.Type).WithStatus(c.Status).WithReason(c.Reason).
			WithMessage(c.Message).WithLastTransitionTime(c.LastTransitionTime))
	}
	if row.Data != nil {
		a.WithData(*row.Data)
	}
	if n := row.NetworkData; n != nil {
		a.WithNetworkData(resourceapply.NetworkDeviceData().WithInterfaceName(n.InterfaceName).WithIPs(n.IPs...).WithHardwareAddress(n.HardwareAddress))
	}
	return a
}
