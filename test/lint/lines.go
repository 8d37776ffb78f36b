// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

// maxColumns is the length of the longest line in Go files, of prose in Markdown files, and of comments in YAML files,
// templates, stories, and scripts. A tab counts as one column, as in golangci-lint's lll.
const maxColumns = 120

// commented matches the files with only their comments checked.
var commented = regexp.MustCompile(`\.(yaml|yml|tpl|txtar|sh)$`)

// checkLines returns the lines of a Go file, the lines of prose of a Markdown file, and the comments of other files,
// that are too long. Generated files are not checked.
func checkLines(name string, content []byte) []finding {
	var columns func(line string) int
	switch {
	case strings.HasSuffix(name, ".go") && !generated(content):
		columns = goColumns
	case strings.HasSuffix(name, ".md") && !bytes.HasPrefix(content, []byte("<!-- Code generated ")):
		columns = markdownColumns()
	case commented.MatchString(name) && !generated(content):
		columns = commentColumns
	default:
		return nil
	}
	var findings []finding
	number := 0
	for line := range strings.Lines(string(content)) {
		number++
		if n := columns(strings.TrimRight(line, "\r\n")); n > maxColumns {
			message := fmt.Sprintf("line of %d columns: the limit is %d", n, maxColumns)
			findings = append(findings, finding{name, number, message})
		}
	}
	return findings
}

// goColumns returns the number of columns of a line of Go; 0 for a directive, which cannot be broken.
func goColumns(line string) int {
	if strings.HasPrefix(line, "//go:") || strings.HasPrefix(strings.TrimSpace(line), "// +kubebuilder:") {
		return 0
	}
	return utf8.RuneCountInString(line)
}

// commentOnly matches a line that consists of a comment, or of a part of one, in a script or a template.
var commentOnly = regexp.MustCompile(`^\s*(#|\{\{-?\s*/\*)`)

// commentColumns returns the number of columns of a comment line, without addresses; 0 for other lines, which often
// cannot be broken.
func commentColumns(line string) int {
	if !commentOnly.MatchString(line) {
		return 0
	}
	return utf8.RuneCountInString(linkTarget.ReplaceAllString(line, ""))
}

// linkTarget matches the target of a link, and an address, in Markdown.
var linkTarget = regexp.MustCompile(`\]\([^)]*\)|https?://[^\s)>]+`)

// markdownColumns returns a function that returns the number of columns of the next line of a file. It returns 0 for
// lines of tables and code, which cannot be broken, and does not count the targets of links.
func markdownColumns() func(line string) int {
	inCode := false
	return func(line string) int {
		switch text := strings.TrimSpace(line); {
		case strings.HasPrefix(text, "```"):
			inCode = !inCode
			return 0
		case inCode, strings.HasPrefix(text, "|"):
			return 0
		}
		return utf8.RuneCountInString(linkTarget.ReplaceAllString(line, ""))
	}
}
