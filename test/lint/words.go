// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"path"
	"regexp"
	"strings"
)

// A wordRule rejects a wording and says what to write instead.
type wordRule struct {
	pattern *regexp.Regexp
	instead string
	// except matches longer wordings that contain the pattern and are correct.
	except *regexp.Regexp
}

// rule compiles a wordRule. Patterns ignore case. A space in a pattern stands
// for any white space, which includes the end of a line and the mark of a
// comment on the next line (see joinLines).
func rule(pattern, instead, except string) wordRule {
	r := wordRule{pattern: regexp.MustCompile(`(?i)` + pattern), instead: instead}
	if except != "" {
		r.except = regexp.MustCompile(`(?i)` + except)
	}
	return r
}

// wordRules is the list of rejected wordings. Add a wording only if nearly all
// its uses are wrong; a correct use can carry an exception (see exception).
var wordRules = []wordRule{
	rule(`\b(someone|everyone|everybody|anybody)\b`, `name the actor, such as "another program" or "all users"`, ``),
	rule(`\bis away\b`, `"is unavailable"`, ``),
	rule(`\bstill there\b`, `"still exists"`, ``),
	rule(`\btold from\b`, `"distinguished from"`, ``),
	rule(`nobody`, `name the actor, or "no pod", "no process"`, ``),
	rule(`somebody`, `name the actor, such as "another process"`, ``),
	rule(`who(m)?ever\b`, `name the actor`, ``),
	rule(`\banew\b|[a-z]Anew\b`, `"again", or "from the beginning"`, ``),
	rule(`\b(tells?|told|says?) whether\b`, `"reports whether" or "determine whether"`, ``),
	rule(`\b(is|are|was|were)( [a-z]+ly)? no [a-z]+`, `"is not a", or "there is no"`,
		`\bthere (is|are|was|were)( [a-z]+ly)? no\b|`+
			`\b(is|are|was|were)( [a-z]+ly)? no (longer|more|less|fewer|later|earlier|newer|older|larger)\b`),
	rule(`\bwhat is not (its|theirs)\b`, `a noun, such as "resources of other programs"`, ``),
	rule(`\bours\b`, `name the owner, such as "the controller's"`, ``),
	rule(`\bbelongs? to no\b|\bbelonging to no\b`, `"is not owned by a", or "is orphaned"`, ``),
	rule(`\bof its own accord\b`, `"without a request", or name the cause`, ``),
	rule(`\b(goes|go|went) with\b`, `"belongs to", "is removed with", or "accompanies"`, ``),
	rule(`\b(to be|is|are|it) had\b`, `"available"`, `\bit had\b`),
	rule(`\b(told|tells?) of\b`, `"reported", or "notified about"`, ``),
	rule(`\bat the (most|least)\b`, `"at most" or "at least"`, ``),
	rule(`\balso (if|after)\b`, `"even if", "even after", or "and after"`, ``),
	rule(`\bbeside\b`, `"besides", "next to", or "in addition to"`, `[a-z]-beside-[a-z]`),
	rule(`\bas (it|they) (was|were)\b`, `"unchanged", or "in its previous state"`, ``),
	rule(`\b(is|are) of (the|a|an|this|its|our|one|another)\b`, `name the relation: "belongs to", "comes from"`,
		`\b(is|are) of (the|a) (form|same|type|kind|wrong)\b`),
	rule(`\b(is|are) (that|those) of\b`, `name the noun, or use a possessive`, ``),
	rule(`\bwhatever (is|was|has|had|comes|stays|remains|holds|else)\b`, `a noun`, ``),
	rule(`\b(which|that|what) is there\b|\bwhat there is\b`, `"existing", or a noun`, ``),
	rule(`\basked for again\b`, `"requested again"`, ``),
	rule(`\b(cannot|could not|can) be told\b`, `"cannot be determined"`, ``),
	rule(`\bwhat is left( of)?\b`, `"the rest of", or "the remaining"`, ``),
	rule(`\b(is|are) content\b`, `name the condition that is met`, ``),
	rule(`\bknows? (nothing|no)\b`, `"does not depend on", or "does not support"`, ``),
	rule(`\b(kubelet|scheduler|plugin|controller|hook|kernel|chart|cluster|driver|suite|server|it) wants\b`,
		`"needs", "requires", or "requests"`, ``),

	// American spelling.
	rule(`(neighbo|behavio|colo|favo|hono|labo)ur(s|ed|ing|ite)?\b`, `American spelling: "or"`, ``),
	rule(`\b(author|final|initial|maxim|minim|normal|optim|organ|recogn|serial|summar|util)is(e|es|ed|ing|ation)\b`,
		`American spelling: "ize"`, ``),
	rule(`\banalys(e|ed|es|ing)\b`, `American spelling: "analyze"`, `\banalyses\b`),
	rule(`\b(label|cancel|model|signal|travel|channel)l(ed|ing)\b`, `American spelling: one "l"`, ``),
	rule(`\blicences?\b`, `American spelling: "license"`, ``),
	rule(`\b(whilst|amongst)\b`, `"while" or "among"`, ``),
}

