// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package kernelcheck_test

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/dra-shared/dra-driver-shared/test/kernelcheck"
)

// recorder records how a test ends.
type recorder struct {
	testing.TB
	failed, skipped string
}

func (r *recorder) Helper() {}

func (r *recorder) Fatalf(format string, args ...any) {
	r.failed = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func (r *recorder) Skipf(format string, args ...any) {
	r.skipped = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func TestSkip(t *testing.T) {
	for variable, fails := range map[string]bool{
		"": false, "ARPSender": true, "TCX ARPSender": true, "TCX": false, "ARPSenders": false,
	} {
		t.Setenv(kernelcheck.Variable, variable)
		r := &recorder{TB: t}
		done := make(chan struct{})
		go func() {
			defer close(done)
			kernelcheck.Skip(r, kernelcheck.ARPSender, errors.New("not permitted"))
		}()
		<-done
		text := r.skipped + r.failed
		if (r.failed != "") != fails || (r.skipped != "") == fails || !strings.Contains(text, "not permitted") {
			t.Errorf("%s=%q: failed with %q, skipped with %q, want a failure: %t",
				kernelcheck.Variable, variable, r.failed, r.skipped, fails)
		}
	}
}
