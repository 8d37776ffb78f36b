// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/dhcp"
)

const (
	// parallelExchanges is how many leases are renewed at a time.
	parallelExchanges = 16
	// leasesInterval is how often the plugin looks for new links with leases.
	leasesInterval = 5 * time.Second
	// applyInterval is the time between a failed attempt to change a link's address and the next one.
	applyInterval = 5 * time.Second
	// missingInterval is the time until the next check if the link is missing from its pod.
	missingInterval = 30 * time.Second
)

// renewer renews the leases of all links. In memory, it keeps only each link's next task; everything else is in the
// attachment records.
type renewer struct {
	kind        *Kind
	attachments driver.Attachments
	tasks       map[leaseID]*leaseTask
	// withoutLease has the attached links that do not lease an address, and the last scan that found their record. Most
	// of a node's links do not, and decoding their records each time would cost more than everything else that an idle
	// plugin does.
	withoutLease map[leaseID]uint64
	scans        uint64
	done         chan finishedTask
	running      int
}

// leaseID identifies a link with a lease.
type leaseID struct {
	claim, share string
	cookie       uint64
}

func leaseIDOf(r *attach.Record) leaseID { return leaseID{r.ClaimUID, r.Share, r.Namespace.Cookie} }

// leaseTask is the next task for one link.
type leaseTask struct {
	next    time.Duration // since boot
	running bool
	// applied reports whether the link has had the recorded address since this plugin started.
	applied bool
	// attempts is the number of failed attempts to lease an address since the link lost its last one.
	attempts int
}

// finishedTask is the result of an attempt.
type finishedTask struct {
	id leaseID
	leaseTask
}

func newRenewer(k *Kind, attachments driver.Attachments) *renewer {
	return &renewer{
		kind: k, attachments: attachments, tasks: map[leaseID]*leaseTask{}, withoutLease: map[leaseID]uint64{},
		done: make(chan finishedTask, parallelExchanges),
	}
}

// Renew implements driver.Renewer.
func (k *Kind) Renew(ctx context.Context, attachments driver.Attachments) {
	r := newRenewer(k, attachments)
	var workers sync.WaitGroup
	defer workers.Wait()
	for {
		wait := r.start(ctx, &workers)
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case f := <-r.done:
			r.finish(f)
		case <-timer.C:
		}
		timer.Stop()
	}
}

func (r *renewer) finish(f finishedTask) {
	r.running--
	if task, ok := r.tasks[f.id]; ok {
		*task = f.leaseTask
	}
}

// start starts the tasks that are due, and returns the time of the next call.
func (r *renewer) start(ctx context.Context, workers *sync.WaitGroup) time.Duration {
	leased, err := r.scan()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to read attachment records; skipping the renewal of some leases")
	}
	now, states := dhcp.SinceBoot(), leaseStates{}
	for _, l := range leased {
		states[stateOf(l.link, now)]++
	}
	r.kind.leases.Store(&states)
	wait := r.startDue(ctx, workers, leased, now)
	if err == nil {
		r.prune(leased)
	}
	return wait
}

// scan returns the attached links that lease an address, and remembers those that do not. If some records cannot be
// read, it returns the others and an error.
func (r *renewer) scan() (leased []leasedLink, err error) {
	all, err := r.mayHaveLeases()
	for _, a := range all {
		link, err := a.Record.Link()
		switch {
		case err != nil || link.Index == 0: // not attached yet
		case link.DHCP == nil:
			r.withoutLease[leaseIDOf(&a.Record)] = r.scans
		default:
			leased = append(leased, leasedLink{kind: r.kind, attachments: r.attachments, Attachment: a, link: link})
		}
	}
	return leased, err
}

