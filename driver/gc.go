// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/attach/install"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/files"
	"github.com/dra-shared/dra-driver-shared/internal/probe"
)

// garbageCollector removes driver objects that no live claim needs: leftovers of a crash, a reboot, or a kubelet that
// lost its state. It never removes anything that a running pod may use.
type garbageCollector struct {
	options        Options
	records        *nodeRecords
	specs          *claimSpecs
	deviceMetadata *deviceMetadata
	kinds          kinds
	apiClaims      claimReader
	locks          claimLocks
	degradations   *degradations
	removed        prometheus.Counter
	// isNewest reports whether no newer plugin runs; only the newest collects garbage.
	isNewest func() bool
	// unprepare unprepares a claim. Its caller holds the claim's lock.
	unprepare func(context.Context, *record.Claim) error
	grace     gracePeriod
}

func (d *Driver) newGarbageCollector() *garbageCollector {
	return &garbageCollector{
		options:        d.options,
		records:        d.records,
		specs:          d.specs,
		deviceMetadata: d.deviceMetadata,
		kinds:          d.kinds,
		apiClaims:      d.apiClaims,
		locks:          d.locks,
		degradations:   d.degradations,
		removed:        d.metrics.orphans,
		isNewest:       d.handover.isNewest,
		unprepare:      d.unprepare,
		grace:          gracePeriod{length: d.options.OrphanGrace},
	}
}

// collectInterval is the longest time between two rounds of garbage collection. Once a minute is
// often enough, because orphans use few resources, and corrupt records affect no running pod.
const collectInterval = time.Minute

