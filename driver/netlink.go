package driver

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

// pending collects what the kernel announced until there is time to act: the
// reader of events must never wait for a claim's lock.
type pending struct {
	mu     sync.Mutex
	change netdev.Change
	signal chan struct{}
}

func (p *pending) add(c netdev.Change) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.change.Resync = p.change.Resync || c.Resync
	p.change.LinksChanged = p.change.LinksChanged || c.LinksChanged
	p.change.NamespacesRemoved = append(p.change.NamespacesRemoved, c.NamespacesRemoved...)
	p.change.NamespacesChanged = append(p.change.NamespacesChanged, c.NamespacesChanged...)
	p.change.QdiscsChanged = append(p.change.QdiscsChanged, c.QdiscsChanged...)
	select {
	case p.signal <- struct{}{}:
	default:
	}
}

func (p *pending) take() netdev.Change {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.change
	p.change = netdev.Change{}
	return c
}

// watch acts on what happens to the node's network, until ctx ends.
func (d *Driver) watch(ctx context.Context) error {
	p := &pending{signal: make(chan struct{}, 1)}
	var actor sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	defer actor.Wait()
	defer cancel()
	actor.Go(func() { d.actOn(ctx, p) })
	return d.options.Watch(ctx, p.add)
}

func (d *Driver) actOn(ctx context.Context, p *pending) {
	again := time.NewTicker(resync)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-again.C:
			d.handle(ctx, netdev.Change{Resync: true})
		case <-p.signal:
			d.handle(ctx, p.take())
		}
	}
}

// handle does what a change calls for.
func (d *Driver) handle(ctx context.Context, c netdev.Change) {
	klog.FromContext(ctx).V(5).Info("Network changed", "change", c)
	if !d.succession.isNewest() {
		return
	}
	if c.Resync || c.LinksChanged || len(c.QdiscsChanged) > 0 {
		d.DevicesChanged()
	}
	if c.Resync {
		d.restore(ctx)
		return
	}
	if len(c.NamespacesRemoved) > 0 {
		d.namespacesGone(ctx, c.NamespacesRemoved)
	}
	if len(c.NamespacesChanged) > 0 || len(c.QdiscsChanged) > 0 {
		d.look(ctx, func(r attach.Record) bool {
			return slices.Contains(c.QdiscsChanged, r.Link.Parent) || slices.Contains(c.NamespacesChanged, r.Namespace.NSID)
		})
	}
}
