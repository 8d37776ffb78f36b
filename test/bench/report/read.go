// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"

	"golang.org/x/perf/benchfmt"
)

// read reads the output of go test -bench.
func read(in io.Reader) (results, error) {
	r := results{values: map[string]map[string][]float64{}}
	reader := benchfmt.NewReader(in, "results")
	for reader.Scan() {
		switch record := reader.Result().(type) {
		case *benchfmt.SyntaxError:
			return r, record
		case *benchfmt.Result:
			r.add(record)
		}
	}
	if err := reader.Err(); err != nil {
		return r, err
	}
	if len(r.names) == 0 {
		return r, errors.New("no results of benchmarks")
	}
	return r, nil
}

func (r *results) add(result *benchfmt.Result) {
	base, parts := result.Name.Parts()
	name := string(base)
	for _, part := range parts {
		if part[0] == '/' { // the part that begins with a hyphen is the number of processors
			name += string(part)
		}
	}
	if r.values[name] == nil {
		r.names = append(r.names, name)
		r.values[name] = map[string][]float64{}
	}
	for _, v := range result.Values {
		r.values[name][v.Unit] = append(r.values[name][v.Unit], v.Value)
	}
}
