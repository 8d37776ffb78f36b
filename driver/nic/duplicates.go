// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/dad"
)

const (
	// refuseWait is how long an attachment waits for hosts that have its addresses
	// (DuplicateAddressRefuse). Hosts on one network answer within milliseconds.
	refuseWait = 200 * time.Millisecond
	// reportWait is how long the plugin waits for such hosts in the background.
	reportWait = time.Second
	// reportBatch is the number of addresses that the plugin probes at a time in the background:
	// after a restart there may be thousands.
	reportBatch = 64
	// recheckInterval is how often the plugin probes an address that another host has.
	recheckInterval = 30 * time.Second
	// conflictInterval is how often the plugin asks the classifier for hosts that have used a link's address. If there
	// are none, that takes one system call.
	conflictInterval = 5 * time.Second
)

// addressOwners maps addresses to the MAC addresses of the other hosts that have them.
type addressOwners map[netip.Addr]net.HardwareAddr

func (o addressOwners) String() string {
	var texts []string
	for _, address := range slices.SortedFunc(maps.Keys(o), netip.Addr.Compare) {
		texts = append(texts, fmt.Sprintf("%s (MAC address %s)", address, o[address]))
	}
	return strings.Join(texts, ", ")
}

func (o addressOwners) equal(other addressOwners) bool {
	return maps.EqualFunc(o, other, func(a, b net.HardwareAddr) bool { return bytes.Equal(a, b) })
}

// linkID identifies a link in an attachment record. No two links of a NIC have the same
// MAC address.
type linkID struct {
	parent int
	mac    string
}

func idOf(link attach.Link) linkID { return linkID{link.Parent, link.MAC} }

// duplicates holds the links with addresses to probe, and the other hosts that were found to have a link's address.
type duplicates struct {
	wake    chan struct{} // has an element if pending has grown
	changed chan struct{} // has an element if altered has grown

	mu      sync.Mutex
	pending map[linkID]pendingLink
	asking  map[linkID]bool // taken from pending; record has not been called yet
	found   map[linkID]addressOwners
	// altered are the links with entries in found that have changed since takeAltered.
	altered map[linkID]bool
}

// pendingLink is a link with addresses to probe.
type pendingLink struct {
	device string
	link   attach.Link
	// waits reports whether the next attempt waits for recheckInterval, because the last one failed or found that
	// another host has an address.
	waits bool
}

func newDuplicates() *duplicates {
	return &duplicates{
		wake: make(chan struct{}, 1), changed: make(chan struct{}, 1),
		pending: map[linkID]pendingLink{}, asking: map[linkID]bool{}, found: map[linkID]addressOwners{},
		altered: map[linkID]bool{},
	}
}

// add makes detectDuplicates probe a link's addresses.
func (d *duplicates) add(device string, link attach.Link) {
	if len(link.Sources) == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pending[idOf(link)] = pendingLink{device: device, link: link}
	signal(d.wake)
}

// addConflicting adds the links with an address that another host on the network has used. The host
// may have forged the address in its frames, so only its answers to probes count.
func (d *duplicates) addConflicting(records []attach.Record, conflicts []classify.Conflict) {
	used := map[linkID][]classify.Conflict{}
	for _, c := range conflicts {
		id := linkID{c.Parent, c.Link.String()}
		used[id] = append(used[id], c)
	}
	for _, r := range records {
		link, err := r.Link()
		if err != nil || r.Kind != Name {
			continue
		}
		known := d.ownersOf(link.Parent, link.MAC)
		isNew := func(c classify.Conflict) bool { return known[c.Address] == nil }
		if slices.ContainsFunc(used[idOf(link)], isNew) {
			d.add(r.Device, link)
		}
	}
}

// forget removes a link, which no longer exists.
func (d *duplicates) forget(parent int, mac string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.pending, linkID{parent, mac})
	delete(d.asking, linkID{parent, mac})
	delete(d.found, linkID{parent, mac})
}

// ownersOf returns the other hosts that have a link's addresses.
func (d *duplicates) ownersOf(parent int, mac string) addressOwners {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.found[linkID{parent, mac}]
}

// takeAltered returns the links with results that have changed since the last call.
func (d *duplicates) takeAltered() map[linkID]bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	altered := d.altered
	d.altered = map[linkID]bool{}
	return altered
}

// signal adds an element to a channel of capacity 1, unless it has one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// recheck ends the wait of all links.
func (d *duplicates) recheck() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, p := range d.pending {
		p.waits = false
		d.pending[id] = p
	}
}

// next returns links of one device that do not wait. Together they have at most reportBatch
// addresses, unless the first link alone has more. The caller must call record or retry.
func (d *duplicates) next() (device string, links []attach.Link) {
	d.mu.Lock()
	defer d.mu.Unlock()
	addresses := 0
	for id, p := range d.pending {
		if p.waits || device != "" && p.device != device {
			continue
		}
		if addresses += len(p.link.Sources); addresses > reportBatch && len(links) > 0 {
			break
		}
		device = p.device
		links = append(links, p.link)
		d.asking[id] = true
		delete(d.pending, id)
	}
	return device, links
}

// retry makes detectDuplicates probe the links' addresses again after recheckInterval.
func (d *duplicates) retry(device string, links []attach.Link) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, link := range links {
		if id := idOf(link); d.asking[id] {
			delete(d.asking, id)
			d.pending[id] = pendingLink{device: device, link: link, waits: true}
		}
	}
}

