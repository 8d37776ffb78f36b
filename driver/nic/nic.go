// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nic implements the device kind NIC: it maps what package netdev
// discovers and enforces to claims, shares, and parameters. A share of a NIC is
// a macvlan link in each pod of the claim; all its links share one class on
// the node. The files are:
//
//	options.go    what the kind is built from
//	nic.go        the devices of the node, and the methods of driver.Kind
//	problems.go   NICs that cannot be shared: events, readiness, takeover
//	devices.go    NICs of the node -> devices to publish
//	memory.go     NIC state kept for the next plugin
//	stack.go      VLANs and bonds: the NICs below them
//	parameters.go a share's grant and parameters -> link and rates
//	attach.go     share -> link in a pod
//	addresses.go  addresses from pools, which the attachment record reserves
//	dhcp.go       leases of addresses from DHCP servers
//	renew.go      renewal of these leases
//	refusedlinks.go  links on the node with frames that the kernel drops
//	hidden.go     links that pods hide in network namespaces that they create
//	lost.go       pool addresses that the node has lost
//	duplicates.go addresses that another host on the network has
//	identity.go   the identity that the kernel checks in the frames of a link
//	status.go     link in the kernel -> conditions and data of the claim
//	checks.go     the features of the node's kernel
//	metrics.go    the kernel's counters, and the checks, as metrics
//	watch.go      kernel events -> changes for the driver
//	orphans.go    kernel objects that no share needs
package nic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/device/containeredits"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/requeue"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// Name is the name of the kind.
const Name = v1alpha1.DeviceKindNIC

// Kind implements driver.Kind and driver.Attacher for NICs.
type Kind struct {
	node      *netdev.Node
	inventory *netdev.Inventory
	config    *config.DriverConfig
	// addresses is nil if the kind assigns no addresses of AddressPools.
	addresses *ipam.Allocator
	// openSockets is nil if the kind leases no addresses; see Options.OpenSockets.
	openSockets func(ctx context.Context, r attach.Record) (attach.Sockets, error)
	failpoints  failpoint.Injector
	// leases counts the leases of links by state; nil until they were counted for the first time.
	leases atomic.Pointer[leaseStates]
	// leaseFailures has the message of the last failed attempt to keep or get the lease of a link, by leaseID.
	leaseFailures sync.Map
	// duplicates are the hosts that have addresses of links.
	duplicates *duplicates
	// lost are the addresses of links that the node has lost.
	lost *lostAddresses
	// hidden are the links that pods hide.
	hidden *hiddenLinks

	// mu is held during Refresh, including its requests to the kernel, so attaching a share waits for them.
	mu sync.RWMutex
	// memory is what is known about NICs since the node booted.
	memory memory
	// devices is nil before the first Refresh. A device in it is not modified.
	devices map[string]*device
	// failedNICs are the names of NICs, by index, where setting up or removing enforcement has failed, until either
	// succeeds.
	failedNICs map[int]string
	// loggedTrials reports whether the results of the trials were logged.
	loggedTrials bool
	// problems are the problems that the last Refresh found.
	problems []problem
	// refusedLinks are the last Refresh's warnings about links on the node with dropped frames.
	refusedLinks []driver.Warning
}

var (
	_ driver.Kind                 = (*Kind)(nil)
	_ driver.Attacher             = (*Kind)(nil)
	_ driver.Comparer             = (*Kind)(nil)
	_ driver.Protector            = (*Kind)(nil)
	_ driver.Reserver             = (*Kind)(nil)
	_ driver.Renewer              = (*Kind)(nil)
	_ driver.Watcher              = (*Kind)(nil)
	_ driver.HealthReporter       = (*Kind)(nil)
	_ driver.ReadinessChecker     = (*Kind)(nil)
	_ driver.Cleaner              = (*Kind)(nil)
	_ driver.CombinationValidator = (*Kind)(nil)
	_ driver.MetricsCollector     = (*Kind)(nil)
	_ driver.ProblemReporter      = (*Kind)(nil)
	_ driver.WarningReporter      = (*Kind)(nil)
	_ driver.TakeoverChecker      = (*Kind)(nil)
)

// Name implements driver.Kind.
func (k *Kind) Name() string { return Name }

