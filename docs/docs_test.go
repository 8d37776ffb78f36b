// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package docs_test checks that the files, anchors, identifiers, make targets, chart
// values, and metrics that the documents cite exist.
package docs_test

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestDocuments_citations(t *testing.T) {
	s := readSource(t, "..")
	documents := s.documents(t)
	if len(documents) < 20 {
		t.Fatalf("found only %d documents: %v", len(documents), documents)
	}
	citations := 0
	for _, document := range documents {
		raw, err := os.ReadFile(filepath.Join(s.root, document))
		if err != nil {
			t.Fatal(err)
		}
		problems, checked := s.check(document, string(raw))
		citations += checked
		for _, problem := range problems {
			t.Errorf("%s: %s", document, problem)
		}
	}
	if citations < 400 {
		t.Errorf("checked only %d citations in %d documents", citations, len(documents))
	}
}

// TestCheck_wrongCitation shows that each check can fail.
func TestCheck_wrongCitation(t *testing.T) {
	s := readSource(t, "..")
	for right, wrong := range map[string]string{
		"[a](glossary.md)":                         "[a](glosary.md)",
		"[a](glossary.md#glossary)":                "[a](glossary.md#nothing)",
		"[a](../README.md)":                        "[a](../../README.md)",
		"# A heading\n[a](#a-heading)":             "# A heading\n[a](#another-heading)",
		"[a][b]\n\n[b]: glossary.md":               "[a][b]\n\n[b]: glosary.md",
		"`docs/glossary.md`":                       "`docs/glosary.md`",
		"`api/v1alpha1/testdata/*.yaml`":           "`api/v1alpha1/testdata/*.yml`",
		"`driver/`":                                "`drivers/`",
		"`go.mod` in `cmd`, `driver.go`":           "`no-such-file.go`",
		"`driver.Options`":                         "`driver.NoSuchType`",
		"`driver.Options.DriverName`":              "`driver.Options.NoSuchField`",
		"`Driver.PrepareResourceClaims`":           "`Driver.NoSuchMethod`",
		"`time.Duration`":                          "`nosuchpackage.Thing`",
		"`TestCheck_wrongCitation`":                "`TestNoSuchTest`",
		"`go test -run TestCheck_wrongCitation .`": "`go test -run TestNoSuchTest .`",
		"`make demo`":                              "`make no-such-target`",
		"```sh\nmake demo # a\n```":                "```sh\nmake no-such-target # a\n```",
		"```console\nmake demo\n```":               "```console\nmake no-such-target\n```",
		"```\n$ make demo\n```":                    "```\n$ make no-such-target\n```",
		"1. a\n\n   ```sh\n   make demo\n   ```":   "1. a\n\n   ```sh\n   make no-such-target\n   ```",
		"    make demo":                            "    make no-such-target",
		"    make bin/lab":                         "    make bin/no-such-program",
		"```sh\nmake e2e RUN=\"a b\"\n```":         "```sh\nmake lab RUN=\"a b\" NOSUCHVARIABLE=c\n```",
		"```mermaid\na[driver/watch.go]\n```":      "```mermaid\na[driver/no-such-file.go]\n```",
		"`make e2e RUN=status`":                    "`make e2e NOSUCHVARIABLE=status`",
		"`plugin.verbosity`":                       "`plugin.noSuchValue`",
		"`config.networks`":                        "`config.noSuchValue`",
		"`--hook-dir`":                             "`--no-such-flag`",
		"`NotReferenced`":                          "`NoSuchReason`",
		"`interfaceName`":                          "`noSuchField`",
		"`dra_shared_device_healthy`":              "`dra_shared_no_such_metric`",
		"`dra-shared.dev/absent`":                  "`dra-shared.dev/no-such-taint`",
	} {
		if problems, checked := s.check("docs/test.md", right); len(problems) > 0 || checked == 0 {
			t.Errorf("%s: got %d citations with problems %v, want none", right, checked, problems)
		}
		if problems, _ := s.check("docs/test.md", wrong); len(problems) == 0 {
			t.Errorf("%s: got no problem", wrong)
		}
	}
	renames := "| `gone.go` | `driver.go` |\n| `kept.go` | `no-such-file.go` |"
	if problems, _ := s.check(renamesFile, renames); len(problems) != 1 {
		t.Errorf("table of renames: got %v, want a problem with no-such-file.go only", problems)
	}
}

