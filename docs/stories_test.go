// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"regexp"
	"testing"
)

// storyCommand matches an element of the map of commands in test/e2e/commands_test.go.
var storyCommand = regexp.MustCompile(`(?m)^\t\t"([a-z-]+)":\s+s\.`)

func TestStories_commandsAreDocumented(t *testing.T) {
	commands := storyCommand.FindAllStringSubmatch(readFile(t, "../test/e2e/commands_test.go"), -1)
	if len(commands) < 10 {
		t.Fatalf("found %d commands of stories: does the pattern match their declaration?", len(commands))
	}
	page := readFile(t, "../test/e2e/README.md")
	for _, command := range commands {
		if !regexp.MustCompile("(?m)^\\| `" + command[1] + "[` ]").MatchString(page) {
			t.Errorf("the table of test/e2e/README.md has no row for the command %s", command[1])
		}
	}
}
