package driver

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// reporter writes what became of shares to their claims' status. It has a
// queue of its own: a slow API server delays no pod. An entry is retried until
// it is written or its claim is gone.
type reporter struct {
	driver *Driver
	queue  workqueue.TypedRateLimitingInterface[types.UID]

	mu      sync.Mutex
	written map[types.UID][sha256.Size]byte // what the API server has, by hash
}

const (
	reportWorkers  = 4
	reportRetryMin = 50 * time.Millisecond
	reportRetryMax = 30 * time.Second
	reportTimeout  = 20 * time.Second
	reportSoon     = 500 * time.Millisecond
	// fieldManager of our entries. Entries of other drivers have other
	// managers and are never touched.
	fieldManager = "dra-shared-plugin"
)

func newReporter(d *Driver) *reporter {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](reportRetryMin, reportRetryMax)
	return &reporter{driver: d, queue: workqueue.NewTypedRateLimitingQueue[types.UID](limiter), written: map[types.UID][sha256.Size]byte{}}
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
	if err := r.report(ctx, uid); err != nil && ctx.Err() != context.Canceled {
		klog.FromContext(ctx).Error(err, "Report", "claimUID", uid, "attempts", r.queue.NumRequeues(uid)+1)
		r.queue.AddRateLimited(uid)
		return true
	}
	r.queue.Forget(uid)
	return true
}

func (r *reporter) report(ctx context.Context, uid types.UID) error {
	claim, err := r.driver.claims.Get(uid)
	if err != nil || claim == nil || claim.Phase != record.Prepared {
		return err
	}
	if err := r.forgetGonePods(ctx, claim); err != nil {
		return err
	}
	rows, err := r.driver.rows(ctx, claim)
	if err != nil || len(rows) == 0 {
		return err
	}
	raw, err := json.Marshal(rows)
	if err != nil {
		return err
	}
	hash := sha256.Sum256(raw)
	r.mu.Lock()
	same := r.written[uid] == hash
	r.mu.Unlock()
	if same {
		return nil
	}
	if err := r.write(ctx, claim, rows); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.written[uid] = hash
	return nil
}

// forgetGonePods forgets failures of pods that the claim is no longer reserved
// for: nothing else tells that a pod is gone that was never attached.
func (r *reporter) forgetGonePods(ctx context.Context, claim *record.Claim) error {
	if !r.driver.failures.any(claim.Shares) {
		return nil
	}
	current, err := r.driver.options.Client.ResourceV1().ResourceClaims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	reserved := map[string]bool{}
	for _, consumer := range current.Status.ReservedFor {
		if consumer.Resource != "pods" || consumer.APIGroup != "" {
			return nil // a consumer of another kind may stand for any pod
		}
		reserved[string(consumer.UID)] = true
	}
	r.driver.failures.keep(claim.Shares, reserved)
	return nil
}

// write applies our entries. The claim is read first for two reasons: it may
// have been deleted and made anew under its name, and a condition keeps the
// time of its last transition.
func (r *reporter) write(ctx context.Context, claim *record.Claim, rows []resourceapi.AllocatedDeviceStatus) error {
	api := r.driver.options.Client.ResourceV1().ResourceClaims(claim.Namespace)
	current, err := api.Get(ctx, claim.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && (current.UID != claim.UID || current.Status.Allocation == nil) {
		return nil // nobody is left to read it
	}
	if err != nil {
		return err
	}
	status := resourceapply.ResourceClaimStatus()
	for _, row := range rows {
		if !allocated(current, row) {
			continue
		}
		status.WithDevices(applyRow(keepTimes(row, current)))
	}
	apply := resourceapply.ResourceClaim(claim.Name, claim.Namespace).WithUID(claim.UID).WithStatus(status)
	_, err = api.ApplyStatus(ctx, apply, metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("write status of claim %s/%s: %w", claim.Namespace, claim.Name, err)
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
	var conditions []metav1.Condition
	for _, old := range current.Status.Devices {
		if old.Driver == row.Driver && old.Pool == row.Pool && old.Device == row.Device && ptr.Equal(old.ShareID, row.ShareID) {
			conditions = old.Conditions
		}
	}
	wanted := row.Conditions
	row.Conditions = nil
	for _, c := range wanted {
		kept := conditions
		meta.SetStatusCondition(&kept, c)
		row.Conditions = append(row.Conditions, *meta.FindStatusCondition(kept, c.Type))
	}
	return row
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

// rows is the status of a claim's shares, from the kernel's answers.
func (d *Driver) rows(ctx context.Context, claim *record.Claim) ([]resourceapi.AllocatedDeviceStatus, error) {
	all, err := d.attachments.OfClaim(string(claim.UID))
	if err != nil {
		return nil, err
	}
	var rows []resourceapi.AllocatedDeviceStatus
	for _, share := range claim.Shares {
		attacher := d.attacherOf(share)
		if attacher == nil || share.AdminAccess {
			continue
		}
		var links []linkState
		for _, a := range all {
			if a.Share != share.Name {
				continue
			}
			state, err := attacher.Read(ctx, share, a)
			if err != nil {
				return nil, err
			}
			links = append(links, linkState{pod: a.Pod, State: state})
		}
		row, err := statusRow(d.options.DriverName, share, links, d.failures.of(share.Name))
		if err != nil {
			return nil, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// failures remembers why attaches failed, until they succeed or the pod or
// claim is gone: by share, then pod UID.
type failures struct {
	mu   sync.Mutex
	seen map[string]map[string]string
}

func (f *failures) note(share, podUID string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		delete(f.seen[share], podUID)
		if len(f.seen[share]) == 0 {
			delete(f.seen, share)
		}
		return
	}
	if f.seen == nil {
		f.seen = map[string]map[string]string{}
	}
	if f.seen[share] == nil {
		f.seen[share] = map[string]string{}
	}
	f.seen[share][podUID] = err.Error()
}

func (f *failures) of(share string) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var texts []string
	for _, text := range f.seen[share] {
		texts = append(texts, text)
	}
	return texts
}

func (f *failures) any(shares []record.Share) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range shares {
		if len(f.seen[s.Name]) > 0 {
			return true
		}
	}
	return false
}

// keep forgets the failures of all pods but these, by UID.
func (f *failures) keep(shares []record.Share, pods map[string]bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range shares {
		for uid := range f.seen[s.Name] {
			if !pods[uid] {
				delete(f.seen[s.Name], uid)
			}
		}
	}
}

func (f *failures) forgetClaim(shares []record.Share) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range shares {
		delete(f.seen, s.Name)
	}
}

// linkState is an attachment of a share with its pod.
type linkState struct {
	pod attach.Pod
	State
}

func rawExtension(v any) (*runtime.RawExtension, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return &runtime.RawExtension{Raw: raw}, nil
}