// record stores the result of a probe for links. It returns the duplicates that were not known
// before.
func (d *duplicates) record(device string, links []attach.Link, found addressOwners) (isNew addressOwners) {
	d.mu.Lock()
	defer d.mu.Unlock()
	isNew = addressOwners{}
	for _, link := range links {
		id, owners := idOf(link), addressOwners{}
		if !d.asking[id] {
			continue // detached in the meantime
		}
		delete(d.asking, id)
		for _, t := range targets(link) {
			if mac, ok := found[t.Address]; ok {
				owners[t.Address] = mac
				if d.found[id][t.Address] == nil {
					isNew[t.Address] = mac
				}
			}
		}
		if !owners.equal(d.found[id]) {
			d.altered[id] = true
			signal(d.changed)
		}
		delete(d.found, id)
		if len(owners) > 0 {
			d.found[id], d.pending[id] = owners, pendingLink{device: device, link: link, waits: true}
		}
	}
	return isNew
}

// targets returns a link's addresses to probe.
func targets(link attach.Link) (targets []dad.Target) {
	mac, err := net.ParseMAC(link.MAC)
	if err != nil {
		return nil
	}
	for _, text := range link.Sources {
		if p, err := config.ParseAddressOrNetwork(text); err == nil {
			targets = append(targets, dad.Target{Address: p.Addr(), MAC: mac})
		}
	}
	return targets
}

// detectDuplicates probes the addresses of links in the background, until ctx ends. It begins with the recorded
// links, because another host may have taken an address while no plugin ran.
func (k *Kind) detectDuplicates(ctx context.Context, records func() ([]attach.Record, error)) {
	all, err := records()
	if err != nil {
		klog.FromContext(ctx).Error(err,
			"Failed to read attachment records; skipping duplicate address detection for their links")
	}
	for _, r := range all {
		if link, err := r.Link(); err == nil && r.Kind == Name {
			k.duplicates.add(r.Device, link)
		}
	}
	tick, conflicts := time.NewTicker(recheckInterval), time.NewTicker(conflictInterval)
	defer tick.Stop()
	defer conflicts.Stop()
	logged := map[string]string{} // the error that was logged last, by device
	for {
		select {
		case <-ctx.Done():
			return
		case <-k.duplicates.wake:
		case <-tick.C:
			k.duplicates.recheck()
		case <-conflicts.C:
			k.addConflicting(ctx, records)
		}
		for ctx.Err() == nil {
			device, links := k.duplicates.next()
			if len(links) == 0 {
				break
			}
			err := k.detectIn(ctx, device, links)
			if err == nil {
				delete(logged, device)
			} else if ctx.Err() == nil && logged[device] != err.Error() {
				logged[device] = err.Error()
				klog.FromContext(ctx).Error(err, "Failed to probe the addresses of shares for duplicates; retrying",
					"device", device, "delay", recheckInterval)
			}
		}
	}
}

// addConflicting adds the links with an address that another host has used since the last call.
func (k *Kind) addConflicting(ctx context.Context, records func() ([]attach.Record, error)) {
	conflicts, err := k.node.Conflicts()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to read which addresses of shares other hosts use")
	}
	if len(conflicts) == 0 {
		return
	}
	all, err := records()
	if err != nil {
		klog.FromContext(ctx).Error(err,
			"Failed to read attachment records; skipping duplicate address detection for addresses in use")
		return
	}
	k.duplicates.addConflicting(all, conflicts)
}

// detectIn probes the addresses of one NIC's links.
func (k *Kind) detectIn(ctx context.Context, name string, links []attach.Link) error {
	d, err := k.device(name)
	if err != nil || d.absent {
		k.duplicates.retry(name, links)
		return nil //nolint:nilerr // the status of the shares reports that the device is absent
	}
	if !d.detectsDuplicates() {
		k.duplicates.record(name, links, nil)
		return nil
	}
	var all []dad.Target
	for _, link := range links {
		all = append(all, targets(link)...)
	}
	found, err := dad.Detect(ctx, d.dadNIC(), all, reportWait)
	if err != nil {
		k.duplicates.retry(name, links)
		return err
	}
	isNew := k.duplicates.record(name, links, found)
	if len(isNew) > 0 {
		klog.FromContext(ctx).Info("Other hosts on the network have addresses of shares",
			"device", name, "network", d.network.Name, "hosts", isNew.String())
		k.avoid(d.network.Name, isNew)
	}
	return nil
}

// avoid keeps the allocator from assigning addresses that other hosts have.
func (k *Kind) avoid(network string, found addressOwners) {
	if k.addresses == nil {
		return
	}
	for address := range found {
		k.addresses.Avoid(ipam.Address{Network: network, IP: address})
	}
}

// refuseDuplicates returns the other hosts that have an address that a link is about to get, if the network has
// duplicateAddressDetection Refuse.
func (d *device) refuseDuplicates(
	ctx context.Context, mac net.HardwareAddr, addresses []netip.Prefix,
) (addressOwners, error) {
	if d.network == nil || d.network.DuplicateAddressDetection != config.DuplicateAddressRefuse {
		return nil, nil
	}
	var targets []dad.Target
	for _, p := range addresses {
		targets = append(targets, dad.Target{Address: p.Addr(), MAC: mac})
	}
	return dad.Detect(ctx, d.dadNIC(), targets, refuseWait)
}

// duplicateMessage returns the message of the condition Ready with the reason
// DuplicateAddress.
func duplicateMessage(network string, found addressOwners) string {
	return fmt.Sprintf("other hosts on network %s have the same addresses: %s: remove the addresses from them, add "+
		"them to reserved of the AddressPool, or remove them from the claim", network, found)
}

func (d *device) detectsDuplicates() bool {
	return d.network != nil && d.network.DuplicateAddressDetection != config.DuplicateAddressOff
}

func (d *device) dadNIC() dad.NIC { return dad.NIC{Index: d.nic.Index, MAC: d.nic.MAC} }
