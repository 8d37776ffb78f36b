// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/requeue"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

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
	k.saveState(ctx, nics)
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

// unmanage removes enforcement, including the queues, from NICs. The next Refresh tries again where that fails.
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
