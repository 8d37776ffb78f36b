// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package driver is the core of the node plugin. It publishes devices, prepares
// and unprepares claims for the kubelet, attaches shares for the OCI hook, and
// reports their state. It handles every kind of device through the interface
// Kind and does not depend on links, rates, or device files. The files follow
// the lifecycle of a claim:
//
//	publish.go     devices -> ResourceSlices
//	slicecheck.go  ResourceSlices that the API server has -> readiness (slicestate.go), event, metric
//	prepare.go     claim -> claim record, CDI spec
//	plan.go        allocation -> shares with their parameters
//	admit.go       shares, other shares of their devices -> shares in the claim record
//	cdispec.go     shares -> CDI devices, response to the kubelet
//	helper.go      the library that serves the kubelet
//	attach.go      hook -> attachment in the pod, attachment record
//	watch.go       changes that kinds observe -> refresh, detach, report
//	detach.go      a sandbox ended while the claim remains in use
//	ended.go       queue of ended sandboxes -> detach (detachments.go: when a claim's share was last detached)
//	unprepare.go   the claim's last pod on this node has ended
//	renew.go       attachments that a kind updates while their pods run
//
// A share's state reaches users by:
//
//	observe.go     kernel -> state of each share
//	consumers.go   API server -> a claim's pods, and which of them never attach (claimreader.go: the claim)
//	failures.go    why attaching shares to pods failed
//	status.go      state -> entry of the claim's status.devices
//	report.go      the queue that writes entries until they are written
//	podevents.go   changed conditions -> Kubernetes events on pods
//	nodeevents.go  problems of the node -> Kubernetes events on the Node
//	metadata.go    the device metadata files of containers (KEP-5304); metadatarestore.go: removed files
//	health.go      device health; probes.go: health of this plugin
//	metrics.go     Prometheus metrics
//	degraded.go    features that do not work on the node or cluster -> log, metric
//
// Faults are handled by:
//
//	restore.go     attachments and specs that differ from their records
//	hook.go        a hook that another program removed
//	node.go        a Node that was deleted and registered again
//	gc.go          garbage collection of what crashes and reboots left
//	graceperiod.go when orphans were first found
//	takeover.go    a plugin that cannot serve what its predecessor serves
//	handover.go    two plugins that run during a rolling update
//	cleanup.go     removal of the driver
//	claimlocks.go  one step of a claim at a time
//
// Claim records are in package record; records.go reads them and attachment records. kind.go has the interface Kind;
// attacher.go and reserver.go have the interfaces of kinds that attach shares to pods. shares.go connects a recorded
// share to its kind.
package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/driver/lock"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// Driver implements kubeletplugin.DRAPlugin and attach.Handler. It is safe for
// concurrent use.
type Driver struct {
	options Options
	kinds   kinds
	records *nodeRecords
	locks   claimLocks
	helper  *helper

	specs          *claimSpecs
	hook           *hookInstaller
	deviceMetadata *deviceMetadata

	publisher *publisher
	health    *healthBroadcaster
	apiClaims claimReader
	observer  *observer
	reporter  *reporter

	handover *handover
	takeover *takeover
	// outdated reports whether this plugin has ignored changes, because a newer one ran.
	outdated       atomic.Bool
	endedSandboxes *endedSandboxes

	failures     failures
	detachments  detachments
	warnings     *warnings
	metrics      *metrics
	degradations *degradations
	// fatal receives an error that the driver cannot recover from.
	fatal context.CancelCauseFunc
}

// resyncInterval is how often the driver repeats everything that events should have triggered.
const resyncInterval = 30 * time.Second