// startDue starts the tasks that are due at a time since boot, and returns the time until the next one is due.
func (r *renewer) startDue(
	ctx context.Context, workers *sync.WaitGroup, leased []leasedLink, now time.Duration,
) (wait time.Duration) {
	wait = leasesInterval
	for _, l := range leased {
		id := leaseIDOf(&l.Record)
		task := r.tasks[id]
		if task == nil {
			task = &leaseTask{next: now}
			r.tasks[id] = task
		}
		switch {
		case task.running:
		case task.next > now:
			wait = min(wait, task.next-now)
		case r.running < parallelExchanges:
			task.running = true
			r.running++
			attempt := *task
			workers.Go(func() {
				attempt.run(ctx, l)
				r.done <- finishedTask{id, attempt}
			})
		}
	}
	return wait
}

// prune removes the tasks of links that are no longer attached, except running ones.
func (r *renewer) prune(leased []leasedLink) {
	seen := map[leaseID]bool{}
	for _, l := range leased {
		seen[leaseIDOf(&l.Record)] = true
	}
	for id, task := range r.tasks {
		if !seen[id] && !task.running {
			delete(r.tasks, id)
			r.kind.leaseFailures.Delete(id)
		}
	}
}

// mayHaveLeases returns the attachments that are not in withoutLease, and removes ended ones from withoutLease.
func (r *renewer) mayHaveLeases() ([]driver.Attachment, error) {
	r.scans++
	attachments, err := r.attachments.List(func(record *attach.Record) bool {
		id := leaseIDOf(record)
		_, without := r.withoutLease[id]
		if without {
			r.withoutLease[id] = r.scans
		}
		return !without
	})
	maps.DeleteFunc(r.withoutLease, func(_ leaseID, scan uint64) bool { return scan != r.scans })
	return attachments, err
}

// run performs the due task of a link, and sets the time of the next one.
func (t *leaseTask) run(ctx context.Context, l leasedLink) {
	ctx = driver.WithAttachment(ctx, l.Record.ClaimUID, l.Record.Share, l.Record.Pod)
	wait, err := t.act(ctx, l)
	if err == nil {
		l.kind.leaseFailures.Delete(leaseIDOf(&l.Record))
	}
	if err != nil && !errors.Is(err, driver.ErrOutdated) && ctx.Err() == nil {
		l.kind.leaseFailures.Store(leaseIDOf(&l.Record), err.Error())
		klog.FromContext(ctx).Error(err, "Failed to keep the leased address of a link; retrying",
			"address", l.link.DHCP.Address, "server", l.link.DHCP.Server, "delay", wait)
	}
	t.running = false
	if err != nil {
		wait = max(wait, time.Second)
	}
	t.next = dhcp.Never
	if now := dhcp.SinceBoot(); wait < dhcp.Never-now {
		t.next = now + wait
	}
}

// act performs the task that is due, and returns the time until the next one.
func (t *leaseTask) act(ctx context.Context, l leasedLink) (time.Duration, error) {
	present, err := l.isPresent()
	if err != nil || !present {
		return missingInterval, err
	}
	fuzz, lease := rand.Float64(), leaseOf(l.link) //nolint:gosec // it only spreads requests
	switch {
	case !lease.Address.IsValid() && l.network() == nil:
		return missingInterval, nil // the status of the share reports it
	case !lease.Address.IsValid():
		return t.acquire(ctx, l, fuzz)
	}
	state := lease.State(dhcp.SinceBoot())
	switch {
	case state == dhcp.Expired:
		klog.FromContext(ctx).Info("Lease has expired", "address", lease.Address, "server", lease.Server)
		t.applied = false
		return 0, l.set(ctx, dhcp.Lease{})
	case state == dhcp.Bound && !t.applied:
		if err := l.reconcile(ctx, lease); err != nil {
			return applyInterval, err
		}
		t.applied = true
	case state != dhcp.Bound:
		renewed, err := l.renew(ctx, lease, state)
		if errors.Is(err, dhcp.ErrRefused) {
			klog.FromContext(ctx).Info("DHCP server refused to renew the lease", "address", lease.Address, "reason", err.Error())
			t.applied = false
			return 0, l.set(ctx, dhcp.Lease{})
		}
		if err != nil {
			return lease.Wait(dhcp.SinceBoot(), true, fuzz), err
		}
		t.applied = false
		if err := l.set(ctx, renewed); err != nil {
			return applyInterval, err
		}
		t.applied, lease = true, renewed
		klog.FromContext(ctx).V(4).Info("Renewed lease", "address", lease.Address, "server", lease.Server)
	}
	return lease.Wait(dhcp.SinceBoot(), false, fuzz), nil
}

