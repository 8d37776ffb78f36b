// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/scanner"

	resourceapi "k8s.io/api/resource/v1"

	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// anySelectsFabric reports whether one of the selectors selects fabrics of the driver.
func anySelectsFabric(selectors []resourceapi.DeviceSelector, driver string) bool {
	return slices.ContainsFunc(selectors, func(s resourceapi.DeviceSelector) bool {
		return s.CEL != nil && selectsFabric(s.CEL.Expression, driver)
	})
}

// selectsFabric reports whether a CEL expression for devices selects fabrics of the driver: it compares the
// attribute kind with "fabric", or uses the attribute fabric, which only fabrics have. It examines the tokens of the
// expression and does not evaluate it, so it does not recognize attributes to which the expression gives another
// name with cel.bind.
func selectsFabric(expression, driver string) bool {
	if !strings.Contains(expression, params.DeviceKindFabric) {
		return false // the usual case
	}
	tokens := normalize(expression)
	const fabric = params.DeviceKindFabric
	all := `device \. attributes \[ ` + regexp.QuoteMeta(strconv.Quote(driver)) + ` \] `
	attribute := func(name string) string { return all + fmt.Sprintf(`(?:\. %[1]s|\[ "%[1]s" \]) `, name) }
	// "not" matches what makes the expression select other devices.
	const not = `(?P<not>! (?:\( )?(?:has \( )?)?`
	for _, pattern := range []string{
		attribute(params.AttributeKind) + `(?:\. orValue \( "[^"]*" \) )?(?:= =|in \[ [^\]]*) ?"` + fabric + `" `,
		`"` + fabric + `" = = ` + attribute(params.AttributeKind),
		not + attribute(params.AttributeFabric),
		not + `"` + fabric + `" in ` + all + `(?:[^.\[]|$)`,
	} {
		matcher := regexp.MustCompile(pattern)
		for _, match := range matcher.FindAllStringSubmatch(tokens, -1) {
			if i := matcher.SubexpIndex("not"); i < 0 || match[i] == "" {
				return true
			}
		}
	}
	return false
}

// normalize returns the tokens of a CEL expression, each followed by a space, with double quotes around strings, and
// without comments and the marks of optional fields. Go's scanner recognizes the tokens of CEL that matter here.
func normalize(expression string) string {
	var s scanner.Scanner
	s.Init(strings.NewReader(expression))
	s.Mode = scanner.ScanIdents | scanner.ScanStrings | scanner.ScanChars | scanner.ScanComments | scanner.SkipComments
	s.Error = func(*scanner.Scanner, string) {} // 'a string' is not a character, but one token
	var tokens strings.Builder
	for token := s.Scan(); token != scanner.EOF; token = s.Scan() {
		text := s.TokenText()
		switch token {
		case '?':
			continue
		case scanner.String, scanner.Char:
			text = strconv.Quote(strings.Trim(text, string(text[0])))
		}
		tokens.WriteString(text + " ")
	}
	return tokens.String()
}