// run collects garbage from time to time until ctx ends. An orphan is removed in the first round after its grace
// period, so within twice that period.
func (gc *garbageCollector) run(ctx context.Context) {
	tick := time.NewTicker(min(collectInterval, gc.options.OrphanGrace) + time.Millisecond)
	defer tick.Stop()
	for {
		if err := gc.collect(ctx); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Failed to collect garbage; retrying")
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// collect finds all orphans and removes the due ones.
func (gc *garbageCollector) collect(ctx context.Context) error {
	if !gc.isNewest() {
		return nil
	}
	gc.records.renameCorrupt(ctx)
	defer gc.grace.endRound()
	var err error
	for _, find := range []func(context.Context) ([]Orphan, error){
		gc.claimRecords, gc.claimSpecs, gc.metadataFiles, gc.corruptAttachments, gc.hooks, gc.sockets, gc.temporaryFiles,
	} {
		orphans, findErr := find(ctx)
		err = errors.Join(err, findErr, gc.removeDue(ctx, orphans))
	}
	return errors.Join(err, gc.kernelObjects(ctx))
}

// removeDue removes the orphans with an expired grace period.
func (gc *garbageCollector) removeDue(ctx context.Context, orphans []Orphan) (failed error) {
	for _, o := range orphans {
		if !gc.grace.isDue(o.Description, o.grace) {
			continue
		}
		if err := o.Remove(ctx); err != nil {
			failed = errors.Join(failed, fmt.Errorf("remove %s: %w", o.Description, err))
			continue
		}
		klog.FromContext(ctx).Info("Removed orphan", "orphan", o.Description)
		gc.grace.forget(o.Description)
		gc.removed.Inc()
	}
	return failed
}

// unattachedGrace is the grace period for claim records with shares that are not attached, such as an accelerator's:
// no attachment record shows whether a pod still uses them. A force-deleted pod may run until its
// terminationGracePeriodSeconds are over, and then the kubelet unprepares the claim. Garbage collection is only for a
// kubelet that never does because it has lost its state. Waiting is safe; collecting too early grants a device to two
// pods.
const unattachedGrace = 6 * time.Hour

// claimRecords finds the records of claims that no longer exist or are allocated differently, and that the kubelet
// never unprepared here. A claim with an attachment is in use even if the API server no longer has it: a
// force-deleted pod keeps running for a while and uses its grant.
func (gc *garbageCollector) claimRecords(ctx context.Context) (orphans []Orphan, failed error) {
	claims, err := gc.records.claims.List()
	if err != nil && !errors.Is(err, record.ErrNewer) {
		failed = err
	}
	attached, _ := gc.records.attachments.List() // removeClaim reads the claim's own again
	inUse := map[types.UID]bool{}
	for _, a := range attached {
		inUse[types.UID(a.ClaimUID)] = true
	}
	unreadable, unreadableErr := gc.records.attachments.Unreadable()
	failed = errors.Join(failed, unreadableErr)
	for _, uid := range unreadable {
		inUse[types.UID(uid)] = true
	}
	for _, recorded := range claims {
		if inUse[recorded.UID] {
			continue
		}
		live, err := gc.isLive(ctx, recorded)
		if err != nil {
			return nil, errors.Join(failed, err) // the API server is unavailable
		}
		if live {
			continue
		}
		orphans = append(orphans, Orphan{
			Description: fmt.Sprintf("record of claim %s/%s, UID %s", recorded.Namespace, recorded.Name, recorded.UID),
			Remove: func(ctx context.Context) error {
				logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(recorded.Namespace, recorded.Name),
					"claimUID", recorded.UID)
				return gc.removeClaim(klog.NewContext(ctx, logger), recorded.UID)
			},
			grace: gc.graceOf(recorded),
		})
	}
	return orphans, failed
}

// graceOf returns the grace period of a claim record without attachments. 0 means Options.OrphanGrace. A pod can use
// the claim only if it was prepared since the node booted.
func (gc *garbageCollector) graceOf(recorded *record.Claim) time.Duration {
	mayRun := recorded.Phase == record.Prepared && gc.records.claims.Current(recorded)
	isUnattached := func(s share) bool { return s.attacher == nil }
	if mayRun && slices.ContainsFunc(gc.kinds.resolveAll(recorded.Shares), isUnattached) {
		return unattachedGrace
	}
	return 0
}

// isLive reports whether the API server still has the claim with the recorded
// allocation.
func (gc *garbageCollector) isLive(ctx context.Context, recorded *record.Claim) (bool, error) {
	claim, err := gc.apiClaims.current(ctx, recorded)
	if err != nil {
		return false, fmt.Errorf("check whether claim %s/%s exists: %w", recorded.Namespace, recorded.Name, err)
	}
	return claim != nil && gc.isAllocated(claim, recorded.Shares), nil
}

func (gc *garbageCollector) isAllocated(claim *resourceapi.ResourceClaim, shares []record.Share) bool {
	planned, err := plan(gc.options.DriverName, claim)
	return err == nil && sameShares(planned, shares)
}

// removeClaim unprepares an orphaned claim. It checks again with the claim's
// lock held.
func (gc *garbageCollector) removeClaim(ctx context.Context, uid types.UID) error {
	return gc.locks.withClaim(ctx, uid, func(ctx context.Context) error {
		recorded, err := gc.records.claims.Get(uid)
		if err != nil || recorded == nil {
			return err
		}
		if attached, err := gc.records.attachments.OfClaim(string(uid)); err != nil || len(attached) > 0 {
			return err
		}
		if live, err := gc.isLive(ctx, recorded); err != nil || live {
			return err
		}
		return gc.unprepare(ctx, recorded)
	})
}

// claimSpecs finds CDI specs without a record: the plugin writes a spec after the
// claim record and removes it before. The spec of a claim with an attachment
// stays even if the record is lost, because its containers may restart.
func (gc *garbageCollector) claimSpecs(context.Context) (orphans []Orphan, err error) {
	uids, err := gc.specs.List()
	for _, uid := range uids {
		if gc.records.isRecorded(uid) {
			continue
		}
		orphans = append(orphans, Orphan{Description: "CDI spec of claim " + uid, Remove: func(ctx context.Context) error {
			return gc.locks.withClaim(ctx, types.UID(uid), func(context.Context) error {
				if gc.records.isRecorded(uid) {
					return nil
				}
				return gc.specs.Remove(uid)
			})
		}})
	}
	return orphans, err
}

// metadataFiles finds the metadata files of claims that no longer exist. The helper removes
// them only when the kubelet unprepares a claim.
func (gc *garbageCollector) metadataFiles(context.Context) (orphans []Orphan, failed error) {
	dirs, failed := filepath.Glob(filepath.Join(gc.options.PluginDir, metadataDir, "*"))
	claims, unreadable := gc.records.claims.List()
	needed := map[string]bool{}
	for _, c := range claims {
		needed[metadataName(c)] = true
	}
	for _, dir := range dirs {
		if unreadable == nil && !needed[filepath.Base(dir)] {
			orphans = append(orphans, Orphan{
				Description: "device metadata " + dir,
				Remove:      func(context.Context) error { return gc.deviceMetadata.removeDir(dir) },
			})
		}
	}
	specs, err := gc.deviceMetadata.specsLike(gc.deviceMetadata.specsPrefix() + "*")
	for _, path := range specs {
		if !gc.records.isRecorded(string(gc.deviceMetadata.claimOfSpec(path))) {
			orphans = append(orphans, gc.file("metadata CDI spec", path))
		}
	}
	return orphans, errors.Join(failed, err)
}

// corruptAttachments finds unreadable attachment records of claims that no longer exist. If the claim record
// is unreadable as well, the claim may still have pods: the attachment record then stays until the kubelet
// unprepares the claim.
func (gc *garbageCollector) corruptAttachments(context.Context) (orphans []Orphan, err error) {
	unreadable, err := gc.records.attachments.Unreadable()
	for path, uid := range unreadable {
		recorded, err := gc.records.claims.Get(types.UID(uid))
		if recorded == nil && err == nil && !gc.records.claims.HasUnreadable(types.UID(uid)) {
			orphans = append(orphans, gc.file("attachment record", path))
		}
	}
	return orphans, err
}

// hooks finds installed hooks that neither this plugin nor a CDI spec uses.
func (gc *garbageCollector) hooks(context.Context) (orphans []Orphan, err error) {
	used, err := gc.specs.Hooks()
	if err != nil {
		return nil, err
	}
	used[gc.options.Hook] = true
	installed, err := install.Hooks(filepath.Dir(gc.options.Hook))
	for _, path := range installed {
		if !used[path] {
			orphans = append(orphans, gc.file("hook", path))
		}
	}
	return orphans, err
}

// sockets finds the sockets of plugins that were killed and did not restart
// under the same UID.
func (gc *garbageCollector) sockets(context.Context) (orphans []Orphan, failed error) {
	o := gc.options
	for _, pattern := range []string{
		filepath.Join(attach.SocketDir(o.RunDir), "*.sock"),
		filepath.Join(probe.Dir(o.RunDir), "*.sock"),
		filepath.Join(o.PluginDir, "dra*.sock"),
		filepath.Join(o.RegistryDir, o.DriverName+"-*reg.sock"),
	} {
		paths, err := filepath.Glob(pattern)
		failed = errors.Join(failed, err)
		for _, path := range paths {
			if refusesConnections(path) {
				orphans = append(orphans, gc.file("socket", path))
			}
		}
	}
	return orphans, failed
}

// refusesConnections reports whether no process listens on a unix socket. Connecting to a socket that
// is not of type stream fails with another error; such a socket counts as in use.
func refusesConnections(path string) bool {
	conn, err := net.Dial("unix", path)
	if err == nil {
		_ = conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// temporaryFiles finds files that a plugin was writing when it was killed.
func (gc *garbageCollector) temporaryFiles(context.Context) (orphans []Orphan, failed error) {
	o := gc.options
	find := func(dir, prefix string) func() ([]string, error) {
		return func() ([]string, error) { return files.Unfinished(dir, prefix) }
	}
	for _, unfinished := range []func() ([]string, error){
		find(record.Dir(o.PluginDir), ""),
		find(attach.RecordsDir(o.RunDir), ""),
		find(filepath.Dir(o.Hook), ""),
		gc.specs.Unfinished,
		find(o.CDIDir, gc.deviceMetadata.specsPrefix()),
	} {
		paths, err := unfinished()
		failed = errors.Join(failed, err)
		for _, path := range paths {
			orphans = append(orphans, gc.file("unfinished file", path))
		}
	}
	return orphans, failed
}

func (gc *garbageCollector) file(description, path string) Orphan {
	return Orphan{Description: description + " " + path, Remove: func(context.Context) error {
		return files.Remove(gc.options.Failpoints, "orphan", path)
	}}
}

// kernelObjects collects the orphans of all kinds. It holds the admission lock:
// an object that is an orphan when the records are read must not become part of a
// new share before it is removed.
func (gc *garbageCollector) kernelObjects(ctx context.Context) error {
	release, err := gc.locks.NamedContext(ctx, admissionLock)
	if err != nil {
		return err
	}
	defer release()
	claims, err := gc.records.claims.List()
	attached, attachedErr := gc.records.attachments.List()
	if err = errors.Join(err, attachedErr); err != nil {
		// A record that this plugin cannot read, such as a newer plugin's, may
		// need any object.
		gc.degradations.report(
			ctx,
			v1alpha1.DegradedNotCollected,
			"kernel objects that no claim needs remain until all records can be read",
			err,
		)
		return nil
	}
	gc.degradations.end(v1alpha1.DegradedNotCollected)
	var failed error
	for k, attacher := range kindsOf[Attacher](gc.kinds) {
		orphans, err := attacher.Orphans(ctx, sharesOf(claims, k.Name()), attached)
		failed = errors.Join(failed, err, gc.removeDue(ctx, orphans))
	}
	return failed
}