// Refresh implements driver.Kind. It sets up enforcement on configured NICs wherever it differs, and removes it from
// NICs that are no longer configured, even if an earlier plugin set it up.
func (k *Kind) Refresh(ctx context.Context, shares []record.Share) (refreshed driver.Refreshed, err error) {
	nics, err := k.list(ctx)
	if err != nil {
		return refreshed, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.planRefresh(nics, shares)
	problems := append(p.problems, k.unmanage(p.unwanted)...)
	k.node.RetryTrials()
	next, failed, refreshed := k.manageAll(p.devices, nics)
	problems = append(problems, failed...)
	for name := range p.grants {
		if next[name] == nil {
			next[name] = k.absent(name, p.devices, problems)
		}
	}
	k.remember(ctx, nics)
	k.holdGateways(ctx, next, gatewaysOf(shares))
	k.logTrials(ctx)
	k.log(ctx, changesOf(k.devices, next, k.problems, problems))
	k.store(next, problems, nics)
	return refreshed, nil
}

// refreshPlan is what a Refresh has to do.
type refreshPlan struct {
	devices  []*device         // devices with NICs that Refresh manages
	grants   map[string]uint64 // see sumGrants
	unwanted map[int]string    // see Kind.unwanted
	problems []problem         // problems of NICs that cannot be shared
}

// planRefresh plans a Refresh without changing the kind or the node. nics are the node's NICs, and shares are the
// recorded shares. The caller holds k.mu.
func (k *Kind) planRefresh(nics []netdev.NIC, shares []record.Share) refreshPlan {
	planned, problems := plan(nics, k.config)
	grants := sumGrants(shares)
	isKnown := func(name string) bool {
		_, granted := grants[name]
		return granted || k.devices[name] != nil
	}
	nameUniquely(planned, isKnown)
	for _, d := range planned {
		d.granted = grants[d.name]
	}
	return refreshPlan{
		devices: planned, grants: grants, unwanted: k.unwanted(nics, planned, grants),
		problems: withoutExpected(problems, planned, func(name string) bool { return isKnown(name) || k.hasProblem(name) }),
	}
}

// manageAll sets up enforcement on planned devices' NICs. It returns the devices that can be shared, by name, and the
// others' problems. The caller holds k.mu.
func (k *Kind) manageAll(
	planned []*device, nics []netdev.NIC,
) (shared map[string]*device, problems []problem, refreshed driver.Refreshed) {
	shared = map[string]*device{}
	for _, d := range planned {
		old := k.devices[d.name]
		d.pci = pciAttributes(d.base, func(busID string) attribute.Map {
			return attribute.PCI(k.inventory.Sysfs(), busID)
		})
		refreshed.RequeueAfter = requeue.Soonest(refreshed.RequeueAfter, d.debounceCarrier(old, time.Now()))
		repaired, err := k.manage(d, nics)
		if err != nil {
			k.failedNICs[d.nic.Index] = d.nic.Name
			problems = append(problems, problem{d.nic.Name, d.name, withRemedy(err)})
			continue
		}
		if repaired || old == nil || old.absent || d.guaranteesDiffer(old) {
			refreshed.Changed = true
		} else if d.missed != old.missed {
			refreshed.Affected = append(refreshed.Affected, d.name)
		}
		delete(k.failedNICs, d.nic.Index)
		shared[d.name] = d
	}
	return shared, problems, refreshed
}

// store makes the results of a Refresh the current ones. The caller holds k.mu.
func (k *Kind) store(devices map[string]*device, problems []problem, nics []netdev.NIC) {
	k.devices, k.problems, k.refusedLinks = devices, problems, nil
	if !k.node.IsUnchecked() {
		k.refusedLinks = linksWarnings(newStack(nics, k.config), devices)
	}
}

// hasProblem reports whether the last Refresh found a problem of a device. The caller holds k.mu.
func (k *Kind) hasProblem(device string) bool {
	return slices.ContainsFunc(k.problems, func(p problem) bool { return p.device == device })
}

// manage sets up enforcement on the NIC of a device, which is one of nics, and sets what the device reports about it.
func (k *Kind) manage(d *device, nics []netdev.NIC) (repaired bool, err error) {
	if err := k.errIfMayBecomeUplink(d, nics); err != nil {
		return false, err
	}
	c := d.nicConfig()
	if repaired, err = k.node.Manage(c); err != nil {
		return repaired, err
	}
	if c.Enforce {
		d.senderKey, d.queue = k.node.ClassifierKey(), k.node.Queue()
		d.checks = checks(k.node.Trials(), d.senderKey)
		d.setShaping(k.node.Trees(d.nic.Index))
	}
	d.missed = k.node.Missed(d.nic.Index)
	return repaired, nil
}

// sumGrants returns the sum of grants for each device with shares, in bits per second.
func sumGrants(shares []record.Share) map[string]uint64 {
	sum := map[string]uint64{}
	for _, s := range shares {
		grant, err := grantOf(s)
		if err != nil || s.AdminAccess {
			grant = 0
		}
		sum[s.Device] += grant
	}
	return sum
}

// unwanted returns the names, by index, of the NICs to remove enforcement from: the ones that this plugin has managed
// or failed to manage and, at the first Refresh, all others, because an earlier plugin may have managed them. It
// omits NICs that are planned or have grants: existing shares keep their limits, even if the NIC was removed from the
// configuration or currently cannot be shared.
func (k *Kind) unwanted(nics []netdev.NIC, planned []*device, grants map[string]uint64) map[int]string {
	unwanted := k.managedInterfaces()
	for _, n := range nics {
		d := k.devices[deviceName(n)]
		if k.devices == nil || d != nil && d.absent {
			unwanted[n.Index] = n.Name
		}
	}
	for _, n := range nics {
		if _, granted := grants[deviceName(n)]; granted {
			delete(unwanted, n.Index)
		}
	}
	for _, d := range planned {
		delete(unwanted, d.nic.Index)
	}
	return unwanted
}

// isShared reports whether the device is on the node and in the configuration.
func (d *device) isShared() bool { return !d.absent && d.network != nil }

// managedInterfaces returns the names, by index, of the NICs where this plugin has set up enforcement, perhaps
// partly.
func (k *Kind) managedInterfaces() map[int]string {
	managed := maps.Clone(k.failedNICs)
	for _, d := range k.devices {
		if d.isShared() {
			managed[d.nic.Index] = d.nic.Name
		}
	}
	return managed
}

// unmanage removes enforcement from NICs and restores their queues. The next Refresh tries again where that fails.
func (k *Kind) unmanage(nics map[int]string) (problems []problem) {
	for index, name := range nics {
		if _, err := k.node.Unmanage(name, index); err != nil {
			k.failedNICs[index] = name
			problems = append(problems, problem{name, "", err})
			continue
		}
		delete(k.failedNICs, index)
	}
	return problems
}

// Cleanup implements driver.Cleaner.
func (k *Kind) Cleanup(context.Context) (failed error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.unmanage(k.managedInterfaces()) {
		failed = errors.Join(failed, fmt.Errorf("NIC %s: %w", p.nic, p.err))
	}
	k.devices = nil
	if k.addresses != nil {
		failed = errors.Join(failed, k.addresses.Cleanup())
	}
	return errors.Join(failed, k.memory.remove(), k.node.RemovePins())
}

// absent returns a device that has shares and is missing from the node, or cannot be
// shared. It is a copy, because other goroutines may be reading the current one.
func (k *Kind) absent(name string, planned []*device, problems []problem) *device {
	d := device{name: name}
	if last := k.devices[name]; last != nil {
		d = *last
	}
	for _, p := range planned {
		if p.name == name {
			d = *p
		}
	}
	d.absent, d.unusable = true, nil
	for _, p := range problems {
		if p.device == name {
			d.unusable = p.err
		}
	}
	return &d
}

// changes are what a Refresh changed, for the log. Devices are sorted by name.
type changes struct {
	missing     []*device // newly missing devices that have shares
	shared      []*device // devices that are newly shared or have a changed link
	singleQueue []*device // devices that newly keep one queue, or for another reason
	stopped     []*device // devices that are no longer shared
	problems    []problem // problems that the previous Refresh did not find
}

// changesOf returns what differs between the devices and problems of two Refresh calls.
func changesOf(old, next map[string]*device, oldProblems, problems []problem) (c changes) {
	for _, name := range slices.Sorted(maps.Keys(next)) {
		d, before := next[name], old[name]
		switch {
		case d.absent && d.unusable == nil && (before == nil || !before.absent):
			c.missing = append(c.missing, d)
		case !d.absent && (before == nil || before.absent || before.down != d.down || before.line != d.line):
			c.shared = append(c.shared, d)
		}
		if d.singleQueue != "" && (before == nil || before.singleQueue != d.singleQueue) {
			c.singleQueue = append(c.singleQueue, d)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(old)) {
		if next[name] == nil {
			c.stopped = append(c.stopped, old[name])
		}
	}
	for _, p := range problems {
		known := func(old problem) bool { return old.nic == p.nic && old.err.Error() == p.err.Error() }
		if !slices.ContainsFunc(oldProblems, known) {
			c.problems = append(c.problems, p)
		}
	}
	return c
}

// log logs what a Refresh changed.
func (k *Kind) log(ctx context.Context, c changes) {
	logger := klog.FromContext(ctx)
	for _, d := range c.missing {
		logger.Info("NIC with shares is missing from the node or the configuration; keeping its limits in place",
			"device", d.name)
	}
	for _, d := range c.shared {
		logger.Info("Shared NIC", "device", d.name, "interface", d.nic.Name, "bitsPerSecond", d.line, "linkDown", d.down,
			"senderKey", k.node.ClassifierKey())
	}
	for _, d := range c.singleQueue {
		logger.Info("NIC keeps one queue, although its network has shaping MultiQueue",
			"device", d.name, "interface", d.nic.Name, "reason", d.singleQueue)
	}
	for _, d := range c.stopped {
		logger.Info("Stopped sharing NIC", "device", d.name, "interface", d.nic.Name)
	}
	for _, p := range c.problems {
		logger.Error(p.err, "Cannot share NIC", "interface", p.nic)
	}
}

// Devices implements driver.Kind.
func (k *Kind) Devices() []resourceapi.Device {
	var devices []resourceapi.Device
	for _, d := range k.sorted() {
		if d.network == nil {
			continue // missing since before this plugin started; see driver.Kind
		}
		devices = append(devices, d.publish())
	}
	return devices
}

// Health implements driver.HealthReporter.
func (k *Kind) Health() []driver.Health {
	var health []driver.Health
	for _, d := range k.sorted() {
		_, message := d.unhealthyReason()
		health = append(health, driver.Health{Device: d.name, Healthy: message == "", Message: message})
	}
	return health
}

// sorted returns all devices, by name.
func (k *Kind) sorted() []*device {
	k.mu.RLock()
	defer k.mu.RUnlock()
	devices := make([]*device, 0, len(k.devices))
	for _, d := range k.devices {
		devices = append(devices, d)
	}
	sort.Slice(devices, func(a, b int) bool { return devices[a].name < devices[b].name })
	return devices
}

// sharedDevices returns the devices that are on the node and in the configuration.
func (k *Kind) sharedDevices() []*device {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.sharedDevicesLocked()
}

// Has implements driver.Kind.
func (k *Kind) Has(name string) bool {
	_, err := k.device(name)
	return err == nil
}

// device returns the device of that name.
func (k *Kind) device(name string) (*device, error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	d, ok := k.devices[name]
	if !ok {
		return nil, fmt.Errorf(
			"this node has no NIC %s: was it removed from the node, or from the driver's configuration?", name)
	}
	return d, nil
}

// Configure implements driver.Kind.
func (k *Kind) Configure(
	ctx context.Context, namespace string, share record.Share, parameters [][]byte,
) (json.RawMessage, error) {
	d, err := k.device(share.Device)
	if err != nil {
		return nil, err
	}
	merged, err := mergeParameters(parameters)
	if err != nil {
		return nil, err
	}
	if merged.AdminLink && !share.AdminAccess {
		return nil, fmt.Errorf(
			"%s: adminLink: Forbidden: true: the request does not have adminAccess and gets a link without this field: "+
				"remove it", v1alpha1.NetworkAttachmentKind)
	}
	if d.network == nil {
		return nil, d.absentError()
	}
	if errs := merged.ValidateFor(d.network.Allowed(int32(d.nic.MTU))); len(errs) > 0 {
		return nil, fmt.Errorf("%s: %w", v1alpha1.NetworkAttachmentKind, errs.ToAggregate())
	}
	if err := k.configureDHCP(ctx, namespace, d.network, merged); err != nil {
		return nil, fmt.Errorf("%s: %w", v1alpha1.NetworkAttachmentKind, err)
	}
	if err := k.configurePools(ctx, namespace, d.network.Name, merged); err != nil {
		return nil, fmt.Errorf("%s: %w", v1alpha1.NetworkAttachmentKind, err)
	}
	if err := checkRuleSources(merged); err != nil {
		return nil, fmt.Errorf("%s: %w", v1alpha1.NetworkAttachmentKind, err)
	}
	return json.Marshal(merged)
}

// ValidateCombination implements driver.CombinationValidator: within a pod, the
// names and addresses of links must differ.
func (k *Kind) ValidateCombination(shares []record.Share) error {
	names, addresses := map[string]string{}, map[string]string{}
	for _, s := range shares {
		if !k.Attaches(s) {
			continue
		}
		p, err := parametersOf(s)
		if err != nil {
			return err
		}
		if other, taken := names[p.InterfaceName]; taken && p.InterfaceName != "" {
			return fmt.Errorf("%s: interfaceName: Duplicate value: %q: the shares of requests %s and %s need different names: "+
				"remove interfaceName, or give each request its own parameters",
				v1alpha1.NetworkAttachmentKind, p.InterfaceName, other, s.Request)
		}
		names[p.InterfaceName] = s.Request
		for _, a := range p.Addresses {
			if other, taken := addresses[a]; taken {
				return fmt.Errorf("%s: addresses: Duplicate value: %q: the shares of requests %s and %s need different addresses",
					v1alpha1.NetworkAttachmentKind, a, other, s.Request)
			}
			addresses[a] = s.Request
		}
	}
	return nil
}

// Admit implements driver.Kind: the sum of all grants must not exceed the NIC's bandwidth, and the number of shares
// must not exceed its limit.
func (k *Kind) Admit(share record.Share, others []*record.Share) error {
	d, err := k.device(share.Device)
	if err != nil {
		return err
	}
	if d.absent {
		return d.absentError()
	}
	grant, err := grantOf(share)
	if err != nil {
		return err
	}
	var granted, shares uint64
	for _, o := range others {
		if o.AdminAccess {
			continue
		}
		if n, err := grantOf(*o); err == nil {
			granted += n
		}
		shares++
	}
	switch total := d.bandwidth(); {
	case granted > total:
		return fmt.Errorf(
			"bandwidth %s: NIC %s has %s bit/s to grant, less than the %s that are already granted: has its link become slower?",
			formatRate(grant), share.Device, formatRate(total), formatRate(granted))
	case granted+grant > total:
		return fmt.Errorf("bandwidth %s: NIC %s has %s bit/s to grant, and %s are granted to other claims on this node",
			formatRate(grant), share.Device, formatRate(total), formatRate(granted))
	}
	if limit := uint64(*d.network.Shares); shares >= limit {
		return fmt.Errorf("shares: NIC %s already has %d shares, its limit", share.Device, limit)
	}
	return nil
}

// Edits implements driver.Kind.
func (k *Kind) Edits(share record.Share) (edits cdi.Edits, err error) {
	if share.AdminAccess {
		return containeredits.AdminAccess(share.Request), nil
	}
	grant, err := grantOf(share)
	variable := containeredits.Variable(share.Request, v1alpha1.EnvironmentBandwidth)
	edits.Env = []string{fmt.Sprintf("%s=%d", variable, grant)}
	if p, paramsErr := parametersOf(share); paramsErr == nil && hasOnlyIPv4(p) {
		edits.Hook = []string{"--" + attach.AnnounceIPv6Flag + "=false"}
	}
	return edits, err
}

// nicConfig returns the NIC as package netdev manages it.
func (d *device) nicConfig() netdev.NICConfig {
	return netdev.NICConfig{
		Name: d.nic.Name, Index: d.nic.Index, MAC: d.nic.MAC,
		Enforce: d.network.Enforcement == config.EnforcementShape,
		Rates: shape.NICRates{Line: d.line, Reserve: d.reserve, MinShare: uint64(d.network.Policy.Min.Value()),
			Multicast: d.multicast(), Overhead: uint16(d.network.Overhead)},
		QueuePerShare: d.network.Shaping == config.ShapingMultiQueue,
		TakeOver:      d.network.TakeOver, TrustMAC: d.network.TrustMAC, Forwarded: d.forwarded,
		Policy: identityPolicy(d.network),
	}
}

// formatRate formats a rate in bits per second with a unit prefix, such as 200M.
func formatRate(bitsPerSecond uint64) string {
	return resource.NewQuantity(int64(bitsPerSecond), resource.DecimalSI).String()
}
