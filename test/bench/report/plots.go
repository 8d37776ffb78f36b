// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
)

const width, height = 7 * vg.Inch, 4 * vg.Inch

// curve is a metric of a benchmark over the number of other pods.
type curve struct{ label, benchmark, metric string }

// plots writes the plots. path returns the file of a plot.
func plots(r results, path func(name string) string) error {
	start := []curve{
		{"CNI ADD", "CNI", "start-p50-µs"}, {"hook", "Plugin", "hook-p50-µs"},
		{"attach", "Plugin", "attach-p50-µs"}, {"kernel", "Kernel", "start-p50-µs"},
	}
	end := []curve{
		{"CNI DEL", "CNI", "end-p50-µs"}, {"unprepare", "Plugin", "unprepare-p50-µs"}, {"kernel", "Kernel", "end-p50-µs"},
	}
	for _, parallel := range []int{1, 32} {
		suffix := fmt.Sprintf("%d at a time", parallel)
		if err := lines(r, parallel, "Pods start, "+suffix, start, path(fmt.Sprintf("start-%d", parallel))); err != nil {
			return err
		}
		if err := lines(r, parallel, "Pods end, "+suffix, end, path(fmt.Sprintf("end-%d", parallel))); err != nil {
			return err
		}
	}
	return nil
}

// lines writes a plot of medians in ms over the number of other pods, unless there are none.
func lines(r results, parallel int, title string, curves []curve, path string) error {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, "other pods on the NIC", "median, ms"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.LogTicks{Prec: -1}, plot.LogTicks{Prec: -1}
	p.Legend.Top = true
	p.Add(plotter.NewGrid())
	var all []any
	for _, c := range curves {
		if points := r.points(c, parallel); len(points) > 0 {
			all = append(all, c.label, points)
		}
	}
	if len(all) == 0 {
		return nil
	}
	if err := plotutil.AddLinePoints(p, all...); err != nil {
		return err
	}
	return p.Save(width, height, path)
}

func (r results) points(c curve, parallel int) (points plotter.XYs) {
	for _, name := range r.situations(c.benchmark) {
		m := situation.FindStringSubmatch(name)
		if m == nil || m[2] != strconv.Itoa(parallel) {
			continue
		}
		value, ok := r.median(c.benchmark+"/"+name, c.metric)
		shares, err := strconv.Atoi(m[1])
		if ok && err == nil && value > 0 { // the scale is logarithmic
			points = append(points, plotter.XY{X: float64(shares), Y: value / 1e3})
		}
	}
	return points
}