// New builds a driver. It reads o.BootIDFile, creates the directories of records, CDI specs, and
// locks, and registers the metrics. It starts nothing.
func New(o Options) (*Driver, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	o.setDefaults()
	raw, err := os.ReadFile(o.BootIDFile)
	if err != nil {
		return nil, fmt.Errorf("identify the current boot: %w", err)
	}
	bootID := strings.TrimSpace(string(raw))
	claims, err := record.NewStore(record.Dir(o.PluginDir), bootID, o.Failpoints)
	if err != nil {
		return nil, err
	}
	specs, err := cdi.New(o.CDIDir, cdi.FilesDir(o.PluginDir), o.DriverName, o.Failpoints)
	if err != nil {
		return nil, err
	}
	locks, err := lock.Open(lock.Path(o.RunDir))
	if err != nil {
		return nil, err
	}
	kinds := kinds{all: o.Kinds, node: o.NodeName}
	d := &Driver{
		options: o,
		kinds:   kinds,
		records: &nodeRecords{
			claims:      claims,
			attachments: attach.OpenRecords(o.RunDir, bootID, o.Failpoints),
			kinds:       kinds,
		},
		locks:          claimLocks{locks},
		helper:         newHelper(),
		health:         newHealthBroadcaster(),
		apiClaims:      claimReader{o.Client},
		handover:       newHandover(locks, o.Instance),
		endedSandboxes: newEndedSandboxes(),
		warnings:       newWarnings(o.Events, o.NodeName),
	}
	d.metrics = newMetrics(o, d.records, kinds)
	d.degradations = &degradations{gauge: d.metrics.degraded}
	d.hook = &hookInstaller{installation: o.Installation, path: o.Hook, warnings: d.warnings, degradations: d.degradations}
	d.specs = &claimSpecs{Specs: specs, runDir: o.RunDir, hook: d.hook}
	d.deviceMetadata = newDeviceMetadata(o, d.records, kinds, d.locks, d.helper)
	d.observer = d.newObserver()
	d.reporter = newReporter(o, d.records, d.observer, d.metrics.reports)
	d.publisher = d.newPublisher()
	d.takeover = d.newTakeover()
	return d, nil
}

// Start serves health checks, waits while another plugin serves what this one cannot, sets up the devices, restores
// the attachments of an earlier plugin, and then serves hooks and finally the kubelet. It returns once all of these
// run, or ctx was canceled. wait returns after all of them have stopped: with nil because ctx was canceled, or with
// the error of a service that the driver cannot run without.
func (d *Driver) Start(ctx context.Context) (wait func() error, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	d.fatal = cancel
	var group sync.WaitGroup
	defer func() {
		if err != nil {
			cancel(err)
			group.Wait()
			d.handover.abandon()
		}
	}()
	probes := d.newProbes()
	d.serve(ctx, &group, "health", probes.serve)
	node := &nodeWatch{client: d.options.Metadata, name: d.options.NodeName, degradations: d.degradations}
	owner := make(chan types.UID, 1)
	group.Go(func() { owner <- node.readOwner(ctx) }) // it may wait for the API server
	if err := d.takeover.run(ctx); err != nil {
		if errors.Is(context.Cause(ctx), context.Canceled) { // stopped while it waited
			d.handover.abandon()
			group.Wait()
			return func() error { return nil }, nil
		}
		return nil, err
	}
	uid := <-owner // before hooks, which hold the lock of their claim until the helper has started
	if err := d.startServices(ctx, &group); err != nil {
		return nil, err
	}
	d.serve(ctx, &group, "watch of the Node", func(ctx context.Context) error { return node.run(ctx, uid) })
	if err := d.register(ctx, uid, probes); err != nil {
		return nil, err
	}
	d.startLoops(ctx, &group)
	return func() error {
		<-ctx.Done()
		return d.shutdown(ctx, &group)
	}, nil
}

// register starts the helper, which serves the kubelet and registers the plugin. uid is the UID of the Node, or "".
func (d *Driver) register(ctx context.Context, uid types.UID, probes *probes) error {
	options := append(d.pluginOptions(uid), kubeletplugin.GRPCInterceptor(probes.observeRegistration))
	started, err := kubeletplugin.Start(ctx, d, options...)
	if err != nil {
		return fmt.Errorf("register with the kubelet: %w: do %s and %s exist?", err, d.options.PluginDir,
			d.options.RegistryDir)
	}
	d.helper.set(started)
	return nil
}