// scaleNotes is a part of docs/dev/scale.md.
const scaleNotes = "test/controlplane/scale-notes.md"

// documents returns all Markdown files of the repository.
func (s *source) documents(t *testing.T) (documents []string) {
	t.Helper()
	for file := range s.files {
		if path.Ext(file) == ".md" && file != scaleNotes {
			documents = append(documents, file)
		}
	}
	slices.Sort(documents)
	return documents
}

// renamesFile cites names that no longer exist in all cells but the last of a row.
const renamesFile = "docs/dev/renames.md"

var (
	fence           = regexp.MustCompile("(?ms)^ *```(\\w*)\n(.*?)^ *```")
	indentedCommand = regexp.MustCompile(`(?m)^    make .*$`)
	codeSpan        = regexp.MustCompile("`([^`\n]+)`")
	link            = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	reference       = regexp.MustCompile(`(?m)^\[[^\]]+\]:\s*(\S+)`)
	diagramPath     = regexp.MustCompile(`[\w.-]+(?:/[\w.-]+)+`)
)

// check returns what is wrong with the citations of a document, and their number.
func (s *source) check(document, text string) (problems []string, checked int) {
	add := func(citation string, problem string, ok bool) {
		if !ok {
			return // not a citation that can be checked
		}
		checked++
		if problem != "" {
			problems = append(problems, fmt.Sprintf("%q: %s", citation, problem))
		}
	}
	for _, block := range fence.FindAllStringSubmatch(text, -1) {
		for _, problem := range s.checkBlock(block[1], block[2]) {
			add(problem.citation, problem.text, true)
		}
	}
	prose := fence.ReplaceAllString(text, "")
	for _, line := range indentedCommand.FindAllString(prose, -1) {
		for _, problem := range s.checkCommand(line) {
			add(problem.citation, problem.text, true)
		}
	}
	if document == renamesFile {
		prose = lastCells(prose)
	}
	withoutCode := codeSpan.ReplaceAllString(prose, "code")
	for _, pattern := range []*regexp.Regexp{link, reference} {
		for _, m := range pattern.FindAllStringSubmatch(withoutCode, -1) {
			problem, ok := s.checkLink(document, text, m[1])
			add(m[1], problem, ok)
		}
	}
	for _, m := range codeSpan.FindAllStringSubmatch(prose, -1) {
		problem, ok := s.checkSpan(m[1])
		add(m[1], problem, ok)
		for _, problem := range s.checkCommand(m[1]) {
			add(problem.citation, problem.text, true)
		}
	}
	return problems, checked
}

// lastCells returns the last cell of each row of a table.
func lastCells(text string) string {
	var cells []string
	for line := range strings.Lines(text) {
		parts := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		cells = append(cells, parts[len(parts)-1])
	}
	return strings.Join(cells, "\n")
}

// checkLink checks a relative link and its anchor.
func (s *source) checkLink(document, text, target string) (problem string, ok bool) {
	if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
		return "", false
	}
	file, anchor, _ := strings.Cut(target, "#")
	if file != "" {
		file = path.Join(path.Dir(document), file)
		if !s.files[file] {
			return "the file does not exist", true
		}
	}
	if anchor == "" {
		return "", true
	}
	if file != "" {
		raw, err := os.ReadFile(filepath.Join(s.root, file))
		if err != nil {
			return err.Error(), true
		}
		text = string(raw)
	}
	if !slices.Contains(anchors(text), anchor) {
		return "there is no such heading", true
	}
	return "", true
}

var (
	heading     = regexp.MustCompile(`(?m)^#+ +(.+)$`)
	punctuation = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
	headingLink = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
)

// anchors returns the anchors of a document's headings, as GitHub forms them.
func anchors(text string) (all []string) {
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		title := headingLink.ReplaceAllString(strings.ReplaceAll(m[1], "`", ""), "$1")
		all = append(all, strings.ReplaceAll(punctuation.ReplaceAllString(strings.ToLower(title), ""), " ", "-"))
	}
	return all
}

