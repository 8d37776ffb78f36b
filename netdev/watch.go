// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"slices"

	"github.com/go-logr/logr"
	"github.com/vishvananda/netlink/nl"
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

// Watch subscribes to the kernel's events and calls changed for each batch of
// them until ctx ends; it then returns nil. The first Change has Resync set and
// follows the subscription, so a caller that reads the state for it misses no
// later change. Watch ignores changes that this Node makes to queues.
func (n *Node) Watch(ctx context.Context, changed func(Change)) error {
	w, err := rtnl.Watch()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = w.Close() })
	defer func() {
		if stop() {
			_ = w.Close()
		}
	}()
	logger := logr.FromContextOrDiscard(ctx)
	changed(Change{Resync: true})
	for {
		events, err := w.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, rtnl.ErrOverflow):
			logger.V(2).Info("Kernel dropped network events, resyncing")
			changed(Change{Resync: true})
		case err != nil:
			return err
		default:
			if c, ok := n.summarize(events); ok {
				logger.V(5).Info("Network state changed", "linksChanged", c.LinksChanged, "qdiscsChanged", c.QdiscsChanged,
					"namespacesChanged", c.NamespacesChanged, "namespacesRemoved", c.NamespacesRemoved)
				changed(c)
			}
		}
	}
}

// summarize merges a batch of events. ok is false if no event is relevant.
func (n *Node) summarize(events []rtnl.Event) (c Change, ok bool) {
	for _, e := range events {
		if n.addEvent(&c, e) {
			ok = true
		}
	}
	return c, ok
}

// addEvent adds an event to c and reports whether the event is relevant.
func (n *Node) addEvent(c *Change, e rtnl.Event) bool {
	own := e.NSID == rtnl.OwnNamespace
	switch e.Message.Header.Type {
	case unix.RTM_DELNSID:
		id, ok := rtnl.NamespaceIDOf(e.Message.Data)
		if !ok || !own {
			return false
		}
		c.NamespacesRemoved = append(c.NamespacesRemoved, id)
		return true
	case unix.RTM_NEWLINK, unix.RTM_DELLINK, unix.RTM_NEWADDR, unix.RTM_DELADDR:
		if own {
			c.LinksChanged = true
		} else {
			c.NamespacesChanged = append(c.NamespacesChanged, e.NSID)
		}
		return true
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if own {
			c.LinksChanged = true
		}
		return own
	case unix.RTM_NEWTCLASS, unix.RTM_DELTCLASS, unix.RTM_NEWQDISC, unix.RTM_DELQDISC,
		unix.RTM_NEWTFILTER, unix.RTM_DELTFILTER:
		return own && n.addQdiscEvent(c, e)
	}
	return false
}

// addQdiscEvent adds a change of a qdisc, class, or filter in the node's
// namespace to c. It ignores changes that this Node made.
func (n *Node) addQdiscEvent(c *Change, e rtnl.Event) bool {
	if e.Message.Header.Pid == n.portID || len(e.Message.Data) < nl.SizeofTcMsg {
		return false
	}
	nic, managed := n.nicOf(int(nl.DeserializeTcMsg(e.Message.Data).Ifindex))
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
