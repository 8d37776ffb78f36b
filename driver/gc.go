package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// collector removes what a crash, a reboot or a kubelet that lost its state has
// left: everything of ours that belongs to no live claim. What is not ours it
// does not see; what a running pod may use it does not touch.
type collector struct {
	driver *Driver
	// since is when an orphan was first seen. Only what stays one for the
	// grace period goes: whatever is being made has its record by then.
	since map[string]time.Time
}

func (c *collector) run(ctx context.Context) {
	again := time.NewTicker(min(resync, c.driver.options.OrphanGrace/2+time.Millisecond))
	defer again.Stop()
	for {
		if err := c.collect(ctx); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Look for what belongs to no claim")
		}
		select {
		case <-ctx.Done():
			return
		case <-again.C:
		}
	}
}

// collect looks once.
func (c *collector) collect(ctx context.Context) error {
	if !c.driver.succession.isNewest() {
		return nil
	}
	var err error
	seen := map[string]time.Time{}
	c.driver.setAsideCorrupt(ctx)
	for _, find := range []func(context.Context) ([]Orphan, error){c.claims, c.specs, c.metadata, c.records, c.hooks, c.sockets, c.temporaries} {
		orphans, findErr := find(ctx)
		err = errors.Join(err, findErr, c.removeDue(ctx, orphans, seen))
	}
	err = errors.Join(err, c.kernel(ctx, seen))
	c.since = seen
	return err
}

// removeDue removes the orphans whose grace period is over; seen is told of
// the others.
func (c *collector) removeDue(ctx context.Context, orphans []Orphan, seen map[string]time.Time) (failed error) {
	for _, o := range orphans {
		first, known := c.since[o.What]
		if !known {
			first = time.Now()
		}
		seen[o.What] = first
		if time.Since(first) < c.driver.options.OrphanGrace {
			continue
		}
		klog.FromContext(ctx).Info("Removing what belongs to no claim", "what", o.What)
		if err := o.Remove(ctx); err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", o.What, err))
			continue
		}
		c.driver.metrics.orphans.Inc()
		delete(seen, o.What)
	}
	return failed
}

// claims are records of claims that are gone, or allocated to something else,
// while the kubelet never unprepared them here. Claims that a pod is attached
// for are in use whatever the API server says: a pod that was deleted by force
// runs on for a while, and its bandwidth is not free as long as it does.
func (c *collector) claims(ctx context.Context) (orphans []Orphan, failed error) {
	d := c.driver
	claims, err := d.claims.List()
	if err != nil && !errors.Is(err, record.ErrNewer) {
		failed = err
	}
	attached, _ := d.attachments.List() // before a claim goes its own are asked for again
	inUse := map[types.UID]bool{}
	for _, a := range attached {
		inUse[types.UID(a.ClaimUID)] = true
	}
	for _, recorded := range claims {
		if inUse[recorded.UID] {
			continue
		}
		live, err := d.isLive(ctx, recorded)
		if err != nil {
			return nil, errors.Join(failed, err) // the API server is away: another time
		}
		if live {
			continue
		}
		orphans = append(orphans, Orphan{
			What:   fmt.Sprintf("record of claim %s/%s, UID %s", recorded.Namespace, recorded.Name, recorded.UID),
			Remove: func(ctx context.Context) error { return c.removeClaim(ctx, recorded.UID) },
		})
	}
	return orphans, failed
}

// isLive asks the API server whether the claim is still allocated what the
// record says.
func (d *Driver) isLive(ctx context.Context, recorded *record.Claim) (bool, error) {
	claim, err := d.options.Client.ResourceV1().ResourceClaims(recorded.Namespace).Get(ctx, recorded.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("is claim %s/%s still there: %w", recorded.Namespace, recorded.Name, err)
	}
	return claim.UID == recorded.UID && d.isAllocated(claim, recorded.Shares), nil
}

func (d *Driver) isAllocated(claim *resourceapi.ResourceClaim, shares []record.Share) bool {
	allocated, err := d.plan(claim)
	return err == nil && sameShares(allocated, shares)
}

// removeClaim looks again, with the claim to itself.
func (c *collector) removeClaim(ctx context.Context, uid types.UID) error {
	return c.driver.withClaim(ctx, uid, func(ctx context.Context) error {
		recorded, err := c.driver.claims.Get(uid)
		if err != nil || recorded == nil {
			return err
		}
		if attached, err := c.driver.attachments.OfClaim(string(uid)); err != nil || len(attached) > 0 {
			return err
		}
		if live, err := c.driver.isLive(ctx, recorded); err != nil || live {
			return err
		}
		return c.driver.unprepare(ctx, recorded)
	})
}

// specs are CDI specs without a record: a spec is written after its record and
// removed before it. One that a pod is attached by stays, also if the record was
// lost: its containers may start again.
func (c *collector) specs(context.Context) (orphans []Orphan, err error) {
	d := c.driver
	uids, err := d.specs.List()
	for _, uid := range uids {
		if d.isKnown(uid) {
			continue
		}
		orphans = append(orphans, Orphan{What: "CDI spec of claim " + uid, Remove: func(ctx context.Context) error {
			return d.withClaim(ctx, types.UID(uid), func(context.Context) error {
				if d.isKnown(uid) {
					return nil
				}
				return d.specs.Remove(uid)
			})
		}})
	}
	return orphans, err
}

