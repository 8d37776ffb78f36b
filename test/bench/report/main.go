// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command report turns the results of the benchmarks of `make bench` into the tables and plots
// of docs/dev/performance.md, and compares later results with them.
//
// usage:
//
//	report write DIRECTORY <RESULTS  prints the tables, and writes the plots into DIRECTORY
//	report check BASELINE <RESULTS   fails if the results are much worse than those in BASELINE
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

func main() {
	if err := run(os.Stdin, os.Stdout, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer, args []string) error {
	if len(args) != 2 || args[0] != "write" && args[0] != "check" {
		return errors.New("usage: report write DIRECTORY <RESULTS, or report check BASELINE <RESULTS")
	}
	r, err := read(in)
	if err != nil {
		return fmt.Errorf("standard input: %w", err)
	}
	if args[0] == "check" {
		return check(r, out, args[1])
	}
	return write(r, out, args[1])
}

// write prints the tables, and writes the plots into a directory.
func write(r results, out io.Writer, directory string) error {
	for _, section := range []string{starts(r), ends(r), spread(r), traffic(r)} {
		if _, err := fmt.Fprint(out, section); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return err
	}
	return plots(r, func(name string) string { return filepath.Join(directory, name+".svg") })
}

// cell returns "MEDIAN (PERCENTILE)" in ms of a metric, or "-".
func cell(r results, benchmark, metric string) string {
	p50, ok := r.median(benchmark, metric+"-p50-µs")
	p99, ok99 := r.median(benchmark, metric+"-p99-µs")
	if !ok || !ok99 {
		return "-"
	}
	return fmt.Sprintf("%s (%s)", milliseconds(p50), milliseconds(p99))
}

// milliseconds formats a number of µs with two or more digits.
func milliseconds(us float64) string {
	if us >= 1e4 {
		return fmt.Sprintf("%.0f", us/1e3)
	}
	return fmt.Sprintf("%.2g", us/1e3)
}

// ratio returns the quotient of two metrics, or "-".
func ratio(numerator float64, ok bool, denominator float64, ok2 bool) string {
	if !ok || !ok2 || denominator == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", numerator/denominator)
}

// situations returns the parts of benchmark names after the first slash, such as
// shares=10/parallel=1.
func (r results) situations(benchmark string) (list []string) {
	for _, name := range r.names {
		if rest, ok := strings.CutPrefix(name, benchmark+"/"); ok {
			list = append(list, rest)
		}
	}
	return list
}

var situation = regexp.MustCompile(`^shares=(\d+)/parallel=(\d+)$`)

// eachSituation calls do with the numbers of a situation, and the names of the benchmarks in it.
func (r results) eachSituation(do func(shares, parallel, plugin, kernel, cni string)) {
	for _, name := range r.situations("Plugin") {
		if m := situation.FindStringSubmatch(name); m != nil {
			do(m[1], m[2], "Plugin/"+name, "Kernel/"+name, "CNI/"+name)
		}
	}
}

func starts(r results) string {
	var s strings.Builder
	s.WriteString(`## A pod starts

| other pods | at a time | kernel | attach | hook | prepare | CNI ADD | attach / kernel | prepare and hook / CNI |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
`)
	r.eachSituation(func(shares, parallel, plugin, kernel, cni string) {
		attach, ok1 := r.median(plugin, "attach-p50-µs")
		floor, ok2 := r.median(kernel, "start-p50-µs")
		hook, ok3 := r.median(plugin, "hook-p50-µs")
		prepare, ok4 := r.median(plugin, "prepare-p50-µs")
		add, ok5 := r.median(cni, "start-p50-µs")
		fmt.Fprintf(&s, "| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", shares, parallel,
			cell(r, kernel, "start"), cell(r, plugin, "attach"), cell(r, plugin, "hook"), cell(r, plugin, "prepare"),
			cell(r, cni, "start"), ratio(attach, ok1, floor, ok2), ratio(hook+prepare, ok3 && ok4, add, ok5))
	})
	return s.String()
}

func ends(r results) string {
	var s strings.Builder
	s.WriteString(`
## A pod ends

| other pods | at a time | kernel | unprepare | CNI DEL | unprepare / kernel | unprepare / CNI |
| --- | --- | --- | --- | --- | --- | --- |
`)
	r.eachSituation(func(shares, parallel, plugin, kernel, cni string) {
		unprepare, ok := r.median(plugin, "unprepare-p50-µs")
		floor, ok1 := r.median(kernel, "end-p50-µs")
		del, ok2 := r.median(cni, "end-p50-µs")
		fmt.Fprintf(&s, "| %s | %s | %s | %s | %s | %s | %s |\n", shares, parallel, cell(r, kernel, "end"),
			cell(r, plugin, "unprepare"), cell(r, cni, "end"), ratio(unprepare, ok, floor, ok1), ratio(unprepare, ok, del, ok2))
	})
	return s.String()
}

// spread describes how much longer than usual the driver's steps can take.
func spread(r results) string {
	most := 0.0
	r.eachSituation(func(_, _, plugin, _, _ string) {
		for _, step := range []string{"attach", "hook", "prepare", "unprepare"} {
			p50, ok := r.median(plugin, step+"-p50-µs")
			p99, ok99 := r.median(plugin, step+"-p99-µs")
			if ok && ok99 {
				most = max(most, p99/p50)
			}
		}
	})
	return fmt.Sprintf("\nThe 99th percentile of each step of the driver is at most %.1f times its median.\n", most)
}

// limiters are the names in the results and in the tables.
var limiters = [][2]string{
	{"none", "no limit"},
	{"driver", "this driver"},
	{"driver-multi-queue", "this driver, `shaping: MultiQueue`"},
	{"tbf-in-pod", "token bucket in the pod"},
	{"cni-bandwidth", "CNI bandwidth (veth)"},
}

func traffic(r results) string {
	var s strings.Builder
	for _, limit := range []string{"100M", "1000M"} {
		fmt.Fprintf(&s, `
## A limit of %s bit/s

| | sends | receives | first second | own round trip | neighbor's round trip | one flow next to eight |
| --- | --- | --- | --- | --- | --- | --- |
`, limit)
		for _, l := range limiters {
			row := []string{l[1]}
			for _, metric := range []struct{ unit, format string }{
				{"send-error-%", "%+.1f %%"}, {"receive-error-%", "%+.1f %%"}, {"send-first-second-%", "%.0f %%"},
				{"own-p99-µs", "%.0f µs"}, {"neighbor-p99-µs", "%.0f µs"},
				{"one-to-eight-flows-%", "%.0f %%"},
			} {
				row = append(row, r.format("Traffic/limiter="+l[0]+"/limit="+limit, metric.unit, metric.format))
			}
			fmt.Fprintf(&s, "| %s |\n", strings.Join(row, " | "))
		}
	}
	s.WriteString(`
## A limit that is not reached

| | rate | processor time per Gbit | small datagrams per second | two senders, of one |
| --- | --- | --- | --- | --- |
`)
	for _, l := range limiters {
		name := "Traffic/limiter=" + l[0] + "/limit=none"
		fmt.Fprintf(&s, "| %s | %s | %s | %s | %s |\n", l[1], r.format(name, "Gbit/s", "%.1f Gbit/s"),
			r.format(name, "cpu-ms/Gbit", "%.0f ms"), r.format(name, "kpps", "%.0f,000"),
			r.format(name, "two-senders", "%.2f"))
	}
	return s.String()
}

// format returns the median of a metric in a format, or "-" without one.
func (r results) format(benchmark, unit, format string) string {
	value, ok := r.median(benchmark, unit)
	if !ok {
		return "-"
	}
	return fmt.Sprintf(format, value)
}

// results are the values of all runs of each benchmark, by its name without the number of
// processors, and by unit.
type results struct {
	names  []string // in the order of the input
	values map[string]map[string][]float64
}

// median returns the median of the runs.
func (r results) median(benchmark, unit string) (value float64, ok bool) {
	values := slices.DeleteFunc(slices.Sorted(slices.Values(r.values[benchmark][unit])), func(v float64) bool {
		return v == 0 // the benchmark does not have such a repetition
	})
	if len(values) == 0 {
		return 0, false
	}
	return values[len(values)/2], true
}
