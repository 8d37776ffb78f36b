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

	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// reporter writes what became of shares to their claims' status. It has a
// queue of its own: a slow API server delays no pod. An entry is retried until
// it is written or its claim is gone.
type reporter struct {
	driver *Driver
	queue  workqueue.TypedRateLimitingInterface[types.UID]

	mu      sync.Mutex
	written map[types.UID]written
}

// written is what the API server has, by hash.
type written struct {
	hash [sha256.Size]byte
	at   time.Time
}

const (
	reportWorkers  = 4
	reportRetryMin = 50 * time.Millisecond
	reportRetryMax = 30 * time.Second
	reportTimeout  = 20 * time.Second
	reportSoon     = 500 * time.Millisecond
	// writeAgain bounds for how long a status is wrong that somebody else changed.
	writeAgain = 5 * time.Minute
	// fieldManager of our entries. Entries of other drivers have other
	// managers and are never touched.
	fieldManager = "dra-shared-plugin"
)

func newReporter(d *Driver) *reporter {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](reportRetryMin, reportRetryMax)
	return &reporter{driver: d, queue: workqueue.NewTypedRateLimitingQueue[types.UID](limiter), written: map[types.UID]written{}}
}

func (r *reporter) enqueue(uid types.UID) { r.queue.Add(uid) }

// enqueueSoon is for a state that will most likely be another in a moment:
// between Prepare and the first container lie about 0.2 s, and one write is
// better than two.
func (r *reporter) enqueueSoon(uid types.UID) { r.queue.AddAfter(uid, reportSoon) }

func (r *reporter) forget(uid types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.written, uid)
}

// forgetAll makes what is reported next be written, whatever was before.
func (r *reporter) forgetAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.written)
}

func (r *reporter) run(ctx context.Context) {
	var workers sync.WaitGroup
	for range reportWorkers {
		workers.Go(func() {
			for r.next(ctx) {
			}
		})
	}
	again := time.NewTicker(resync)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			r.queue.ShutDown()
			workers.Wait()
			return
		case <-again.C:
			if !r.driver.succession.isNewest() {
				continue
			}
			claims, _ := r.driver.claims.List() // unreadable ones are reported where they matter
			for _, c := range claims {
				r.enqueue(c.UID)
			}
		}
	}
}

func (r *reporter) next(ctx context.Context) bool {
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
		return true
	}
	r.driver.metrics.reports.WithLabelValues(failureOf(err)).Inc()
	klog.FromContext(ctx).Error(err, "Report", "claimUID", uid, "attempts", r.queue.NumRequeues(uid)+1)
	r.queue.AddRateLimited(uid)
	return true
}

// Outcomes of a report, as the metric has them.
const (
	outcomeWritten   = "written"
	outcomeUnchanged = "unchanged" // the API server has it already
	outcomeGone      = "gone"      // nobody is left to read it
)

// failureOf is the outcome of a report that is tried again.
func failureOf(err error) string {
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

func (r *reporter) report(ctx context.Context, uid types.UID) (outcome string, err error) {
	claim, err := r.driver.claims.Get(uid)
	if err != nil || claim == nil || claim.Phase != record.Prepared {
		r.forget(uid)
		return outcomeGone, err
	}
	shares, err := r.driver.observe(ctx, claim)
	if err != nil || len(shares) == 0 {
		return outcomeUnchanged, err
	}
	rows, err := r.driver.rows(shares)
	if err != nil {
		return "", err
	}
	raw, err := json.Marshal(rows)
	if err != nil {
		return "", err
	}
	hash := sha256.Sum256(raw)
	if r.isWritten(uid, hash) {
		return outcomeUnchanged, nil
	}
	current, err := r.driver.current(ctx, claim)
	if err != nil {
		return "", err
	}
	if current == nil {
		return outcomeGone, nil
	}
	if err := r.write(ctx, current, rows); err != nil {
		return "", err
	}
	r.driver.tellPods(current, shares, rows)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.written[uid] = written{hash: hash, at: time.Now()}
	return outcomeWritten, nil
}

// isWritten tells whether the API server has that already. Somebody may have
// taken it away since: after a while it is written again.
func (r *reporter) isWritten(uid types.UID, hash [sha256.Size]byte) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	w, ok := r.written[uid]
	return ok && w.hash == hash && time.Since(w.at) < writeAgain
}

// current returns the claim of a record, nil if it is gone, deallocated, or
// another under its name.
func (d *Driver) current(ctx context.Context, claim *record.Claim) (*resourceapi.ResourceClaim, error) {
	current, err := d.options.Client.ResourceV1().ResourceClaims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && (current.UID != claim.UID || current.Status.Allocation == nil) {
		return nil, nil
	}
	return current, err
}

// write applies our entries to the claim as it is now: it may have been deleted
// and made anew under its name, and a condition keeps the time of its last
// transition.
func (r *reporter) write(ctx context.Context, current *resourceapi.ResourceClaim, rows []resourceapi.AllocatedDeviceStatus) error {
	status := resourceapply.ResourceClaimStatus()
	for _, row := range rows {
		if !allocated(current, row) {
			continue
		}
		status.WithDevices(applyRow(keepTimes(row, current)))
	}
	apply := resourceapply.ResourceClaim(current.Name, current.Namespace).WithUID(current.UID).WithStatus(status)
	api := r.driver.options.Client.ResourceV1().ResourceClaims(current.Namespace)
	_, err := api.ApplyStatus(ctx, apply, metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write status of claim %s/%s: %w", current.Namespace, current.Name, err)
	}
	return nil
}

// allocated tells whether a row is about a result of the claim's allocation:
// the API server accepts no other.
func allocated(claim *resourceapi.ResourceClaim, row resourceapi.AllocatedDeviceStatus) bool {
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver == row.Driver && result.Pool == row.Pool && result.Device == row.Device &&
			ptr.Deref(result.ShareID, "") == types.UID(ptr.Deref(row.ShareID, "")) {
			return true
		}
	}
	return false
}

// keepTimes takes over the transition times of conditions that did not change.
func keepTimes(row resourceapi.AllocatedDeviceStatus, current *resourceapi.ResourceClaim) resourceapi.AllocatedDeviceStatus {
	conditions := conditionsOf(current, row)
	wanted := row.Conditions
	row.Conditions = nil
	for _, c := range wanted {
		kept := slices.Clone(conditions) // SetStatusCondition changes what is there
		meta.SetStatusCondition(&kept, c)
		row.Conditions = append(row.Conditions, *meta.FindStatusCondition(kept, c.Type))
	}
	return row
}

// conditionsOf are the conditions that a row has in the API server.
func conditionsOf(current *resourceapi.ResourceClaim, row resourceapi.AllocatedDeviceStatus) []metav1.Condition {
	for _, old := range current.Status.Devices {
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