// acquire leases an address for a link without one.
func (t *leaseTask) acquire(ctx context.Context, l leasedLink, fuzz float64) (time.Duration, error) {
	lease, err := l.acquire(ctx)
	if err != nil {
		t.attempts++
		return dhcp.Backoff(t.attempts, fuzz), err
	}
	t.attempts, t.applied = 0, false
	if err := l.setNew(ctx, lease); err != nil {
		return applyInterval, err
	}
	t.applied = true
	klog.FromContext(ctx).V(2).Info("Leased another address", "address", lease.Address, "server", lease.Server)
	return lease.Wait(dhcp.SinceBoot(), false, fuzz), nil
}

// leasedLink is a link with its record from when an attempt began.
type leasedLink struct {
	kind        *Kind
	attachments driver.Attachments
	driver.Attachment
	link attach.Link
}

// isPresent reports whether the link is in its pod.
func (l leasedLink) isPresent() (bool, error) {
	a, err := l.kind.attachment(l.Record)
	if err != nil {
		return false, err
	}
	presence, err := l.kind.node.Presence(a)
	return presence == netdev.LinkPresent, err
}

// network returns the network of the link. It returns nil if the NIC is no longer shared: links on it keep their
// leases but do not get new ones.
func (l leasedLink) network() *config.Network {
	d, err := l.kind.device(l.Share.Device)
	if err != nil || !d.isShared() {
		return nil
	}
	return d.network
}

// exchange calls f with sockets opened in the pod, and closes them afterward, because they keep the pod's namespace
// alive.
func (l leasedLink) exchange(ctx context.Context, f func(context.Context, attach.Sockets) error) error {
	ctx, cancel := context.WithTimeout(ctx, exchangeTimeout)
	defer cancel()
	sockets, err := l.kind.openSocketsOf(ctx, l.Record)
	if err != nil {
		return err
	}
	defer sockets.Close()
	return f(ctx, sockets)
}

// openSocketsOf opens sockets in the pod of a recorded attachment.
func (k *Kind) openSocketsOf(ctx context.Context, r attach.Record) (attach.Sockets, error) {
	if k.openSockets == nil {
		return attach.Sockets{}, errors.New("the plugin cannot open sockets in pods: set plugin.dhcp to true in the chart")
	}
	return k.openSockets(ctx, r)
}

func (l leasedLink) acquire(ctx context.Context) (lease dhcp.Lease, err error) {
	d, err := l.kind.device(l.Share.Device)
	if err != nil {
		return lease, err
	}
	a, err := l.kind.attachment(l.Record)
	if err != nil {
		return lease, err
	}
	err = l.exchange(ctx, func(ctx context.Context, sockets attach.Sockets) (err error) {
		lease, err = l.kind.acquire(ctx, d, a, l.link, sockets.Packet)
		return err
	})
	return lease, err
}

func (l leasedLink) renew(ctx context.Context, lease dhcp.Lease, state dhcp.State) (renewed dhcp.Lease, err error) {
	client, err := clientOf(l.link)
	if err != nil {
		return lease, err
	}
	err = l.exchange(ctx, func(ctx context.Context, sockets attach.Sockets) error {
		conn, err := dhcp.NewConn(sockets.Packet, l.link.Index)
		if err != nil {
			return err
		}
		return l.kind.failpoints.Do("renew lease", func() (err error) {
			renewed, err = client.Renew(ctx, conn, lease, state)
			return err
		})
	})
	if network := l.network(); err == nil && network != nil {
		err = refuseLease(network, renewed)
	}
	return renewed, err
}

