// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/driver/lock"
)

// handover orders the plugins that run at the same time during a rolling
// update. All plugins that have taken over serve requests. Only the newest acts
// without a request: it refreshes, restores, collects garbage, and reports again.
// The plugins may be configured differently and would otherwise undo each other's
// work. A plugin that cannot serve what its predecessor serves does not take over.
//
// A plugin that has taken over holds a lock named after the time when it did. The kernel releases the lock when its
// process exits, even after a crash.
type handover struct {
	locks    lock.Dir
	instance string
	// own is the name of the plugin's lock; "" before it has taken over.
	own     string
	release func()
}

// pluginLocks is the name prefix of the plugins' locks.
const pluginLocks = "plugin-"

// lifecycleLock is the name of the lock that a plugin holds while it acquires its own lock (see pluginLocks) and
// while it stops: no plugin takes over while the last one removes what the driver set up.
const lifecycleLock = "lifecycle"

func newHandover(locks lock.Dir, instance string) *handover {
	return &handover{locks: locks, instance: instance}
}

// becomeNewest acquires the lock of this plugin, which is then the newest.
func (h *handover) becomeNewest() error {
	unlock, err := h.locks.Named(lifecycleLock)
	if err != nil {
		return err
	}
	defer unlock()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil { // CLOCK_BOOTTIME never goes backwards
		return err
	}
	own := fmt.Sprintf("%s%020d-%s", pluginLocks, now.Nano(), h.instance)
	if h.release, err = h.locks.Named(own); err != nil {
		return err
	}
	h.own = own
	return nil
}

// abandon releases the lock if the plugin has taken over: its predecessor, if one runs,
// is the newest again.
func (h *handover) abandon() {
	if h.own != "" {
		h.release()
		h.own = ""
	}
}

// stop calls last if no other plugin runs on the node, and releases the lock. No
// other plugin takes over before it returns.
func (h *handover) stop(last func()) error {
	unlock, err := h.locks.Named(lifecycleLock)
	if err != nil {
		return err
	}
	defer unlock()
	if len(h.others()) == 0 {
		last()
	}
	h.release()
	return nil
}

// others returns the other running plugins.
func (h *handover) others() []string {
	return h.pruneAndList(func(name string) bool { return name != h.own })
}

// successors returns the running plugins that took over after this one.
func (h *handover) successors() []string {
	return h.pruneAndList(func(name string) bool { return name > h.own })
}

// predecessors returns the running plugins that took over before this one.
func (h *handover) predecessors() []string {
	return h.pruneAndList(func(name string) bool { return h.own == "" || name < h.own })
}

// pruneAndList removes the lock files of the selected plugins that have ended, and returns the
// selected plugins that run: they hold their lock.
func (h *handover) pruneAndList(selected func(name string) bool) (names []string) {
	paths, _ := filepath.Glob(filepath.Join(string(h.locks), pluginLocks+"*")) // the pattern is well-formed
	for _, path := range paths {
		name := filepath.Base(path)
		if !selected(name) {
			continue
		}
		release, ok, err := h.locks.TryNamed(name)
		switch {
		case ok:
			h.locks.Remove(name)
			release()
		case err == nil:
			names = append(names, name)
		}
	}
	return names
}

// isNewest reports whether no newer plugin runs. Only the newest acts without a request.
func (h *handover) isNewest() bool { return len(h.successors()) == 0 }

// predecessorInterval is how often a plugin checks whether its predecessors have stopped.
const predecessorInterval = 250 * time.Millisecond

// awaitPredecessors calls resume once after the plugins that were running at
// the start have stopped.
func (h *handover) awaitPredecessors(ctx context.Context, resume func(context.Context)) {
	if len(h.predecessors()) == 0 || h.awaitEnd(ctx, 0) != nil {
		return
	}
	resume(ctx)
}

// awaitEnd waits until no predecessor runs, or for a timeout if that is not 0. It
// returns the cause if ctx ended.
func (h *handover) awaitEnd(ctx context.Context, timeout time.Duration) error {
	var expired <-chan time.Time
	if timeout > 0 {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		expired = timer.C
	}
	tick := time.NewTicker(predecessorInterval)
	defer tick.Stop()
	for len(h.predecessors()) > 0 {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-expired:
			return nil
		case <-tick.C:
		}
	}
	return nil
}
