// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package matrix writes the table of kernels in docs/dev/matrix.md, which has a
// section for each target that writes results. A row stays until a pass on the same
// kernel with the same arguments replaces it.
package matrix

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// heading is the first line of the section about kernels. The section ends with
// the file.
const heading = "## Linux kernels"

const introduction = heading + `

Written by ` + "`make lab`" + `, which runs the tests of netdev in a guest with each kernel, and
stories of test/e2e on a guest as a node. [The lab](lab.md) describes both. The sender's
key is the strongest one for which the attacks of the tests were held.

| kernel | arguments | last run | sender's key | tests of netdev | stories on a node |
| --- | --- | --- | --- | --- | --- |
`

// Row is the result of a pass on one kernel. A part that did not run is empty.
type Row struct {
	Kernel    string // the kernel's release
	Arguments string // arguments of the kernel
	Date      string
	Key       string
	Tests     string
	Stories   string
}

// Failed marks a result as a failure.
func Failed(reason string) string {
	const mark = "**failed**"
	if reason == "" {
		return mark
	}
	return mark + ": " + reason
}

// Failed reports whether a part of the pass failed.
func (r Row) Failed() bool { return strings.Contains(r.Tests+r.Stories, Failed("")) }

// String returns the row as a line of the table.
func (r Row) String() string {
	return fmt.Sprintf("| %s | %s | %s | %s | %s | %s |", r.Kernel, r.Arguments, r.Date, r.Key, r.Tests, r.Stories)
}

// parse reads a line that String returned.
func parse(line string) (r Row, ok bool) {
	cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
	if len(cells) != 6 {
		return r, false
	}
	for i, cell := range []*string{&r.Kernel, &r.Arguments, &r.Date, &r.Key, &r.Tests, &r.Stories} {
		*cell = strings.TrimSpace(cells[i])
	}
	return r, r.Kernel != "kernel" && !strings.HasPrefix(r.Kernel, "---")
}

// Update writes the row to the table in file, and keeps the file's other sections.
func Update(file string, row Row) error {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(update(string(raw), row)), 0o644)
}

func update(text string, row Row) string {
	before, section, found := strings.Cut(text, heading)
	if !found {
		before = strings.TrimRight(before, "\n") + "\n\n"
	}
	var rows []Row
	for line := range strings.Lines(section) {
		if r, ok := parse(line); ok {
			rows = append(rows, r)
		}
	}
	same := func(r Row) bool { return r.Kernel == row.Kernel && r.Arguments == row.Arguments }
	if i := slices.IndexFunc(rows, same); i >= 0 {
		rows[i] = merge(rows[i], row)
	} else {
		rows = append(rows, row)
	}
	out := before + introduction
	for _, r := range rows {
		out += r.String() + "\n"
	}
	return out
}

// merge returns the new row, with the results of the old one for parts that did
// not run again.
func merge(old, row Row) Row {
	if row.Tests == "" {
		row.Tests, row.Key = old.Tests, old.Key
	}
	if row.Stories == "" {
		row.Stories = old.Stories
	}
	return row
}