// reconcile adds the recorded address to the link, or corrects its lifetime: an earlier plugin may
// have stopped between writing the record and changing the link.
func (l leasedLink) reconcile(ctx context.Context, lease dhcp.Lease) error {
	a, err := l.kind.attachment(l.Record)
	if err != nil {
		return err
	}
	present, err := l.kind.node.Leased(a)
	if err != nil {
		return err
	}
	const tolerance = 2 * time.Second // the kernel counts in seconds
	remaining := lease.Remaining(dhcp.SinceBoot())
	if len(present) == 1 && present[0].Address == lease.Address &&
		(remaining == dhcp.Never || (present[0].Valid-remaining).Abs() <= tolerance) {
		return l.kind.node.SetAddresses(a)
	}
	return l.set(ctx, lease)
}

// set records a lease, and then sets its address on the link, or removes the link's address if the lease's is
// invalid. It writes the record first: after a crash, the next plugin completes the change.
func (l leasedLink) set(ctx context.Context, lease dhcp.Lease) error {
	k := l.kind
	return l.attachments.Update(ctx, l.Record, func(current driver.Attachment, write func(json.RawMessage) error) error {
		link, err := current.Record.Link()
		if err != nil {
			return err
		}
		if link.DHCP == nil || link.DHCP.Address != l.link.DHCP.Address || link.DHCP.Expires != l.link.DHCP.Expires {
			return driver.ErrOutdated
		}
		changed := lease.Address.String() != link.DHCP.Address
		setLease(&link, lease)
		if current.Record.Payload, err = json.Marshal(link); err != nil {
			return err
		}
		if err := write(current.Record.Payload); err != nil {
			return err
		}
		if changed {
			k.duplicates.forget(link.Parent, link.MAC)
			k.duplicates.add(current.Share.Device, link)
		}
		return l.apply(ctx, current, lease)
	})
}

// setNew sets a lease for an address that the link did not have. If the pod has ended in the meantime, no record
// contains the address. setNew then releases it, unless another of the pod's sandboxes leases it.
func (l leasedLink) setNew(ctx context.Context, lease dhcp.Lease) error {
	err := l.set(ctx, lease)
	if !errors.Is(err, driver.ErrEnded) {
		return err
	}
	all, listErr := l.attachments.List(func(*attach.Record) bool { return true })
	isSameClient := func(a driver.Attachment) bool {
		link, err := a.Record.Link()
		return err != nil || link.DHCP != nil && bytes.Equal(link.DHCP.ClientID, l.link.DHCP.ClientID)
	}
	if listErr == nil && !slices.ContainsFunc(all, isSameClient) {
		l.kind.giveBack(ctx, l.link, lease)
	}
	return err
}

// apply sets the address of a recorded lease on the link.
func (l leasedLink) apply(ctx context.Context, recorded driver.Attachment, lease dhcp.Lease) error {
	k := l.kind
	a, err := k.attachment(recorded.Record)
	if err != nil {
		return err
	}
	if err := k.node.SetAddresses(a); err != nil { // works even if the opener does not run
		return err
	}
	if present, err := k.node.Leased(a); err == nil && len(present) == 0 && !lease.Address.IsValid() {
		return nil // the kernel has removed the address
	}
	p, err := parametersOf(recorded.Share)
	if err != nil {
		return err
	}
	routes, err := parseRoutes(p.Routes)
	if err != nil {
		return err
	}
	routes, _ = splitRoutes(routes)
	return l.exchange(ctx, func(_ context.Context, sockets attach.Sockets) error {
		conn, err := connect(sockets.Netlink)
		if err != nil {
			return err
		}
		defer conn.Close()
		return k.apply(a, lease, routes, conn, sockets.Packet)
	})
}
