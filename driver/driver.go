// Package driver is the node plugin's core: it publishes devices, prepares and
// unprepares claims for the kubelet, attaches shares for the OCI hook, and
// reports what became of them. One file per step:
//
//	publish.go     devices -> ResourceSlices
//	prepare.go     claim -> shares, claim record, CDI spec
//	attach.go      hook -> link in the pod, attach record
//	events.go      what the kernel announces, and what is done about it
//	detach.go      a sandbox is gone, others of its claim are not
//	unprepare.go   the claim's last pod on this node is gone
//	metadata.go    what a pod reads about its devices
//
// What became of it is said by
//
//	observe.go     kernel -> the state of each share
//	status.go      state -> an entry of the claim's status.devices: pure
//	report.go      the queue that writes it until it is written
//	tell.go        conditions that changed -> events on pods
//	health.go      whether this plugin can attach; devicehealth.go: whether devices work
//	metrics.go
//
// and what else can happen is met by
//
//	collect.go     crashes, reboots and a forgetful kubelet left something
//	succession.go  two plugins run at once
//	leave.go       the driver is being removed
//
// What a share is made of is a Kind's business; which claims have which shares
// is kept here, in package record.
package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/events"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/driver/lock"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

// Options of a Driver. All are needed unless they say otherwise.
type Options struct {
	// DriverName under which devices are published.
	DriverName string
	NodeName   string
	Client     kubernetes.Interface
	Kinds      []Kind

	// PluginDir is the plugin's directory below the kubelet's; claim records
	// lie here. The same inside and outside of the plugin's container.
	PluginDir string
	// RegistryDir is where the kubelet looks for plugins.
	RegistryDir string
	// CDIDir is one of the directories the runtime reads CDI specs from.
	CDIDir string
	// RunDir is a directory on a tmpfs of the node, for sockets and attach
	// records. The same inside and outside of the plugin's container.
	RunDir string
	// Hook is the path of the installed hook on the node.
	Hook string
	// Instance is unique among the plugins that run at once: the pod's UID.
	Instance string
	// RollingUpdate lets two plugins overlap (kubelet 1.33 or newer).
	RollingUpdate bool
	// BootIDFile tells one boot from another; default
	// /proc/sys/kernel/random/boot_id.
	BootIDFile string
	// OrphanGrace is how long something must have belonged to nobody before
	// it is removed; default one minute.
	OrphanGrace time.Duration
	// Watch calls changed for what happens to the node's network, until ctx
	// ends; the first call sets Resync. See netdev.Node.Watch.
	Watch func(ctx context.Context, changed func(netdev.Change)) error
	// Failpoints that changes go through; default none.
	Failpoints failpoint.Injector
	// Events on pods go here; default nowhere.
	Events events.EventRecorder
	// Metrics are registered here; default nowhere.
	Metrics prometheus.Registerer
}

// Driver implements kubeletplugin.DRAPlugin and attach.Handler. It is safe for
// concurrent use.
type Driver struct {
	options     Options
	claims      *record.Store
	attachments *attach.Records
	specs       *cdi.Specs
	status      *reporter

	// locks hold a claim's way from prepare to unprepare to one step at a
	// time. Order: a claim's lock before
	// admission or the metadata's.
	locks lock.Dir
	// refresh asks the publisher to look at the devices again.
	refresh chan struct{}
	// lookAgain is when to do so unasked, in nanoseconds.
	lookAgain atomic.Int64

	// succession is entered by Start.
	succession *succession

	// helper is there when helping is closed: hooks are served a moment before.
	helper  *kubeletplugin.Helper
	helping chan struct{}
	// restoring are claims, by UID, that are prepared again for what is missing
	// of them: one that has been unprepared meanwhile must not come back.
	restoring sync.Map

	health   *healthBoard
	failures failures
	metrics  *metrics
	told     sync.Map // what is degraded and has been said, by name
}

// admission is the lock that is held from looking at the other shares of a
// device to the record that makes a share one of them.
const admission = "admission"

// New builds a driver. It reads and writes nothing but its directories.
func New(o Options) (*Driver, error) {
	if o.BootIDFile == "" {
		o.BootIDFile = "/proc/sys/kernel/random/boot_id"
	}
	if o.OrphanGrace == 0 {
		o.OrphanGrace = time.Minute
	}
	if o.Events == nil {
		o.Events = &events.FakeRecorder{} // drops what it is told
	}
	raw, err := os.ReadFile(o.BootIDFile)
	if err != nil {
		return nil, fmt.Errorf("tell this boot from others: %w", err)
	}
	bootID := strings.TrimSpace(string(raw))
	claims, err := record.NewStore(filepath.Join(o.PluginDir, "claims"), bootID, o.Failpoints)
	if err != nil {
		return nil, err
	}
	specs, err := cdi.New(o.CDIDir, filepath.Join(o.PluginDir, "files"), o.DriverName, o.Failpoints)
	if err != nil {
		return nil, err
	}
	locks, err := lock.Open(filepath.Join(o.RunDir, "locks"))
	if err != nil {
		return nil, err
	}
	d := &Driver{
		options: o, claims: claims, attachments: attach.OpenRecords(o.RunDir, bootID, o.Failpoints), specs: specs,
		locks: locks, refresh: make(chan struct{}, 1), helping: make(chan struct{}), health: newHealthBoard(),
	}
	d.status, d.metrics = newReporter(d), newMetrics(d)
	return d, nil
}

