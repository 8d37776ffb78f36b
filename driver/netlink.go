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
	p.change.Everything = p.change.Everything || c.Everything
	p.change.Links = p.change.Links || c.Links
	p.change.Gone = append(p.change.Gone, c.Gone...)
	p.change.Touched = append(p.change.Touched, c.Touched...)
	p.change.Queues = append(p.change.Queues, c.Queues...)
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
			d.handle(ctx, netdev.Change{Everything: true})
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
	if c.Everything || c.Links || len(c.Queues) > 0 {
		d.DevicesChanged()
	}
	if c.Everything {
		d.restore(ctx)
		return
	}
	if len(c.Gone) > 0 {
		d.namespacesGone(ctx, c.Gone)
	}
	if len(c.Touched) > 0 || len(c.Queues) > 0 {
		d.look(ctx, func(r attach.Record) bool {
			return slices.Contains(c.Queues, r.Link.Parent) || slices.Contains(c.Touched, r.Namespace.NSID)
		})
	}
}
