package netdev

import (
	"context"
	"errors"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// Change is what happened since the last one.
type Change struct {
	// Everything may have changed: events were lost, or it is the first.
	Resync bool
	// Links or routes of the node changed, or queues of a link that is not managed.
	LinksChanged bool
	// Gone are namespaces that ended, by ID.
	NamespacesRemoved []int
	// Touched are namespaces in which links or addresses changed, by ID.
	NamespacesChanged []int
	// Queues are NICs whose queues or classifiers somebody changed, by index.
	QdiscsChanged []int
}

// Watch calls changed for what the kernel announces, until ctx ends. The first
// call says Everything and comes after the subscription, so that nothing that
// changes after a look at the state is missed. What this Node does to queues
// is no news.
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
	changed(Change{Resync: true})
	for {
		events, err := w.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, rtnl.ErrOverflow):
			changed(Change{Resync: true})
		case err != nil:
			return err
		default:
			if c, ok := n.summarize(events); ok {
				changed(c)
			}
		}
	}
}

// summarize is what a batch of events amounts to.
func (n *Node) summarize(events []rtnl.Event) (c Change, any bool) {
	for _, e := range events {
		switch e.Message.Header.Type {
		case unix.RTM_DELNSID:
			if id, ok := rtnl.NamespaceIDOf(e.Message.Data); ok && e.NSID == rtnl.OwnNamespace {
				c.NamespacesRemoved, any = append(c.NamespacesRemoved, id), true
			}
		case unix.RTM_NEWLINK, unix.RTM_DELLINK, unix.RTM_NEWADDR, unix.RTM_DELADDR:
			if e.NSID == rtnl.OwnNamespace {
				c.LinksChanged = true
			} else {
				c.NamespacesChanged = append(c.NamespacesChanged, e.NSID)
			}
			any = true
		case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
			if e.NSID == rtnl.OwnNamespace {
				c.LinksChanged, any = true, true
			}
		case unix.RTM_NEWTCLASS, unix.RTM_DELTCLASS, unix.RTM_NEWQDISC, unix.RTM_DELQDISC, unix.RTM_NEWTFILTER, unix.RTM_DELTFILTER:
			if e.NSID != rtnl.OwnNamespace || e.Message.Header.Pid == n.port || len(e.Message.Data) < nl.SizeofTcMsg {
				continue
			}
			any = true
			nic, ok := n.nicOf(int(nl.DeserializeTcMsg(e.Message.Data).Ifindex))
			if c.LinksChanged = c.LinksChanged || !ok; ok && !slices.Contains(c.QdiscsChanged, nic) {
				c.QdiscsChanged = append(c.QdiscsChanged, nic)
			}
		}
	}
	return c, any
}

// nicOf returns the managed NIC that a link is, or is the IFB device of.
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
