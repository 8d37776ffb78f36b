// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package files

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Flock locks a file as flock(2) does, and continues after signals, which a Go program receives at any time.
func Flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