// foreign are names of the kernel, Kubernetes, and other projects, with the reason why
// they are not in this repository.
var foreign = []struct{ reason, names string }{
	{"feature gates of Kubernetes", `^(DRA|Workload|Generic)[A-Z]\w*$`},
	{"identifiers of the scheduler and of KEPs", `^(GatherAllocatedState|runPreEnqueuePlugins|podGroupResourceClaim)$`},
	{"identifiers of the scheduler in reports", `^(AllocationTimestamp|bindClaim)$`},
	{"fields of Kubernetes", `^(hostUsers|hostPath|matchConditions|allocatedResourcesStatus|nominatedNodeName)$`},
	{"fields of Kubernetes", `^(ttlSecondsAfterFinished|schedulingGroup|dnsConfig)$`},
	{"fields of Kubernetes", `^(schedulerName|allowMultipleAllocations)$`},
	{"states of pods that kubectl shows",
		`^(ContainerCreating|CrashLoopBackOff|CreateContainerError|SchedulingGated|StartError)$`},
	{"events of Kubernetes", `^Failed(Create|Scheduling|ResourceClaimCreation|PrepareDynamicResources)$`},
	{"attributes of Kubernetes", `^numaNode$`},
	{"attributes that the plugin names after capacities", `^granted[A-Z]\w*$`},
	{"flags of Helm and of all programs", `^--(no-hooks|reuse-values|help|subresource)\b`},
	{"flags of k8s.io/component-base", `^--(v|vmodule|logging-format|log-[a-z-]+)\b`},
	{"words of the OCI runtime specification", `^createRuntime$`},
	{"tags of modules", `^conformance/v\d`},
}

func isForeign(name string) bool {
	return slices.ContainsFunc(foreign, func(f struct{ reason, names string }) bool {
		return regexp.MustCompile(f.names).MatchString(name)
	})
}

// chartSections are the top-level values of the chart.
const chartSections = `(?:config|plugin|controller|image|deviceClasses|admissionPolicy|uninstallCheck)`

var (
	pathLike     = regexp.MustCompile(`^[\w.*?\[\]-]+(/[\w.*?\[\]-]+)*/?$`)
	fileName     = regexp.MustCompile(`^[\w.-]+\.(go|md|sh|txtar)$`)
	qualified    = regexp.MustCompile(`^([a-z][a-z0-9]*)\.([A-Z]\w*)(?:\.(\w+))?(?:\(\))?$`)
	typeMember   = regexp.MustCompile(`^([A-Z]\w*)\.([A-Z]\w*)(?:\(\))?$`)
	chartValue   = regexp.MustCompile(`^(` + chartSections + `(?:\.[a-zA-Z]+)+)(?::.*)?$`)
	flagName     = regexp.MustCompile(`^--([a-z][a-z0-9-]*)`)
	camelCase    = regexp.MustCompile(`^([A-Z][a-z0-9]+|[a-z]+)([A-Z][a-zA-Z0-9]*)+$`)
	metricName   = regexp.MustCompile(`^dra_shared_([a-z_]+)`)
	qualifiedKey = regexp.MustCompile(`^(?:[a-z]+\.)*dra-shared\.dev/([a-z][a-z-]*)(?:: .*)?$`)
)

// checkSpan checks a code span that consists of one name. It reports false if the span
// is not a name that can be checked.
func (s *source) checkSpan(span string) (problem string, ok bool) {
	exists := func(found bool, problem string) (string, bool) {
		if found {
			return "", true
		}
		return problem, true
	}
	if isForeign(span) {
		return "", false
	}
	if m := qualifiedKey.FindStringSubmatch(span); m != nil {
		return exists(s.isKey(m[1]), "no Go code defines this annotation, label, or taint")
	}
	if m := chartValue.FindStringSubmatch(span); m != nil {
		return exists(s.values[m[1]], "the chart's values.schema.json does not have this value")
	}
	if fileName.MatchString(span) {
		return exists(s.names[span], "there is no file of this name")
	}
	if pathLike.MatchString(span) && s.isRepositoryPath(span) {
		return exists(s.matches(strings.TrimSuffix(span, "/")), "the path does not exist")
	}
	if m := qualified.FindStringSubmatch(span); m != nil {
		return exists(s.hasIdentifier(m[1], m[2], m[3]), "there is no such identifier")
	}
	if m := typeMember.FindStringSubmatch(span); m != nil {
		return exists(s.members[m[1]][m[2]], "there is no such method or field")
	}
	if m := flagName.FindStringSubmatch(span); m != nil {
		return exists(s.literals[m[1]], "no program has this flag")
	}
	if m := metricName.FindStringSubmatch(span); m != nil {
		return exists(s.isMetric(m[1]), "there is no such metric")
	}
	if testName.MatchString(span) {
		return "", false // checkCommand checks it
	}
	if camelCase.MatchString(span) {
		return exists(s.words[span], "the name is not in the source")
	}
	return "", false
}

