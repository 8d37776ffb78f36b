// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"slices"
	"sync"

	"github.com/dra-shared/dra-driver-shared/attach"
)

// endedSandboxes is a queue of selectors for attachments in sandboxes that may have ended. Detaching them waits for
// claims' locks, which can take seconds; thanks to the queue, handle keeps protecting other pods meanwhile.
type endedSandboxes struct {
	added chan struct{} // has an element after add

	mu       sync.Mutex
	selected []func(*attach.Record) bool
}

func newEndedSandboxes() *endedSandboxes {
	return &endedSandboxes{added: make(chan struct{}, 1)}
}

func (e *endedSandboxes) add(selected func(*attach.Record) bool) {
	e.mu.Lock()
	e.selected = append(e.selected, selected)
	e.mu.Unlock()
	select {
	case e.added <- struct{}{}:
	default: // the loop has not taken the last one yet
	}
}

// take returns the union of the selectors added since the last call.
func (e *endedSandboxes) take() (selected func(*attach.Record) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := e.selected
	e.selected = nil
	return func(r *attach.Record) bool {
		return slices.ContainsFunc(all, func(selected func(*attach.Record) bool) bool { return selected(r) })
	}
}

// detachEndedSandboxes detaches the attachments in sandboxes that handle has added, until ctx ends. The next plugin
// detaches the rest when it restores attachments.
func (d *Driver) detachEndedSandboxes(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.endedSandboxes.added:
		}
		d.eachAttachment(ctx, d.endedSandboxes.take(), d.detachEnded)
	}
}
