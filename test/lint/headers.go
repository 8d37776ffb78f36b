// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	_ "embed"
	"os"
	"path"
	"strings"
)

// headerText is the license header in the form for Go and C. The generators of
// Go files read the same file.
//
//go:embed header.go.txt
var headerText string

// headerLines is the number of lines at the top of a file that the header may start in.
const headerLines = 10

// checkHeader returns a finding if a source file does not have a license header. Generated files are not checked.
func checkHeader(name string, content []byte) []finding {
	if commentMark(name, content) == "" || generated(content) {
		return nil
	}
	copyright, license := headerState(content)
	if copyright && license {
		return nil
	}
	return []finding{{name, 1, "no license header: run make fix-headers"}}
}

// commentMark returns how a line comment starts in a file that needs a header,
// or "" if the file needs none.
func commentMark(name string, content []byte) string {
	base := path.Base(name)
	switch path.Ext(name) {
	case ".go", ".c", ".h":
		return "//"
	case ".sh", ".awk", ".mk":
		return "#"
	}
	if base == "Makefile" || base == "Dockerfile" || bytes.HasPrefix(content, []byte("#!")) {
		return "#"
	}
	return ""
}

// headerState reports whether the first lines of a file name the copyright
// holder and an SPDX license expression that contains Apache-2.0.
func headerState(content []byte) (copyright, license bool) {
	number := 0
	for line := range strings.Lines(string(content)) {
		if number++; number > headerLines {
			break
		}
		copyright = copyright || strings.Contains(line, copyrightLine())
		license = license ||
			strings.Contains(line, "SPDX-License-Identifier:") && strings.Contains(line, "Apache-2.0")
	}
	return copyright, license
}

// copyrightLine returns the header's first line without the comment mark.
func copyrightLine() string {
	first, _, _ := strings.Cut(headerText, "\n")
	return strings.TrimPrefix(first, "// ")
}

// writeHeader inserts the header into a file and keeps its mode.
func writeHeader(name string, content []byte) error {
	info, err := os.Stat(name)
	if err != nil {
		return err
	}
	return os.WriteFile(name, withHeader(name, content), info.Mode().Perm())
}

// withHeader returns content with the header below the "#!" line, if there is one, and otherwise at the top. A blank
// line follows, so the header does not become part of a package's documentation or of a build constraint. If the file
// has a separate SPDX line, only the copyright is inserted.
func withHeader(name string, content []byte) []byte {
	mark := commentMark(name, content)
	header := strings.ReplaceAll(headerText, "// ", mark+" ")
	copyright, license := headerState(content)
	switch {
	case copyright && license:
		return content
	case license:
		header = mark + " " + copyrightLine() + "\n"
	default:
		header += "\n"
	}
	var interpreter []byte
	if bytes.HasPrefix(content, []byte("#!")) {
		end := bytes.IndexByte(content, '\n') + 1
		interpreter, content = content[:end], content[end:]
	}
	return bytes.Join([][]byte{interpreter, []byte(header), content}, nil)
}
