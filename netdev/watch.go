// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// Change summarizes the kernel's events since the previous Change.
type Change struct {
	// Resync means that any state may have changed, because this is the first
	// Change or because the kernel dropped events.
	Resync bool
	// LinksChanged means that links, addresses, or routes of the node changed,
	// or queues of an interface that is not managed. Only some routes matter; see
	// routeMatters.
	LinksChanged bool
	// NamespacesRemoved are the IDs of network namespaces that ended.
	NamespacesRemoved []int
	// NamespacesChanged are the IDs of network namespaces with changed links or addresses.
	NamespacesChanged []int
	// NamespacesMissed means that links may have changed in any namespace, because the Node
	// did not read events for a while: pods caused too many.
	NamespacesMissed bool
	// QdiscsChanged are the interface indexes of managed NICs if another program changed their queues or classifiers.
	QdiscsChanged []int
}

// namespacesInterval is the shortest time between two reports of changes in other
// namespaces. A pod that changes its links in a loop would otherwise keep a processor busy.
const namespacesInterval = 100 * time.Millisecond

// If pods cause more events in an interval than one call of Receive reads, or than the kernel queues, the Node stops
// reading events for a while. It still reports the namespaces that it has read events of, which most likely belong to
// the pods that cause them. The caller then looks at the links of all pods once, which takes about 2 % of
// floodPausePerNamespace for each. When pods have been calm for calmPauses pauses, the Node reports all namespaces as
// changed: the caller then reads the state of each, which takes several times as long. floodPause leaves time to block
// a changed link within a second of the change.
const (
	floodPause             = 700 * time.Millisecond
	floodPausePerNamespace = 5 * time.Millisecond
	calmPauses             = 5
)

// Watch subscribes to the kernel's events and calls changed for each batch of them until ctx ends; it then returns nil.
// The first Change has Resync set and follows the subscription, so a caller that reads the state for it does not miss
// later changes. Watch ignores changes that this Node makes to queues.
func (n *Node) Watch(ctx context.Context, changed func(Change)) error {
	own, err := rtnl.Watch()
	if err != nil {
		return err
	}
	defer own.Close()
	others, err := rtnl.WatchNamespaces()
	if err != nil {
		return err
	}
	var serial sync.Mutex
	report := func(c Change) {
		logr.FromContextOrDiscard(ctx).V(5).Info("Network state changed", "resync", c.Resync, "linksChanged", c.LinksChanged,
			"qdiscsChanged", c.QdiscsChanged, "namespacesChanged", c.NamespacesChanged, "namespacesRemoved", c.NamespacesRemoved,
			"namespacesMissed", c.NamespacesMissed)
		serial.Lock()
		defer serial.Unlock()
		changed(c)
	}
	report(Change{Resync: true})
	group, ctx := errgroup.WithContext(ctx)
	stop := context.AfterFunc(ctx, func() { _ = own.Close() })
	defer stop()
	group.Go(func() error { return n.watchOwn(ctx, own, report) })
	group.Go(func() error { return n.watchOthers(ctx, others, report) })
	return group.Wait()
}

// watchOwn reports changes in the Node's network namespace.
func (n *Node) watchOwn(ctx context.Context, w *rtnl.Watcher, report func(Change)) error {
	links := newOwnLinks()
	defer links.stop()
	for {
		messages, err := w.Receive()
		switch {
		case ctx.Err() != nil:
			return nil // Watch has closed the socket
		case errors.Is(err, rtnl.ErrOverflow):
			logr.FromContextOrDiscard(ctx).V(2).Info("Kernel dropped network events; resyncing")
			report(Change{Resync: true})
			links.forget()
		case err != nil:
			return err
		}
		if c, ok := n.summarize(links, messages); ok {
			report(c)
		}
		links.reportLater(ctx, report)
	}
}

// watchOthers reports changes in other network namespaces. It closes w.
func (n *Node) watchOthers(ctx context.Context, w *rtnl.NamespaceWatcher, report func(Change)) error {
	var afterFlood *time.Timer
	stop := func() {
		if afterFlood != nil {
			afterFlood.Stop()
		}
	}
	defer stop()
	for {
		flooded, err := watchUntilFlood(ctx, w, report)
		stop()
		if !flooded || err != nil {
			return err
		}
		pause := n.pauseAfterFlood()
		logr.FromContextOrDiscard(ctx).V(2).Info("Pods cause too many network events; pausing", "delay", pause)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		// A new socket has none of the events that the kernel queued before it was opened.
		if w, err = rtnl.WatchNamespaces(); err != nil {
			return err
		}
		report(Change{NamespacesMissed: true})
		afterFlood = time.AfterFunc(calmPauses*pause, func() { n.reportAll(ctx, report) })
	}
}

