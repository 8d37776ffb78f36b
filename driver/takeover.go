// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
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

// refused returns err as the reason why this plugin must not replace its predecessor.
func refused(err error) *waitError {
	return &waitError{event: v1alpha1.EventReasonHandoverRefused,
		err: fmt.Errorf("not taking over from the running plugin: %w", err)}
}

// takeOver makes this plugin the newest, which acts on the node without requests. It waits while another running
// plugin serves devices that this one cannot serve, and while the hook cannot be installed. Meanwhile, this plugin
// does not serve and is not ready, which stops a rollout. An attempt that fails after the check of the devices may
// have changed the node; the predecessor repairs that.
func (d *Driver) takeOver(ctx context.Context) error {
	for interval := takeoverInterval; ; {
		err := d.tryTakeOver(ctx)
		if err == nil {
			d.endWaiting()
			return nil
		}
		d.handover.abandon()
		var wait *waitError
		if !errors.As(err, &wait) || ctx.Err() != nil {
			return errors.Join(context.Cause(ctx), err)
		}
		d.reportWaiting(ctx, wait)
		if err := d.awaitChange(ctx, interval); err != nil {
			return err
		}
		if wait.changed {
			interval = min(2*interval, maxTakeoverInterval)
		}
	}
}

// awaitChange waits until the predecessors have stopped, if there are any, but no
// longer than interval.
func (d *Driver) awaitChange(ctx context.Context, interval time.Duration) error {
	if len(d.handover.predecessors()) > 0 {
		return d.handover.awaitEnd(ctx, interval)
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(interval):
		return nil
	}
}

// tryTakeOver returns a waitError if this plugin must wait. After an error the caller
// abandons the handover: the predecessor then repairs what this plugin changed.
func (d *Driver) tryTakeOver(ctx context.Context) error {
	var published []resourceapi.Device
	if len(d.handover.predecessors()) > 0 {
		var err error
		if published, err = d.publisher.publishedDevices(ctx); err != nil {
			return refused(fmt.Errorf("list the devices of the running plugin: %w", err))
		}
		err = d.eachTakeoverChecker(func(c TakeoverChecker) error { return c.CheckTakeover(ctx, published) })
		if err != nil {
			return refused(err)
		}
	}
	if err := d.handover.takeOver(); err != nil {
		return err
	}
	// A plugin that stopped while this one waited may have removed the directories.
	if err := errors.Join(d.records.claims.MakeDir(), d.specs.MakeDirs()); err != nil {
		return err
	}
	if err := d.hook.install(ctx); err != nil {
		return &waitError{event: v1alpha1.EventReasonHookMissing,
			err: fmt.Errorf("containers with shares cannot start: %w", err)}
	}
	err := d.prepareToServe(ctx)
	if published == nil { // without a predecessor, no plugin serves: the kubelet restarts one that cannot start
		return err
	}
	if err == nil {
		err = d.eachTakeoverChecker(func(c TakeoverChecker) error { return c.RecheckTakeover(published) })
	}
	if err != nil {
		wait := refused(err)
		wait.changed = true
		return wait
	}
	return nil
}

func (d *Driver) eachTakeoverChecker(check func(TakeoverChecker) error) (failed error) {
	for _, c := range kindsOf[TakeoverChecker](d.kinds) {
		failed = errors.Join(failed, check(c))
	}
	return failed
}

// reportWaiting reports why this plugin waits.
func (d *Driver) reportWaiting(ctx context.Context, wait *waitError) {
	err := error(wait)
	if old := d.waiting.Swap(&err); old == nil || (*old).Error() != err.Error() {
		klog.FromContext(ctx).Error(err, "Cannot take over yet; retrying")
	}
	d.warnings.warn(wait.event, "", err.Error())
}

// endWaiting reports that this plugin no longer waits. The event that ends HookMissing follows from
// hookInstaller.ensure.
func (d *Driver) endWaiting() {
	d.waiting.Store(nil)
	d.warnings.end(v1alpha1.EventReasonHandoverRefused, "", v1alpha1.EventReasonHandoverCompleted,
		"the plugin that waited has taken over")
}
