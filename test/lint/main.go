// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command lint checks what golangci-lint does not: wording, the length of
// lines, log messages, and license headers. It reads the files that git tracks, and new files
// that git does not ignore.
//
//	go run ./test/lint words [--count]
//	go run ./test/lint lines [--count]
//	go run ./test/lint logs [--count]
//	go run ./test/lint headers [--count] [--fix]
//
// Each finding is printed as FILE:LINE: MESSAGE. With --count, the command prints the
// number of findings for each directory instead. The exit status is 1 if there are
// findings. The checks are documented in words.go, lines.go, logs.go, and headers.go.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
)

// A finding is a violation of a rule at a line of a file.
type finding struct {
	file    string
	line    int
	message string
}

// A check returns the findings in one file. The name is relative to the root of
// the repository, with slashes.
type check func(name string, content []byte) []finding

// checks maps a subcommand to its check.
var checks = map[string]check{
	"words":   checkWords,
	"lines":   checkLines,
	"logs":    checkLogs,
	"headers": checkHeader,
}

func main() {
	findings, err := run(os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintf(os.Stderr, "lint: %v\n", err)
		os.Exit(2)
	case findings > 0:
		os.Exit(1)
	}
}

// run executes a subcommand in the working directory, which must be the root of
// the repository, and returns the number of findings.
func run(args []string, out io.Writer) (int, error) {
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	check, ok := checks[name]
	if !ok {
		return 0, fmt.Errorf("unknown check %q: use words, lines, logs, or headers", name)
	}
	flags := flag.NewFlagSet("lint "+name, flag.ContinueOnError)
	count := flags.Bool("count", false, "print the number of findings for each directory")
	fix := flags.Bool("fix", false, "insert missing headers (headers only)")
	if err := flags.Parse(args[1:]); err != nil {
		return 0, err
	}
	if *fix && name != "headers" {
		return 0, fmt.Errorf("the check %q cannot fix files: remove --fix", name)
	}
	files, err := listFiles()
	if err != nil {
		return 0, err
	}
	var findings []finding
	for _, file := range files {
		content, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, but still in the index
		}
		if err != nil {
			return 0, err
		}
		found := check(file, content)
		if *fix && len(found) > 0 {
			if err := writeHeader(file, content); err != nil {
				return 0, err
			}
			continue
		}
		findings = append(findings, found...)
	}
	if *count {
		printCounts(out, findings)
	} else {
		printFindings(out, findings)
	}
	return len(findings), nil
}

// listFiles returns the regular files of the repository in order of their names.
func listFiles() ([]string, error) {
	out, err := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		return nil, fmt.Errorf("list the files of the repository with git: %w: is this a git work tree?", err)
	}
	var files []string
	for file := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		info, err := os.Lstat(file)
		if err == nil && info.Mode().IsRegular() {
			files = append(files, file)
		}
	}
	slices.Sort(files)
	return slices.Compact(files), nil
}

func printFindings(out io.Writer, findings []finding) {
	for _, f := range findings {
		fmt.Fprintf(out, "%s:%d: %s\n", f.file, f.line, f.message)
	}
}

// printCounts prints one line per directory, the directory with the most
// findings first, and the total.
func printCounts(out io.Writer, findings []finding) {
	counts := map[string]int{}
	for _, f := range findings {
		counts[path.Dir(f.file)]++
	}
	dirs := make([]string, 0, len(counts))
	for dir := range counts {
		dirs = append(dirs, dir)
	}
	slices.SortFunc(dirs, func(a, b string) int {
		if counts[a] != counts[b] {
			return counts[b] - counts[a]
		}
		return strings.Compare(a, b)
	})
	for _, dir := range dirs {
		fmt.Fprintf(out, "%6d %s\n", counts[dir], dir)
	}
	fmt.Fprintf(out, "%6d total\n", len(findings))
}

// generated reports whether a file carries the mark of a code generator.
func generated(content []byte) bool {
	for line := range bytes.Lines(content) {
		line = bytes.TrimSpace(line)
		mark := bytes.TrimLeft(line, "/#-* ")
		if len(mark) < len(line) && bytes.HasPrefix(mark, []byte("Code generated ")) {
			return true
		}
		if bytes.HasPrefix(line, []byte("package ")) {
			return false
		}
	}
	return false
}
