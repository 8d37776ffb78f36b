// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"testing"
	"time"
)

// A call that the timeout interrupts returns an error that does not describe the pod.
func TestPollEvery_returnsCauseAfterTimeout(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cause := errors.New("the image cannot be pulled")
	calls := 0
	err := pollEvery(ctx, time.Millisecond, func() error {
		calls++
		if calls < 3 {
			return cause
		}
		cancel()
		return ctx.Err()
	})
	if !errors.Is(err, cause) {
		t.Errorf("got error %v after %d calls, want %v", err, calls, cause)
	}
}

func TestConfig_devices(t *testing.T) {
	c, err := Config{Driver: "example.com", Command: []string{"driver"}, Devices: []string{"net*", "gpu-0"}}.complete()
	if err != nil {
		t.Fatal(err)
	}
	for device, want := range map[string]bool{"net0": true, "gpu-0": true, "gpu-1": false, "pci-0000-00-03-0": false} {
		if got := c.mayUse(device); got != want {
			t.Errorf("claims may use %s: got %t, want %t", device, got, want)
		}
	}
	c.Devices = []string{"net[0"}
	const want = `devices[0] is "net[0": it must be a pattern such as gpu-*`
	if _, err := c.complete(); err == nil || err.Error() != want {
		t.Errorf("a pattern that is invalid: got error %v, want %s", err, want)
	}
}
