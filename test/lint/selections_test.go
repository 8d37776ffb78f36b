// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Each alternative of a regular expression that selects tests matches a test: otherwise, a test that gets another name
// would no longer run.
func TestSelections_matchTests(t *testing.T) {
	for _, s := range slices.Concat(selectionsOfLab(t), selectionsOfScripts(t), selectionsOfStories(t)) {
		tests := declaredTests(t, s.directories)
		for _, alternative := range alternatives(s.pattern) {
			if !matches(t, tests, alternative) {
				t.Errorf("%s: %s matches no test in %v", s.source, alternative, s.directories)
			}
		}
	}
}

// selection is a regular expression, as for the flag -run, that selects tests of packages.
type selection struct {
	source, pattern string
	directories     []string // of the packages
}

// selectionsOfLab returns the selections of a quick pass of test/lab.
func selectionsOfLab(t *testing.T) []selection {
	t.Helper()
	const source = "test/lab/pass.go"
	values := map[string][]string{}
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, source), nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(node ast.Node) bool {
		if spec, ok := node.(*ast.ValueSpec); ok && len(spec.Values) == 1 {
			values[spec.Names[0].Name] = literals(t, spec.Values[0])
		}
		return true
	})
	for _, name := range []string{"quickTests", "quickStories", "kernelPackages"} {
		if len(values[name]) == 0 {
			t.Fatalf("%s has no %s", source, name)
		}
	}
	return []selection{
		{source, strings.Join(values["quickTests"], ""), values["kernelPackages"]},
		{source, "^TestGuestNode$/" + strings.Join(values["quickStories"], ""), []string{"test/e2e"}},
	}
}

// selectionsOfScripts returns the selections of the Makefile and of scripts that call go test.
func selectionsOfScripts(t *testing.T) (selections []selection) {
	t.Helper()
	for _, s := range []struct {
		source, pattern string // its group is the selection
		count           int
		directories     []string
	}{
		{"Makefile", `'(\$\((?:EACH|REPEATED|LEASING|POOLS|RANDOM)\)[^']*)'`, 8, []string{"test/crash"}},
		{"Makefile", `'([^'\s]*\$\(RATES\))'`, 3, []string{"netdev/classify"}},
		{"Makefile", `'\$\(or \$\(RUN\),(Test[^)]*)\)' -- \./test/controlplane`, 3, []string{"test/controlplane"}},
		{"Makefile", `-bench '([^']*)'`, 2, []string{"test/crash", "test/bench"}},
		{"Makefile", `-run (Test\w+)`, 6, []string{"driver", "conformance"}},
		{"test/bench/addresses.sh", `-bench '?([\w$]+)`, 2, []string{"test/crash", "test/bench"}},
		{"test/bench/bench.sh", `-bench '?([^' ]+)`, 3, []string{"test/crash", "test/bench"}},
		{"test/scale/bench.sh", `-run (Test\w+)`, 2, []string{"test/scale", "test/crash"}},
		{"test/scale/profiles.sh", `-run (Test\w+)`, 1, []string{"test/crash"}},
	} {
		text := read(t, s.source)
		found := regexp.MustCompile(s.pattern).FindAllStringSubmatch(text, -1)
		if len(found) != s.count {
			t.Errorf("%s: found %d texts that match %s, want %d: change this test with the file",
				s.source, len(found), s.pattern, s.count)
		}
		for _, match := range found {
			selections = append(selections, selection{s.source, expand(t, text, match[1]), s.directories})
		}
	}
	return selections
}

var (
	makeDefinition = regexp.MustCompile(`(?m)^([A-Z]+) +:= (.*)$`)
	makeReference  = regexp.MustCompile(`\$\(([A-Z]+)\)`)
)

// expand replaces the variables in a text of a Makefile.
func expand(t *testing.T, makefile, text string) string {
	t.Helper()
	definitions := map[string]string{}
	for _, match := range makeDefinition.FindAllStringSubmatch(makefile, -1) {
		definitions[match[1]] = match[2]
	}
	text = makeReference.ReplaceAllStringFunc(text, func(reference string) string {
		name := makeReference.FindStringSubmatch(reference)[1]
		if definitions[name] == "" {
			t.Errorf("Makefile: %s is not defined", name)
		}
		return definitions[name]
	})
	return strings.ReplaceAll(text, "$$", "$")
}

// selectionsOfStories returns the suites and stories that the scripts of test/e2e name.
func selectionsOfStories(t *testing.T) (selections []selection) {
	t.Helper()
	add := func(source, pattern string) {
		selections = append(selections, selection{source, pattern, []string{"test/e2e"}})
	}
	const source = "test/e2e/run.sh"
	text := read(t, source)
	long := regexp.MustCompile(`\[(Test\w+)\]='([^']*)'`).FindAllStringSubmatch(text, -1)
	first := regexp.MustCompile(`(?s)\nfirst="(.*?)"`).FindStringSubmatch(text)
	if len(long) == 0 || first == nil {
		t.Fatalf("%s has no variables long and first", source)
	}
	for _, match := range long {
		add(source, "^"+match[1]+"$/^("+match[2]+")$")
	}
	for _, suite := range strings.Fields(first[1]) {
		add(source, "^"+suite+"$")
	}
	suites := regexp.MustCompile(`\nsuites="(.*)"`).FindStringSubmatch(read(t, "test/e2e/stories.sh"))
	if suites == nil {
		t.Fatal("test/e2e/stories.sh has no variable suites")
	}
	add("test/e2e/stories.sh", "^("+suites[1]+")$")
	return selections
}