// isRepositoryPath reports whether a path is meant to be in the repository: its first
// element is, or it is a directory by its trailing slash.
func (s *source) isRepositoryPath(span string) bool {
	first, _, nested := strings.Cut(span, "/")
	return nested && (s.topLevel()[first] || strings.HasSuffix(span, "/"))
}

func (s *source) matches(pattern string) bool {
	if s.files[pattern] {
		return true
	}
	for file := range s.files {
		if ok, err := path.Match(pattern, file); ok && err == nil {
			return true
		}
	}
	return false
}

// hasIdentifier reports whether a package has an identifier, with a member if that is
// not empty. Packages of other modules that the code imports are not checked.
func (s *source) hasIdentifier(pkg, name, member string) bool {
	identifiers, isInternal := s.packages[pkg]
	if !isInternal {
		return s.imports[pkg]
	}
	return identifiers[name] && (member == "" || s.members[name][member])
}

// isKey reports whether Go code defines the name of an annotation, a label, or a taint.
func (s *source) isKey(name string) bool {
	for literal := range s.literals {
		if literal == name || strings.HasSuffix(literal, "/"+name) {
			return true
		}
	}
	return false
}

// isMetric reports whether Go code defines a metric, possibly as parts of its name.
func (s *source) isMetric(name string) bool {
	for _, suffix := range []string{"", "_bucket", "_count", "_sum"} {
		base := strings.TrimSuffix(name, suffix)
		for literal := range s.literals {
			if literal == base || literal == "dra_shared_"+base {
				return true
			}
			if prefix, rest, ok := strings.Cut(base, "_"); ok && literal == rest && s.literals[prefix] {
				return true
			}
		}
	}
	return false
}

type commandProblem struct{ citation, text string }

// checkBlock checks the paths in a diagram, and the commands in blocks that are a program's
// input or output. It returns an entry for each citation, with an empty text if it is right.
func (s *source) checkBlock(language, text string) (all []commandProblem) {
	switch language {
	case "mermaid":
		for _, file := range diagramPath.FindAllString(text, -1) {
			if !s.isRepositoryPath(file) {
				continue
			}
			problem := commandProblem{citation: file}
			if !s.matches(file) {
				problem.text = "the path does not exist"
			}
			all = append(all, problem)
		}
	case "sh", "console", "text", "":
		all = s.checkCommand(text)
	}
	return all
}

var (
	makeCommand  = regexp.MustCompile(`\bmake((?: [a-zA-Z][\w/-]*(?:=(?:"[^"]*"|\S+))?)+)`)
	makeArgument = regexp.MustCompile(`[a-zA-Z][\w/-]*(?:=(?:"[^"]*"|\S+))?`)
	testName     = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w*`)
)

// isProgram reports whether the Makefile builds a program into a path below bin.
func (s *source) isProgram(file string) bool {
	program, ok := strings.CutPrefix(file, "bin/")
	if peer, isPeer := strings.CutPrefix(program, "peers/"); isPeer {
		return ok && s.files["reports/drivers/"+peer]
	}
	return ok && slices.ContainsFunc([]string{"cmd/", "test/", "conformance/cmd/"}, func(directory string) bool {
		return s.files[directory+program]
	})
}

// checkCommand checks the make targets and variables, and the tests, in a command. It
// returns an entry for each citation, with an empty text if it is right.
func (s *source) checkCommand(command string) (all []commandProblem) {
	for _, m := range makeCommand.FindAllStringSubmatch(command, -1) {
		for _, argument := range makeArgument.FindAllString(m[1], -1) {
			name, _, assignment := strings.Cut(argument, "=")
			problem := commandProblem{citation: "make " + argument}
			if assignment && !s.variables[name] {
				problem.text = "the Makefile does not use this variable"
			}
			if !assignment && !s.targets[name] && !s.isProgram(name) {
				problem.text = "the Makefile does not have this target"
			}
			all = append(all, problem)
		}
	}
	for _, name := range testName.FindAllString(command, -1) {
		problem := commandProblem{citation: name, text: "there is no such test"}
		for _, identifiers := range s.packages {
			if identifiers[name] {
				problem.text = ""
			}
		}
		all = append(all, problem)
	}
	return all
}
