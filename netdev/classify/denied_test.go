// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// The library suggests to raise the limit of locked memory, which does not apply to BPF since Linux 5.11.
func TestOpen_withoutCapBPF(t *testing.T) {
	for _, key := range classify.Keys() {
		var err error
		nstest.WithoutCapabilities(t, func() error {
			var c *classify.Classifier
			if c, err = classify.OpenUnpinned(classify.AttachClsact, key, false); err == nil {
				return c.Close()
			}
			return nil
		}, unix.CAP_BPF, unix.CAP_SYS_ADMIN)
		if !errors.Is(err, classify.ErrDenied) {
			t.Errorf("key %s: got error %v, want one that wraps ErrDenied", key, err)
			continue
		}
		if text := err.Error(); strings.Contains(text, "MEMLOCK") || strings.Contains(text, "BTF") ||
			!strings.Contains(text, "the process does not have CAP_BPF") {
			t.Errorf("key %s: got error %q, want only CAP_BPF to be named as the cause", key, text)
		}
	}
}

func TestDescribeLoadError(t *testing.T) {
	denial := &ebpf.VerifierError{Cause: unix.EACCES} // what SELinux and AppArmor return; the verifier has not run
	refusal := &ebpf.VerifierError{Cause: unix.EACCES, Log: []string{"R1 invalid mem access 'scalar'"}}
	for name, test := range map[string]struct {
		err    error
		key    classify.Key
		denied bool
		want   string // the end of the text
	}{
		"a security module denies a map": {
			fmt.Errorf("map create: %w", unix.EACCES), classify.KeyMAC, true, "the kernel denies bpf()",
		},
		"the node is in a user namespace": {
			fmt.Errorf("map create: %w (MEMLOCK may be too low, consider rlimit.RemoveMemlock)", unix.EPERM),
			classify.KeySocketCookie, true, "map create: operation not permitted: the kernel denies bpf()",
		},
		"a security module denies a program":      {denial, classify.KeySocketCookie, true, "the kernel denies bpf()"},
		"the verifier refuses a program":          {refusal, classify.KeyMAC, false, "'scalar'"},
		"the verifier refuses to read the kernel": {refusal, classify.KeySocketCookie, false, "below confidentiality?"},
		"a helper is unknown":                     {unix.EINVAL, classify.KeyCookie, false, "invalid argument"},
	} {
		t.Run(name, func(t *testing.T) {
			got := classify.DescribeLoadError(test.err, test.key)
			if !errors.Is(got, test.err) || errors.Is(got, classify.ErrDenied) != test.denied ||
				!strings.HasSuffix(got.Error(), test.want) {
				t.Errorf("got error %v, want one that wraps the cause, wraps ErrDenied: %t, and ends with %q",
					got, test.denied, test.want)
			}
		})
	}
}
