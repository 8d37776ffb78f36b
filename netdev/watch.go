package netdev

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// Change is what happened since the last one.
type Change struct {
	// Everything may have changed: events were lost, or it is the first.
	Everything bool
	// Links or routes of the node changed.
	Links bool
	// Gone are namespaces that ended, by ID.
	Gone []int
	// Touched are namespaces in which links or addresses changed, by ID.
	Touched []int
	// Queues or classifiers of the node's links changed.
	Queues bool
}

// Watch calls changed for what the kernel announces, until ctx ends. The first
// call says Everything and comes after the subscription, so that nothing that
// changes after a look at the state is missed.
func Watch(ctx context.Context, changed func(Change)) error {
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
	changed(Change{Everything: true})
	for {
		events, err := w.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, rtnl.ErrOverflow):
			changed(Change{Everything: true})
		case err != nil:
			return err
		default:
			if c, ok := summarize(events); ok {
				changed(c)
			}
		}
	}
}

// summarize is what a batch of events amounts to.
func summarize(events []rtnl.Event) (c Change, any bool) {
	for _, e := range events {
		switch e.Message.Header.Type {
		case unix.RTM_DELNSID:
			if id, ok := rtnl.NamespaceIDOf(e.Message.Data); ok && e.NSID == rtnl.OwnNamespace {
				c.Gone, any = append(c.Gone, id), true
			}
		case unix.RTM_NEWLINK, unix.RTM_DELLINK, unix.RTM_NEWADDR, unix.RTM_DELADDR:
			if e.NSID == rtnl.OwnNamespace {
				c.Links = true
			} else {
				c.Touched = append(c.Touched, e.NSID)
			}
			any = true
		case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
			if e.NSID == rtnl.OwnNamespace {
				c.Links, any = true, true
			}
		case unix.RTM_NEWTCLASS, unix.RTM_DELTCLASS, unix.RTM_NEWQDISC, unix.RTM_DELQDISC, unix.RTM_NEWTFILTER, unix.RTM_DELTFILTER:
			if e.NSID == rtnl.OwnNamespace {
				c.Queues, any = true, true
			}
		}
	}
	return c, any
}
