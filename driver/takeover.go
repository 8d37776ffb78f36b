// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// takeoverInterval is how often a plugin that must not replace its predecessor yet tries again. It also tries again
// when the predecessor stops. An attempt that fails after changing the node disturbs the predecessor, so the interval
// doubles after each such attempt, up to maxTakeoverInterval.
const (
	takeoverInterval    = 10 * time.Second
	maxTakeoverInterval = 10 * time.Minute
)

// waitError is why this plugin must not serve yet.
type waitError struct {
	event   string // reason of the event
	err     error
	changed bool // whether this plugin has changed the node
}

func (e *waitError) Error() string { return e.err.Error() }
func (e *waitError) Unwrap() error { return e.err }

// mustWait returns err as the reason why this plugin must not replace its predecessor.
func mustWait(err error) *waitError {
	return &waitError{event: v1alpha1.EventReasonHandoverRefused,
		err: fmt.Errorf("not taking over from the running plugin: %w", err)}
}

// takeover replaces the running plugin by this one, once this one can serve what the running one serves.
type takeover struct {
	handover  *handover
	publisher *publisher
	records   *nodeRecords
	specs     *claimSpecs
	hook      *hookInstaller
	warnings  *warnings
	kinds     kinds
	// prepareToServe makes the records, devices, and attachments agree.
	prepareToServe func(context.Context) error
	// waiting is why this plugin waits; nil if it does not.
	waiting atomic.Pointer[error]
}

func (d *Driver) newTakeover() *takeover {
	return &takeover{
		handover:       d.handover,
		publisher:      d.publisher,
		records:        d.records,
		specs:          d.specs,
		hook:           d.hook,
		warnings:       d.warnings,
		kinds:          d.kinds,
		prepareToServe: d.prepareToServe,
	}
}

// isWaiting reports whether this plugin waits.
func (t *takeover) isWaiting() bool { return t.waiting.Load() != nil }

// waitReason returns why this plugin waits, or nil if it does not wait.
func (t *takeover) waitReason() error {
	if reason := t.waiting.Load(); reason != nil {
		return *reason
	}
	return nil
}

// run makes this plugin the newest, which acts on the node without requests. It waits while another running
// plugin serves devices that this one cannot serve, and while the hook cannot be installed. Meanwhile, this plugin
// does not serve and is not ready, which stops a rollout. An attempt that fails after the check of the devices may
// have changed the node; the predecessor repairs that.
func (t *takeover) run(ctx context.Context) error {
	for interval := takeoverInterval; ; {
		err := t.try(ctx)
		if err == nil {
			t.endWaiting()
			return nil
		}
		t.handover.abandon()
		var wait *waitError
		if !errors.As(err, &wait) || ctx.Err() != nil {
			return errors.Join(context.Cause(ctx), err)
		}
		t.reportWaiting(ctx, wait)
		if err := t.awaitChange(ctx, interval); err != nil {
			return err
		}
		if wait.changed {
			interval = min(2*interval, maxTakeoverInterval)
		}
	}
}

// awaitChange waits until the predecessors have stopped, if there are any, but no
// longer than interval.
func (t *takeover) awaitChange(ctx context.Context, interval time.Duration) error {
	if len(t.handover.predecessors()) > 0 {
		return t.handover.awaitEnd(ctx, interval)
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(interval):
		return nil
	}
}

// try returns a waitError if this plugin must wait. After an error the caller
// abandons the handover: the predecessor then repairs what this plugin changed.
func (t *takeover) try(ctx context.Context) error {
	var published []resourceapi.Device
	if len(t.handover.predecessors()) > 0 {
		var err error
		if published, err = t.publisher.publishedDevices(ctx); err != nil {
			return mustWait(fmt.Errorf("list the devices of the running plugin: %w", err))
		}
		err = t.eachChecker(func(c TakeoverChecker) error { return c.CheckTakeover(ctx, published) })
		if err != nil {
			return mustWait(err)
		}
	}
	if err := t.handover.becomeNewest(); err != nil {
		return err
	}
	// A plugin that stopped while this one waited may have removed the directories.
	if err := errors.Join(t.records.claims.MakeDir(), t.specs.MakeDirs()); err != nil {
		return err
	}
	if err := t.hook.install(ctx); err != nil {
		return &waitError{event: v1alpha1.EventReasonHookMissing,
			err: fmt.Errorf("containers with shares cannot start: %w", err)}
	}
	err := t.prepareToServe(ctx)
	if published == nil { // without a predecessor, no plugin serves: the kubelet restarts one that cannot start
		return err
	}
	if err == nil {
		err = t.eachChecker(func(c TakeoverChecker) error { return c.RecheckTakeover(published) })
	}
	if err != nil {
		wait := mustWait(err)
		wait.changed = true
		return wait
	}
	return nil
}

func (t *takeover) eachChecker(check func(TakeoverChecker) error) (failed error) {
	for _, c := range kindsOf[TakeoverChecker](t.kinds) {
		failed = errors.Join(failed, check(c))
	}
	return failed
}

// reportWaiting reports why this plugin waits.
func (t *takeover) reportWaiting(ctx context.Context, wait *waitError) {
	err := error(wait)
	if old := t.waiting.Swap(&err); old == nil || (*old).Error() != err.Error() {
		klog.FromContext(ctx).Error(err, "Cannot take over yet; retrying")
	}
	t.warnings.warn(wait.event, "", err.Error())
}

// endWaiting reports that this plugin no longer waits. The event that ends HookMissing follows from
// hookInstaller.ensure.
func (t *takeover) endWaiting() {
	t.waiting.Store(nil)
	t.warnings.end(v1alpha1.EventReasonHandoverRefused, "", v1alpha1.EventReasonHandoverCompleted,
		"the plugin that waited has taken over")
}
