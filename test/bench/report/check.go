// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// bound is the factor by which a ratio may exceed its baseline. It is wide because times vary
// with the machine and its load, even relative to the kernel's.
const bound = 3

// check prints the time of an attach divided by that of the kernel's part, in each situation of
// the results, and returns an error if a ratio is more than bound times that of the file baseline.
func check(r results, out io.Writer, baseline string) error {
	file, err := os.Open(baseline)
	if err != nil {
		return err
	}
	defer file.Close()
	committed, err := read(file)
	if err != nil {
		return fmt.Errorf("%s: %w", baseline, err)
	}
	var failed error
	compared := 0
	r.eachSituation(func(shares, parallel, plugin, kernel, _ string) {
		was, known := committed.attachRatio(plugin, kernel)
		is, measured := r.attachRatio(plugin, kernel)
		if !known || !measured {
			return
		}
		compared++
		fmt.Fprintf(out, "attach / kernel, %s other pods, %s at a time: %.2f, baseline %.2f\n", shares, parallel, is, was)
		if is > bound*was {
			failed = errors.Join(failed, fmt.Errorf("%s: an attach takes %.2f times the kernel's part, more than %d times "+
				"the %.2f of %s: is the machine idle? does an attach send more requests?", plugin, is, bound, was, baseline))
		}
	})
	if compared == 0 {
		return fmt.Errorf("standard input has no results of both BenchmarkPlugin and BenchmarkKernel in a situation of %s",
			baseline)
	}
	return failed
}

// attachRatio returns the median time of an attach divided by that of the kernel's part.
func (r results) attachRatio(plugin, kernel string) (ratio float64, ok bool) {
	attach, ok := r.median(plugin, "attach-p50-µs")
	floor, ok2 := r.median(kernel, "start-p50-µs")
	if !ok || !ok2 {
		return 0, false
	}
	return attach / floor, true
}
