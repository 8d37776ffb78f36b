// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// The verifier of Linux 6.1 is stricter with programs of a process without
// CAP_PERFMON.
func TestOpen_loadsWithoutPerfmon(t *testing.T) {
	for _, key := range []classify.Key{classify.KeyCookie, classify.KeyMAC} {
		for _, point := range classify.AttachPoints() {
			t.Run(fmt.Sprintf("key %s, attach point %s", key, point), func(t *testing.T) {
				needKey(t, key)
				bpffs := nstest.MountBPFFS(t)
				nstest.WithoutCapabilities(t, func() error {
					c, err := classify.Open(bpffs, nil, point, key)
					if err == nil {
						err = c.Close()
					}
					return err
				}, unix.CAP_PERFMON, unix.CAP_SYS_ADMIN) // the latter includes the former
			})
		}
	}
}

func TestOpen_namesMissingCapability(t *testing.T) {
	needKey(t, classify.KeySocketCookie)
	bpffs := nstest.MountBPFFS(t)
	nstest.WithoutCapabilities(t, func() error {
		c, err := classify.Open(bpffs, nil, classify.AttachClsact, classify.KeySocketCookie)
		if err == nil {
			t.Error("Open read the cookie without CAP_PERFMON, want an error")
			return c.Close()
		}
		if !errors.Is(err, classify.ErrNoPerfmon) {
			t.Errorf("Open without CAP_PERFMON returned %v, want an error that wraps ErrNoPerfmon", err)
		}
		return nil
	}, unix.CAP_PERFMON, unix.CAP_SYS_ADMIN)
}
