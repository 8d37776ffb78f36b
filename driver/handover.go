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
// update. All of them serve requests. Only the newest acts without a request:
// it refreshes, restores, collects garbage, and reports again. The plugins may
// be configured differently and would otherwise undo each other's work.
//
// A plugin holds a lock that is named after the time at which it started. The
// kernel releases the lock when the plugin ends, however it ends.
type handover struct {
	locks   lock.Dir
	own     string
	release func()
}

// pluginLocks starts the names of the plugins' locks.
const pluginLocks = "plugin-"

// enter takes the lock of a new plugin.
func enter(locks lock.Dir, instance string) (*handover, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil { // CLOCK_BOOTTIME never goes backwards
		return nil, err
	}
	h := &handover{locks: locks, own: fmt.Sprintf("%s%020d-%s", pluginLocks, now.Nano(), instance)}
	var err error
	h.release, err = locks.Named(h.own)
	return h, err
}

// successors returns the running plugins that started after this one.
func (h *handover) successors() []string {
	return h.running(func(name string) bool { return name > h.own })
}

// predecessors returns the running plugins that started before this one.
func (h *handover) predecessors() []string {
	return h.running(func(name string) bool { return name < h.own })
}

// running returns the selected plugins that hold their lock, and removes the
// lock files of those that do not.
func (h *handover) running(selected func(name string) bool) (names []string) {
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

// isNewest reports whether this plugin is to act without a request.
func (h *handover) isNewest() bool { return len(h.successors()) == 0 }

// isAlone reports whether no other plugin runs on the node.
func (h *handover) isAlone() bool { return len(h.successors())+len(h.predecessors()) == 0 }

// predecessorInterval is the interval at which a plugin checks whether its
// predecessors have stopped.
const predecessorInterval = 250 * time.Millisecond

// awaitPredecessors calls takeOver once after the plugins that were running at
// the start have stopped.
func (h *handover) awaitPredecessors(ctx context.Context, takeOver func(context.Context)) {
	if len(h.predecessors()) == 0 {
		return
	}
	tick := time.NewTicker(predecessorInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if len(h.predecessors()) == 0 {
			takeOver(ctx)
			return
		}
	}
}
