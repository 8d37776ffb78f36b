// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// optionalInterface matches the declaration of an interface.
var optionalInterface = regexp.MustCompile(`(?m)^type (\w+) interface \{`)

// TestDeviceKinds_listsOptionalInterfaces compares the table in the guide for device kinds with the
// interfaces that the driver declares and with those that the kinds assert to implement.
func TestDeviceKinds_listsOptionalInterfaces(t *testing.T) {
	guide := readFile(t, "dev/device-kinds.md")
	var kinds []string
	for _, kind := range []string{"nic", "accelerator", "fabric"} {
		files, err := filepath.Glob("../driver/" + kind + "/*.go")
		if err != nil || len(files) == 0 {
			t.Fatalf("sources of the kind %s: %v", kind, err)
		}
		var source strings.Builder
		for _, file := range files {
			source.WriteString(readFile(t, file))
		}
		kinds = append(kinds, source.String())
	}
	// Every kind implements Kind; the driver implements Attachments and Records.
	required := []string{"Kind", "Attachments", "Records"}
	declarations := readFile(t, "../driver/kind.go") + readFile(t, "../driver/attacher.go") +
		readFile(t, "../driver/reserver.go")
	for _, m := range optionalInterface.FindAllStringSubmatch(declarations, -1) {
		name := m[1]
		if slices.Contains(required, name) {
			continue
		}
		pattern := "(?m)^ *\\| `driver\\." + name + "` \\|[^|]*\\|([^|]*)\\|([^|]*)\\|([^|]*)\\|$"
		row := regexp.MustCompile(pattern).FindStringSubmatch(guide)
		if row == nil {
			t.Errorf("the table of docs/dev/device-kinds.md has no row for driver.%s", name)
			continue
		}
		for i, source := range kinds {
			implemented := regexp.MustCompile(`_ driver\.` + name + ` +=`).MatchString(source)
			if documented := strings.TrimSpace(row[i+1]) == "yes"; documented != implemented {
				t.Errorf("driver.%s, column %d of the kinds: documented %t, implemented %t", name, i+1, documented, implemented)
			}
		}
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}
