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
	// or queues of an interface that is not managed.
	LinksChanged bool
	// NamespacesRemoved are the IDs of network namespaces that ended.
	NamespacesRemoved []int
	// NamespacesChanged are the IDs of network namespaces in which links or
	// addresses changed.
	NamespacesChanged []int
	// QdiscsChanged are the interface indexes of managed NICs whose queues or
	// classifiers another program changed.
	QdiscsChanged []int
}

// namespacesInterval is the shortest time between two reports of changes in other
// namespaces. A pod that changes its links in a loop would otherwise keep a processor busy.
const namespacesInterval = 100 * time.Millisecond

// Watch subscribes to the kernel's events and calls changed for each batch of
// them until ctx ends; it then returns nil. The first Change has Resync set and
// follows the subscription, so a caller that reads the state for it misses no
// later change. Watch ignores changes that this Node makes to queues.
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
	defer others.Close()
	var serial sync.Mutex
	report := func(c Change) {
		logr.FromContextOrDiscard(ctx).V(5).Info("Network state changed", "resync", c.Resync, "linksChanged", c.LinksChanged,
			"qdiscsChanged", c.QdiscsChanged, "namespacesChanged", c.NamespacesChanged, "namespacesRemoved", c.NamespacesRemoved)
		serial.Lock()
		defer serial.Unlock()
		changed(c)
	}
	report(Change{Resync: true})
	group, ctx := errgroup.WithContext(ctx)
	stop := context.AfterFunc(ctx, func() { _, _ = own.Close(), others.Close() })
	defer stop()
	group.Go(func() error { return n.watchOwn(ctx, own, report) })
	group.Go(func() error { return watchOthers(ctx, others, report) })
	return group.Wait()
}

// watchOwn reports changes in the Node's network namespace.
func (n *Node) watchOwn(ctx context.Context, w *rtnl.Watcher, report func(Change)) error {
	for {
		messages, err := w.Receive()
		if done, err := received(ctx, err, report); done {
			return err
		}
		if c, ok := n.summarize(messages); ok {
			report(c)
		}
	}
}

// watchOthers reports changes in other network namespaces.
func watchOthers(ctx context.Context, w *rtnl.NamespaceWatcher, report func(Change)) error {
	for {
		ids, err := w.Receive()
		if done, err := received(ctx, err, report); done {
			return err
		}
		if len(ids) > 0 {
			report(Change{NamespacesChanged: ids})
		}
		select {
		case <-ctx.Done():
		case <-time.After(namespacesInterval):
		}
	}
}

// received handles the error of receiving events. It returns done if no more can be
// received: with nil because ctx has ended, or with the error.
func received(ctx context.Context, err error, report func(Change)) (done bool, failed error) {
	switch {
	case ctx.Err() != nil:
		return true, nil //nolint:nilerr // Watch has closed the socket
	case errors.Is(err, rtnl.ErrOverflow):
		logr.FromContextOrDiscard(ctx).V(2).Info("Kernel dropped network events, resyncing")
		report(Change{Resync: true})
		return false, nil
	default:
		return err != nil, err
	}
}

// summarize merges a batch of events. ok is false if no event is relevant.
func (n *Node) summarize(messages []syscall.NetlinkMessage) (c Change, ok bool) {
	for _, m := range messages {
		if n.addEvent(&c, m) {
			ok = true
		}
	}
	return c, ok
}

// addEvent adds an event to c and reports whether the event is relevant.
func (n *Node) addEvent(c *Change, m syscall.NetlinkMessage) bool {
	switch m.Header.Type {
	case unix.RTM_DELNSID:
		id, ok := rtnl.NamespaceIDOf(m.Data)
		if ok {
			c.NamespacesRemoved = append(c.NamespacesRemoved, id)
		}
		return ok
	case unix.RTM_NEWLINK, unix.RTM_DELLINK, unix.RTM_NEWADDR, unix.RTM_DELADDR,
		unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		c.LinksChanged = true
		return true
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

// nicOf returns the index of the managed NIC that link is, or whose IFB device
// link is.
func (n *Node) nicOf(link int) (nic int, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for nic, m := range n.managed {
		if nic == link || m.ifb == link {
			return nic, true
		}
	}
	return 0, false
}
