// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/capability"
)

// ErrNoPerfmon is wrapped by the error of loading programs that need a capability which the process lacks.
var ErrNoPerfmon = errors.New("the process does not have CAP_PERFMON")

// ErrDenied is wrapped by the error of loading programs or maps that the kernel refuses without examining them.
var ErrDenied = errors.New("the kernel denies bpf()")

// describeLoadError adds to an error of loading the programs for a key what the process or the kernel lacks.
func describeLoadError(err error, key Key) error {
	err = withoutHint(err)
	denied := isDenied(err)
	switch {
	case denied && lacks(unix.CAP_BPF):
		return fmt.Errorf("%w: %w: the process does not have CAP_BPF", err, ErrDenied)
	case key == KeySocketCookie && lacks(unix.CAP_PERFMON):
		return fmt.Errorf("%w: %w", err, ErrNoPerfmon)
	case denied:
		return fmt.Errorf("%w: %w", err, ErrDenied)
	case key == KeySocketCookie:
		return fmt.Errorf("%w: does the kernel have BTF, and is its lockdown mode below confidentiality?", err)
	default:
		return err
	}
}

// lacks reports whether the process does not have a capability that CAP_SYS_ADMIN includes.
func lacks(c int) bool {
	has, err := capability.Has(c)
	admin, adminErr := capability.Has(unix.CAP_SYS_ADMIN)
	return err == nil && adminErr == nil && !has && !admin
}

// isDenied reports whether the process may not use bpf(2). The verifier refuses programs with the same errors,
// but explains them.
func isDenied(err error) bool {
	var refused *ebpf.VerifierError
	return errors.Is(err, fs.ErrPermission) && (!errors.As(err, &refused) || len(refused.Log) == 0)
}

// memlockHint is the explanation that package ebpf adds to EPERM. Since Linux 5.11, the limit does not
// apply to BPF.
const memlockHint = " (MEMLOCK may be too low, consider rlimit.RemoveMemlock)"

// withoutHint removes memlockHint from the text of an error.
func withoutHint(err error) error { return unhinted{err} }

type unhinted struct{ error }

func (e unhinted) Error() string { return strings.ReplaceAll(e.error.Error(), memlockHint, "") }

func (e unhinted) Unwrap() error { return e.error }