// reportAll reports that all other network namespaces have changed.
func (n *Node) reportAll(ctx context.Context, report func(Change)) {
	ids, err := n.conn.NamespaceIDs()
	switch {
	case ctx.Err() != nil:
	case err != nil:
		logr.FromContextOrDiscard(ctx).Error(err, "Failed to list network namespaces after missed events; resyncing")
		report(Change{Resync: true})
	default:
		report(Change{NamespacesChanged: ids})
	}
}

// watchUntilFlood reports changes in other network namespaces until pods cause too many, or
// until ctx ends. It closes w.
func watchUntilFlood(ctx context.Context, w *rtnl.NamespaceWatcher, report func(Change)) (flooded bool, err error) {
	defer w.Close()
	stop := context.AfterFunc(ctx, func() { _ = w.Close() })
	defer stop()
	for {
		ids, more, err := w.Receive()
		switch {
		case ctx.Err() != nil:
			return false, nil
		case errors.Is(err, rtnl.ErrOverflow):
			return true, nil
		case err != nil:
			return false, err
		}
		if len(ids) > 0 {
			report(Change{NamespacesChanged: ids})
		}
		if more {
			return true, nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(namespacesInterval):
		}
	}
}

// pauseAfterFlood returns how long the Node does not read events after pods caused too many.
func (n *Node) pauseAfterFlood() time.Duration {
	ids, err := n.conn.NamespaceIDs()
	if err != nil {
		return floodPause
	}
	return max(floodPause, time.Duration(len(ids))*floodPausePerNamespace)
}

// summarize merges a batch of events. ok is false if no event is relevant.
func (n *Node) summarize(links *ownLinks, messages []syscall.NetlinkMessage) (c Change, ok bool) {
	for _, m := range messages {
		if n.addEvent(&c, links, m) {
			ok = true
		}
	}
	return c, ok
}

// addEvent adds an event to c and reports whether the event is relevant now; see ownLinks for those that may
// be relevant later.
func (n *Node) addEvent(c *Change, links *ownLinks, m syscall.NetlinkMessage) bool {
	switch m.Header.Type {
	case unix.RTM_DELNSID:
		id, ok := rtnl.NamespaceIDOf(m.Data)
		if ok {
			c.NamespacesRemoved = append(c.NamespacesRemoved, id)
		}
		return ok
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		changed := links.isChange(m.Data, m.Header.Type == unix.RTM_DELLINK)
		c.LinksChanged = c.LinksChanged || changed
		return changed
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		c.LinksChanged = true
		return true
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		changed := n.routeMatters(m.Data, m.Header.Type == unix.RTM_DELROUTE)
		c.LinksChanged = c.LinksChanged || changed
		return changed
	case unix.RTM_NEWTCLASS, unix.RTM_DELTCLASS, unix.RTM_NEWQDISC, unix.RTM_DELQDISC,
		unix.RTM_NEWTFILTER, unix.RTM_DELTFILTER:
		return n.addQdiscEvent(c, m)
	}
	return false
}

// addQdiscEvent adds a change of a qdisc, class, or filter in the node's
// namespace to c. It ignores changes that this Node made.
func (n *Node) addQdiscEvent(c *Change, m syscall.NetlinkMessage) bool {
	if m.Header.Pid == n.portID || len(m.Data) < nl.SizeofTcMsg {
		return false
	}
	nic, managed := n.nicOf(int(nl.DeserializeTcMsg(m.Data).Ifindex))
	switch {
	case !managed:
		c.LinksChanged = true
	case !slices.Contains(c.QdiscsChanged, nic):
		c.QdiscsChanged = append(c.QdiscsChanged, nic)
	}
	return true
}

// nicOf returns the index of the managed NIC that has queues on a link.
func (n *Node) nicOf(link int) (nic int, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for nic, m := range n.managed {
		if slices.Contains(m.devices(), link) {
			return nic, true
		}
	}
	return 0, false
}