// isKnown tells whether there is a record of a claim, or of a pod that is
// attached by it; also one that cannot be read now.
func (d *Driver) isKnown(uid string) bool {
	recorded, err := d.claims.Get(types.UID(uid))
	if recorded != nil || err != nil {
		return true
	}
	attached, err := d.attachments.OfClaim(uid)
	return len(attached) > 0 || err != nil
}

// records are attach records that were set aside, of claims that are gone.
func (c *collector) records(context.Context) (orphans []Orphan, err error) {
	aside, err := c.driver.attachments.Aside()
	for path, uid := range aside {
		if recorded, err := c.driver.claims.Get(types.UID(uid)); recorded == nil && err == nil {
			orphans = append(orphans, c.file("attach record", path))
		}
	}
	return orphans, err
}

// hooks are installed hooks that neither this plugin nor a CDI spec names.
func (c *collector) hooks(context.Context) ([]Orphan, error) {
	named, err := c.driver.specs.Hooks()
	if err != nil {
		return nil, err
	}
	named[c.driver.options.Hook] = true
	installed, err := attach.Hooks(filepath.Dir(c.driver.options.Hook))
	var orphans []Orphan
	for _, path := range installed {
		if !named[path] {
			orphans = append(orphans, c.file("hook", path))
		}
	}
	return orphans, err
}

// sockets are those of plugins that were killed and did not come back under
// the same UID.
func (c *collector) sockets(context.Context) (orphans []Orphan, failed error) {
	o := c.driver.options
	for _, pattern := range []string{
		filepath.Join(attach.SocketDir(o.RunDir), "*.sock"),
		filepath.Join(healthDir(o.RunDir), "*.sock"),
		filepath.Join(o.PluginDir, "dra*.sock"),
		filepath.Join(o.RegistryDir, o.DriverName+"-*reg.sock"),
	} {
		paths, err := filepath.Glob(pattern)
		failed = errors.Join(failed, err)
		for _, path := range paths {
			if isRefused(path) {
				orphans = append(orphans, c.file("socket", path))
			}
		}
	}
	return orphans, failed
}

// isRefused tells whether nobody listens at a unix socket. Its type is of no
// matter: one of another type than asked for is somebody's.
func isRefused(path string) bool {
	conn, err := net.Dial("unix", path)
	if err == nil {
		_ = conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// temporaries are files that a plugin was writing when it was killed.
func (c *collector) temporaries(context.Context) (orphans []Orphan, failed error) {
	o := c.driver.options
	for _, pattern := range []string{
		filepath.Join(o.PluginDir, "claims", "*"), filepath.Join(o.RunDir, "attached", "*"),
		filepath.Join(filepath.Dir(o.Hook), "*"), c.driver.specs.Path("*"), filepath.Join(o.CDIDir, o.DriverName+"_metadata_*"),
	} {
		paths, err := filepath.Glob(pattern + files.TemporarySuffix)
		failed = errors.Join(failed, err)
		for _, path := range paths {
			orphans = append(orphans, c.file("unfinished file", path))
		}
	}
	return orphans, failed
}

func (c *collector) file(what, path string) Orphan {
	return Orphan{What: what + " " + path, Remove: func(context.Context) error {
		return files.Remove(c.driver.options.Failpoints, "orphan", path, false)
	}}
}

// kernel asks the kinds. No share is admitted meanwhile: a class that nobody
// needs must not become somebody's between a look at the records and its end.
func (c *collector) kernel(ctx context.Context, seen map[string]time.Time) error {
	d := c.driver
	release, err := d.locks.Named(admission)
	if err != nil {
		return err
	}
	defer release()
	claims, err := d.claims.List()
	attached, attachedErr := d.attachments.List()
	if err = errors.Join(err, attachedErr); err != nil {
		// What a record says that cannot be read (a newer plugin's) is needed,
		// nobody knows.
		d.degraded(ctx, "NotCollected", "classes and classifications that nothing needs stay until all records can be read", err)
		return nil
	}
	var failed error
	for _, k := range d.options.Kinds {
		attacher, ok := k.(Attacher)
		if !ok {
			continue
		}
		orphans, err := attacher.Orphans(ctx, sharesOf(claims, k.Name()), attached)
		failed = errors.Join(failed, err, c.removeDue(ctx, orphans, seen))
	}
	return failed
}

func sharesOf(claims []*record.Claim, kind string) (shares []record.Share) {
	for _, c := range claims {
		for _, s := range c.Shares {
			if s.Kind == kind {
				shares = append(shares, s)
			}
		}
	}
	return shares
}

// setAsideCorrupt puts records that nobody can read out of the way, and says
// what is known about them.
func (d *Driver) setAsideCorrupt(ctx context.Context) {
	found, err := d.claims.SetCorruptAside()
	foundAttached, attachedErr := d.attachments.SetCorruptAside()
	if err = errors.Join(err, attachedErr); err != nil {
		klog.FromContext(ctx).Error(err, "Set aside corrupt records")
	}
	if found = errors.Join(found, foundAttached); found != nil {
		klog.FromContext(ctx).Error(found, "Corrupt records were set aside, as *.unreadable: claims are prepared anew when the kubelet asks, and running pods keep what they have")
	}
}

// otherBoots removes what was recorded before the node booted, where the run
// directory outlives that.
func (d *Driver) otherBoots(ctx context.Context) {
	removed, err := d.attachments.RemoveOfOtherBoots()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		klog.FromContext(ctx).Error(err, "Remove attach records of another boot")
	}
	if removed > 0 {
		klog.FromContext(ctx).Info("The node has booted: attach records from before are void", "removed", removed)
	}
}
