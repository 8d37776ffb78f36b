// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

func TestRetryNoMemory(t *testing.T) {
	other := errors.New("another error")
	for _, c := range []struct {
		name    string
		results []error // the last one repeats
		calls   int
		want    error
	}{
		{"succeeds", []error{nil}, 1, nil},
		{"memory becomes available", []error{unix.ENOMEM, unix.ENOMEM, nil}, 3, nil},
		{"another error", []error{unix.ENOMEM, other}, 2, other},
		{"no memory", []error{unix.ENOMEM}, memoryAttempts, unix.ENOMEM},
	} {
		t.Run(c.name, func(t *testing.T) {
			calls := 0
			err := retryNoMemory(func() error {
				calls++
				return c.results[min(calls, len(c.results))-1]
			})
			if !errors.Is(err, c.want) || calls != c.calls {
				t.Errorf("got error %v after %d calls, want %v after %d", err, calls, c.want, c.calls)
			}
		})
	}
}