// shutdown stops the helper after ctx has ended, waits for everything that Start started, and hands the node over, or
// cleans it up. It returns nil if ctx was canceled, and otherwise the error of the service that ended it.
func (d *Driver) shutdown(ctx context.Context, group *sync.WaitGroup) error {
	d.helper.Stop()
	group.Wait()
	if err := d.handover.stop(func() { d.cleanup(context.WithoutCancel(ctx)) }); err != nil {
		return err
	}
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// prepareToServe makes the records, devices, and attachments agree before the driver serves any request.
func (d *Driver) prepareToServe(ctx context.Context) error {
	d.records.renameCorrupt(ctx)
	d.records.removeRecordsOfOtherBoots(ctx)
	if _, err := d.publisher.refreshKinds(ctx); err != nil { // all devices are new, and restore follows
		return err
	}
	d.recoverReservations(ctx)
	d.restore(ctx)
	return nil
}

// recoverTimeout limits how long recoverReservations delays the start of the driver for each kind.
const recoverTimeout = 10 * time.Second

// recoverReservations handles attachments that lost a reservation while no plugin ran, such as an address that
// another node has assigned. If a kind cannot find out because the API server is unavailable, its attachments stay
// unchanged; MaintainReservations finds the losses later.
func (d *Driver) recoverReservations(ctx context.Context) {
	for k, reserver := range kindsOf[Reserver](d.kinds) {
		limited, cancel := context.WithTimeout(ctx, recoverTimeout)
		change, err := reserver.RecoverReservations(limited, d.records)
		cancel()
		if err != nil {
			klog.FromContext(ctx).Error(err, "Failed to find attachments that have lost reservations; retrying later",
				"kind", k.Name())
			continue
		}
		d.handle(ctx, change)
	}
}

// startServices starts the services that must run before the plugin registers with the kubelet. The driver cannot run
// without any of them.
func (d *Driver) startServices(ctx context.Context, group *sync.WaitGroup) error {
	hooks, err := attach.Listen(d.options.RunDir, d.options.Instance, d)
	if err != nil {
		return err
	}
	d.serve(ctx, group, "hooks", hooks.Serve)
	d.serve(ctx, group, "watch of the hook", d.hook.watch)
	for k, watcher := range kindsOf[Watcher](d.kinds) {
		d.serve(ctx, group, "watch "+k.Name(), func(ctx context.Context) error { return d.watch(ctx, watcher) })
	}
	return nil
}

// serve runs a service that the driver cannot run without, until ctx ends.
func (d *Driver) serve(ctx context.Context, group *sync.WaitGroup, name string, run func(context.Context) error) {
	group.Go(func() {
		if err := run(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Service failed", "service", name)
			d.fatal(err)
		}
	})
}

// startLoops starts the background work.
func (d *Driver) startLoops(ctx context.Context, group *sync.WaitGroup) {
	group.Go(func() { d.reporter.run(ctx) })
	group.Go(func() { d.resync(ctx) })
	group.Go(func() { d.detachEndedSandboxes(ctx) })
	group.Go(func() { d.deviceMetadata.restore(ctx) })
	for _, reserver := range kindsOf[Reserver](d.kinds) {
		group.Go(func() { reserver.MaintainReservations(ctx, d.records) })
	}
	for k, renewer := range kindsOf[Renewer](d.kinds) {
		group.Go(func() { renewer.Renew(ctx, attachmentsOfKind{driver: d, kind: k.Name()}) })
	}
	group.Go(func() { d.publisher.run(ctx, d.helper.Helper) })
	group.Go(func() { d.newGarbageCollector().run(ctx) })
	group.Go(func() { d.handover.awaitPredecessors(ctx, d.resumeAfterOther) })
}

// resumeAfterOther repeats changes that another, possibly differently configured plugin may have overwritten before
// it stopped.
func (d *Driver) resumeAfterOther(ctx context.Context) {
	klog.FromContext(ctx).Info("Another plugin stopped; refreshing devices, shares, and status")
	d.reporter.written.ForgetAll()
	d.publisher.requestRefresh()
	d.restore(ctx)
}

// pluginOptions returns the helper's options. uid is the UID of the Node; if empty, the helper reads it.
func (d *Driver) pluginOptions(uid types.UID) []kubeletplugin.Option {
	options := []kubeletplugin.Option{
		kubeletplugin.DriverName(d.options.DriverName),
		kubeletplugin.NodeName(d.options.NodeName),
		kubeletplugin.KubeClient(d.options.Client),
		kubeletplugin.PluginDataDirectoryPath(d.options.PluginDir),
		kubeletplugin.RegistrarDirectoryPath(d.options.RegistryDir),
		kubeletplugin.Serialize(false), // the driver locks each claim, across plugins
	}
	options = append(options, d.deviceMetadata.helperOptions()...)
	if uid != "" {
		options = append(options, kubeletplugin.NodeUID(uid))
	}
	if d.options.RollingUpdate {
		options = append(options, kubeletplugin.RollingUpdate(types.UID(d.options.Instance)))
	}
	return options
}

// HandleError implements kubeletplugin.DRAPlugin. An error that is not
// recoverable stops the driver.
func (d *Driver) HandleError(ctx context.Context, err error, msg string) {
	if d.publisher.handleDroppedFields(ctx, err) || d.publisher.handleRefusal(ctx, err) {
		return
	}
	klog.FromContext(ctx).Error(err, "Kubelet plugin helper reported an error", "operation", msg)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		d.fatal(fmt.Errorf("%s: %w", msg, err))
	}
}

var (
	_ kubeletplugin.DRAPlugin = (*Driver)(nil)
	_ attach.Handler          = (*Driver)(nil)
)