// exception is the mark of a correct use: the line contains the mark, and after
// it the reason. In YAML: "# lint-words: quoted from the kubelet".
var exception = regexp.MustCompile(`lint-words:(.*)`)

// minReason is the length of the shortest text that counts as a reason.
const minReason = 10

// wordsExclude matches files that are not checked, for these reasons: the rules
// themselves, old names, third-party text, checksums, and generated data, such as the
// conformance suite's reports. The chart's CRDs repeat doc comments of api/, which are checked.
var wordsExclude = regexp.MustCompile(`^test/lint/|^docs/dev/(renames\.md|measured/)|^reports/[0-9]|` +
	`(^|/)(LICENSE|go\.(mod|sum))$|/templates/[a-z]+\.dra-shared\.dev_[a-z]+\.yaml$`)

// testInput matches files below testdata that are prose or scripts of this project;
// other files there are input and golden data of tests.
var testInput = regexp.MustCompile(`\.(txtar|md)$`)

// checkWords returns the rejected wordings in a text file.
func checkWords(name string, content []byte) []finding {
	if wordsExclude.MatchString(name) || generated(content) || bytes.IndexByte(content, 0) >= 0 {
		return nil
	}
	if strings.Contains("/"+path.Dir(name)+"/", "/testdata/") && !testInput.MatchString(name) {
		return nil
	}
	text, lineOf := joinLines(content)
	lines := strings.Split(string(content), "\n")
	var findings []finding
	for _, r := range wordRules {
		var correct [][]int
		if r.except != nil {
			correct = r.except.FindAllStringIndex(text, -1)
		}
		for _, at := range r.pattern.FindAllStringIndex(text, -1) {
			line := lineOf[at[0]]
			if overlaps(correct, at) || exempt(lines, line, lineOf[at[1]-1]) {
				continue
			}
			findings = append(findings, finding{name, line, fmt.Sprintf("%q; instead: %s", text[at[0]:at[1]], r.instead)})
		}
	}
	for i, line := range lines {
		if m := exception.FindStringSubmatch(line); m != nil && !hasReason(m[1]) {
			findings = append(findings, finding{name, i + 1, "lint-words: write the reason after the colon"})
		}
	}
	return findings
}

// commentLine matches the end of a line, and the white space and comment mark
// that begin the next one.
var commentLine = regexp.MustCompile(`[ \t]*\r?\n[ \t]*(//+|#+|\*+|>)?[ \t]*`)

// joinLines returns the text with each line break replaced by one space, so rules match wordings that continue on the
// next line. lineOf holds the line number of each byte.
func joinLines(content []byte) (text string, lineOf []int) {
	var joined strings.Builder
	line, from := 1, 0
	add := func(s []byte) {
		joined.Write(s)
		for range s {
			lineOf = append(lineOf, line)
		}
	}
	for _, at := range commentLine.FindAllIndex(content, -1) {
		add(content[from:at[0]])
		add([]byte(" "))
		line += bytes.Count(content[at[0]:at[1]], []byte("\n"))
		from = at[1]
	}
	add(content[from:])
	return joined.String(), lineOf
}

// overlaps reports whether one of the ranges shares bytes with at.
func overlaps(ranges [][]int, at []int) bool {
	for _, r := range ranges {
		if r[0] < at[1] && at[0] < r[1] {
			return true
		}
	}
	return false
}

// exempt reports whether a line from first to last carries an exception with a
// reason.
func exempt(lines []string, first, last int) bool {
	for _, line := range lines[first-1 : last] {
		if m := exception.FindStringSubmatch(line); m != nil && hasReason(m[1]) {
			return true
		}
	}
	return false
}

// hasReason reports whether the text after an exception's mark is a reason.
func hasReason(text string) bool {
	return len(strings.Trim(text, " \t*/->")) >= minReason
}
