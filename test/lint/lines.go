// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// maxColumns is the length of the longest line in Go files. A tab counts as one
// column, as in golangci-lint's lll.
const maxColumns = 120

// checkLines returns the lines of a Go file that are too long. Generated files
// and go: directives, which cannot be broken, are not checked.
func checkLines(name string, content []byte) []finding {
	if !strings.HasSuffix(name, ".go") || generated(content) {
		return nil
	}
	var findings []finding
	number := 0
	for line := range strings.Lines(string(content)) {
		number++
		columns := utf8.RuneCountInString(strings.TrimRight(line, "\r\n"))
		directive := strings.HasPrefix(line, "//go:") || strings.HasPrefix(strings.TrimSpace(line), "// +kubebuilder:")
		if columns > maxColumns && !directive {
			message := fmt.Sprintf("line of %d columns: the limit is %d", columns, maxColumns)
			findings = append(findings, finding{name, number, message})
		}
	}
	return findings
}
