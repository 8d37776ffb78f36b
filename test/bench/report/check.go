// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// bound is the factor that a ratio may exceed its baseline by. It is wide because times vary with the machine and its
// load, even relative to the kernel's.
const bound = 3

// operations are the plugin's metrics that check compares, each with the kernel's metric that check divides it by.
var operations = []struct{ plugin, kernel string }{
	{"attach", "start"}, {"hook", "start"}, {"prepare", "start"}, {"unprepare", "end"},
}

// check prints the times of the plugin's operations divided by the times of the kernel's part, for each situation in
// the results. It returns an error if a ratio is more than bound times the ratio in the file baseline.
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
		for _, o := range operations {
			was, known := committed.quotient(plugin, o.plugin, kernel, o.kernel)
			is, measured := r.quotient(plugin, o.plugin, kernel, o.kernel)
			if !known || !measured {
				continue
			}
			compared++
			fmt.Fprintf(out, "%s / kernel, %s other pods, %s at a time: %.2f, baseline %.2f\n",
				o.plugin, shares, parallel, is, was)
			if is > bound*was {
				failed = errors.Join(failed, fmt.Errorf("%s: %s takes %.2f times the kernel's part, more than %d times "+
					"the %.2f of %s: is the machine idle? does the plugin send more requests?",
					plugin, o.plugin, is, bound, was, baseline))
			}
		}
	})
	if compared == 0 {
		return fmt.Errorf("standard input has no results of both BenchmarkPlugin and BenchmarkKernel in a situation of %s",
			baseline)
	}
	return failed
}

// quotient returns the median of a plugin metric divided by the median of a kernel metric.
func (r results) quotient(plugin, metric, kernel, kernelMetric string) (ratio float64, ok bool) {
	time, ok := r.median(plugin, metric+"-p50-µs")
	floor, ok2 := r.median(kernel, kernelMetric+"-p50-µs")
	if !ok || !ok2 {
		return 0, false
	}
	return time / floor, true
}