// alternatives returns the regular expressions without | that a regular expression is equivalent to.
func alternatives(pattern string) []string {
	all, _ := divide(pattern)
	return all
}

// divide returns the alternatives up to a parenthesis that closes a group, and what follows it.
func divide(text string) (all []string, rest string) {
	current := []string{""}
	for text != "" {
		length := 1
		switch text[0] {
		case '|':
			all, current, length = append(all, current...), []string{""}, 0
			text = text[1:]
		case ')':
			return append(all, current...), text[1:]
		case '(':
			var group, product []string
			group, text = divide(strings.TrimPrefix(text[1:], "?:"))
			for _, start := range current {
				for _, end := range group {
					product = append(product, start+end)
				}
			}
			current, length = product, 0
		case '[':
			length = strings.IndexByte(text, ']') + 1
		case '\\':
			length = 2
		}
		for i := range current {
			current[i] += text[:length]
		}
		text = text[length:]
	}
	return append(all, current...), ""
}

// matches reports whether a regular expression without | matches a test or, if it has slashes, a name of its subtests.
func matches(t *testing.T, tests map[string][]string, pattern string) bool {
	t.Helper()
	elements := strings.Split(pattern, "/")
	test, err := regexp.Compile(elements[0])
	if err != nil {
		t.Fatal(err)
	}
	for name, subtests := range tests {
		if test.MatchString(name) && !slices.ContainsFunc(elements[1:], func(element string) bool {
			return !matchesName(t, subtests, element)
		}) {
			return true
		}
	}
	return false
}

var number = regexp.MustCompile(`\d+`)

// matchesName reports whether a regular expression matches a name. Names can have the verb %d.
func matchesName(t *testing.T, names []string, pattern string) bool {
	t.Helper()
	element, err := regexp.Compile(pattern)
	if err != nil {
		t.Fatal(err)
	}
	numbers := append(number.FindAllString(pattern, -1), strings.Split("0123456789", "")...)
	return slices.ContainsFunc(names, func(name string) bool {
		return element.MatchString(name) || slices.ContainsFunc(numbers, func(n string) bool {
			return element.MatchString(strings.ReplaceAll(name, "%d", n))
		})
	})
}

// declaredTests returns the tests and benchmarks that packages declare, each with the names that its subtests can have.
func declaredTests(t *testing.T, directories []string) map[string][]string {
	t.Helper()
	tests := map[string][]string{}
	for _, directory := range directories {
		files, err := filepath.Glob(filepath.Join(root, directory, "*_test.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s has %d files with tests: %v", directory, len(files), err)
		}
		for _, file := range files {
			maps.Copy(tests, testsOfFile(t, file))
		}
	}
	return tests
}

// testsOfFile returns the tests and benchmarks of a file. The names of their subtests are the string literals of the
// test and of functions of the file that are not tests, as go test writes names, and as test/e2e does.
func testsOfFile(t *testing.T, file string) map[string][]string {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string][]string{}
	var others []string
	for _, declaration := range parsed.Decls {
		function, ok := declaration.(*ast.FuncDecl)
		if !ok {
			continue
		}
		var names []string
		for _, literal := range literals(t, function) {
			names = append(names, strings.ReplaceAll(literal, " ", "_"), strings.ReplaceAll(literal, " ", "-"))
			names = append(names, stories(t, filepath.Dir(file), literal)...)
		}
		if name := function.Name.Name; strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Benchmark") {
			tests[name] = names
		} else {
			others = append(others, names...)
		}
	}
	for name := range tests {
		tests[name] = append(tests[name], others...)
	}
	return tests
}

// literals returns the string literals of a part of a file.
func literals(t *testing.T, part ast.Node) (values []string) {
	t.Helper()
	ast.Inspect(part, func(node ast.Node) bool {
		if literal, ok := node.(*ast.BasicLit); ok && literal.Kind == token.STRING {
			value, err := strconv.Unquote(literal.Value)
			if err != nil {
				t.Fatal(err)
			}
			values = append(values, value)
		}
		return true
	})
	return values
}

// stories returns the stories below a directory that a literal names.
func stories(t *testing.T, directory, literal string) (names []string) {
	t.Helper()
	for _, field := range strings.Fields(literal) {
		if !strings.HasPrefix(field, "testdata/") {
			continue
		}
		for _, pattern := range []string{field + "/*.txtar", field + ".txtar"} {
			files, err := filepath.Glob(filepath.Join(directory, pattern))
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range files {
				names = append(names, strings.TrimSuffix(filepath.Base(file), ".txtar"))
			}
		}
	}
	return names
}

// TestAlternatives shows how a regular expression is divided, and that names that are wrong match nothing.
func TestAlternatives(t *testing.T) {
	got := alternatives(`^(TestA|TestB_(c|d$))|^TestE$/^[|)]f`)
	want := []string{"^TestA", "^TestB_c", "^TestB_d$", "^TestE$/^[|)]f"}
	if !slices.Equal(got, want) {
		t.Errorf("alternatives: got %q, want %q", got, want)
	}
	tests := map[string][]string{"TestA_b": {"part=%d", "a_word"}}
	for pattern, want := range map[string]bool{
		"^TestA": true, "^TestA$": false, "TestC": false,
		"^TestA/^part=0$": true, "^TestA/^part=[^0]$": true, "^TestA/^part=12$": true, "^TestA/^part=x": false,
		"^TestA/^a_w": true, "^TestA/^a_v": false, "^TestC/^a_w": false, "^TestA/^a_w/^part=1": true,
	} {
		if got := matches(t, tests, pattern); got != want {
			t.Errorf("%s: got %t, want %t", pattern, got, want)
		}
	}
}
