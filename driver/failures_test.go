// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/attach"
)

// endingContext is a context that ends after it was asked once: while a request waits for the lock of its claim.
type endingContext struct {
	context.Context
	asked bool
}

func (c *endingContext) Err() error {
	if !c.asked {
		c.asked = true
		return nil
	}
	return context.DeadlineExceeded
}

// A pod that only waits for the other pods of its claim reports that, and why attaching those fails.
func TestAttach_reportsCauseOfWait(t *testing.T) {
	d := newUnstarted(t)
	expect := func(pod, want string) {
		t.Helper()
		r := attach.Request{ClaimUID: "uid", Share: "s", Pod: attach.Pod{Namespace: "default", Name: pod, UID: pod}}
		_, err := d.Attach(&endingContext{Context: t.Context()}, r, attach.Sockets{})
		if err == nil || err.Error() != want {
			t.Errorf("attach pod %s: got error %v, want %s", pod, err, want)
		}
	}
	const waited = "timed out waiting for other requests for the claim: context deadline exceeded"
	expect("b", waited)
	d.failures.set("s", attach.Pod{Namespace: "default", Name: "a", UID: "a"}, errors.New("all addresses are assigned"))
	for _, pod := range []string{"b", "c"} {
		expect(pod, waited+"; the last request that failed was for pod default/a: all addresses are assigned")
	}
}

// The lock of a claim may be held by a request that waits for a pod. Those that wait for the lock must not take
// the places of other pods for longer than their own time.
func TestAttach_waitsForClaimUntilContextEnds(t *testing.T) {
	d := newUnstarted(t)
	release, err := d.locks.Key(t.Context(), "uid")
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := d.Attach(ctx, attach.Request{ClaimUID: "uid", Share: "s"}, attach.Sockets{})
		done <- err
	}()
	select {
	case err := <-done:
		if !errors.Is(err, errClaimBusy) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got error %v, want %v", err, errClaimBusy)
		}
	case <-time.After(10 * time.Second):
		t.Error("the request still waits for the lock")
	}
}
