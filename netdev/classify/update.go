// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"errors"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

const (
	// memoryAttempts is how often update tries to add an entry when the kernel does not have memory for it.
	memoryAttempts = 8
	// memoryWait is the time before the second attempt. Each wait is twice as long as the one before, so update takes at
	// most 127 ms.
	memoryWait = time.Millisecond
)

// update writes an entry of a map.
//
// The maps do not allocate their entries in advance. The kernel takes each entry from a
// cache of some dozen per processor, which it refills from an interrupt without waiting
// for memory (kernel/bpf/memalloc.c). If many entries are added in a short time, or most
// memory holds file contents, the cache is empty for some milliseconds, and the update
// fails with ENOMEM.
func update(m *ebpf.Map, key, value any, flags ebpf.MapUpdateFlags) error {
	return retryNoMemory(func() error { return m.Update(key, value, flags) })
}

// put adds or replaces an entry of a map; see update.
func put(m *ebpf.Map, key, value any) error { return update(m, key, value, ebpf.UpdateAny) }

// retryNoMemory calls f until it returns an error other than ENOMEM.
func retryNoMemory(f func() error) (err error) {
	wait := memoryWait
	for range memoryAttempts - 1 {
		if err = f(); !errors.Is(err, unix.ENOMEM) {
			return err
		}
		time.Sleep(wait) //nolint:forbidigo // the kernel sends no event
		wait *= 2
	}
	return f()
}