// Start makes the devices ready, restores what an earlier plugin attached,
// and then serves: first hooks, then the kubelet. It returns when that runs;
// wait returns when everything has ended, because ctx did (nil) or because
// something failed that nothing can go on without.
func (d *Driver) Start(ctx context.Context) (wait func() error, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	var group sync.WaitGroup
	defer func() {
		if err != nil {
			cancel(err)
			group.Wait()
		}
	}()
	if d.succession, err = enter(d.locks, d.options.Instance); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.succession.leave()
		}
	}()
	d.setAsideCorrupt(ctx)
	d.otherBoots(ctx)
	if err := d.refreshKinds(ctx); err != nil {
		return nil, err
	}
	d.restore(ctx)
	server, err := attach.Listen(d.options.RunDir, d.options.Instance, d)
	if err != nil {
		return nil, err
	}
	h := &health{driver: d}
	for what, serve := range map[string]func(context.Context) error{
		"Serve hooks": server.Serve, "Watch the node's network": d.watch,
		"Serve health": func(ctx context.Context) error { return d.serveHealth(ctx, h) },
	} {
		group.Go(func() {
			if err := serve(ctx); err != nil {
				klog.FromContext(ctx).Error(err, what)
				cancel(err)
			}
		})
	}
	for _, k := range d.options.Kinds {
		if watcher, ok := k.(Watcher); ok {
			group.Go(func() {
				if err := watcher.Watch(ctx, d.DevicesChanged); err != nil && ctx.Err() == nil {
					d.degraded(ctx, "DevicesNotWatched", "devices that come or go are seen up to "+resync.String()+" later", err)
				}
			})
		}
	}
	group.Go(func() { d.status.run(ctx) })
	helper, err := kubeletplugin.Start(ctx, d, d.pluginOptions()...)
	if err != nil {
		return nil, fmt.Errorf("register with the kubelet: %w: do %s and %s exist?", err, d.options.PluginDir, d.options.RegistryDir)
	}
	d.helper = helper
	close(d.helping)
	group.Go(func() { d.restoreMetadata(ctx) })
	group.Go(func() { d.publish(ctx, helper) })
	group.Go(func() { h.awaitRegistration(ctx, helper) })
	group.Go(func() { (&collector{driver: d}).run(ctx) })
	group.Go(func() {
		d.succession.succeed(ctx, func() {
			d.status.forgetAll()
			d.DevicesChanged()
			d.restore(ctx)
		})
	})
	return func() error {
		<-ctx.Done()
		helper.Stop()
		group.Wait()
		d.leave(context.WithoutCancel(ctx))
		d.succession.leave()
		if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
			return cause
		}
		return nil
	}, nil
}

func (d *Driver) pluginOptions() []kubeletplugin.Option {
	options := []kubeletplugin.Option{
		kubeletplugin.DriverName(d.options.DriverName),
		kubeletplugin.NodeName(d.options.NodeName),
		kubeletplugin.KubeClient(d.options.Client),
		kubeletplugin.PluginDataDirectoryPath(d.options.PluginDir),
		kubeletplugin.RegistrarDirectoryPath(d.options.RegistryDir),
		kubeletplugin.Serialize(false), // each claim has a lock of its own, which other plugins respect
	}
	options = append(options, d.metadataOptions()...)
	if d.options.RollingUpdate {
		options = append(options, kubeletplugin.RollingUpdate(types.UID(d.options.Instance)))
	}
	return options
}

// kindOf returns the kind that a device is of.
func (d *Driver) kindOf(pool, device string) (Kind, error) {
	known := pool == d.options.NodeName
	for _, k := range d.options.Kinds {
		spanning, ok := k.(Spanning)
		ours := ok && spanning.Spans(pool)
		if known = known || ours; (ours || !ok && pool == d.options.NodeName) && k.Has(device) {
			return k, nil
		}
	}
	if !known {
		return nil, fmt.Errorf("the device is in pool %s, this node publishes pool %s", pool, d.options.NodeName)
	}
	return nil, fmt.Errorf("this node has no device %s: was it removed, or taken out of the driver's configuration?", device)
}

// recordedKind returns the kind of a share that has been prepared, nil if there
// is none by that name any more.
func (d *Driver) recordedKind(share record.Share) Kind {
	for _, k := range d.options.Kinds {
		if k.Name() == share.Kind {
			return k
		}
	}
	return nil
}

// attacherOf returns the kind of a recorded share if the share is attached to
// pods, else nil.
func (d *Driver) attacherOf(share record.Share) Attacher {
	if attacher, ok := d.recordedKind(share).(Attacher); ok && attacher.Attaches(share) {
		return attacher
	}
	return nil
}

// withClaim runs f while nothing else happens to the claim. A caller that has
// given up meanwhile gets its context's error: what it wanted is out of date.
func (d *Driver) withClaim(ctx context.Context, uid types.UID, f func(context.Context) error) error {
	release, err := d.locks.Key(string(uid))
	if err != nil {
		return err
	}
	defer release()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return f(ctx)
}

// HandleError implements kubeletplugin.DRAPlugin.
func (d *Driver) HandleError(ctx context.Context, err error, msg string) {
	logger := klog.FromContext(ctx)
	if d.droppedFields(ctx, err) {
		return
	}
	if errors.Is(err, kubeletplugin.ErrRecoverable) {
		logger.Error(err, msg)
		return
	}
	logger.Error(err, msg, "fatal", true)
	klog.FlushAndExit(klog.ExitFlushTimeout, 1)
}

// Resync is how often everything is looked at that events should have told of.
const resync = 30 * time.Second

var (
	_ kubeletplugin.DRAPlugin = (*Driver)(nil)
	_ attach.Handler          = (*Driver)(nil)
)
