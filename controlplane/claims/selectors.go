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

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// anySelectsFabric reports whether one of the selectors selects fabrics of the driver.
func anySelectsFabric(selectors []resourceapi.DeviceSelector, driver string) bool {
	return anySelects(selectors, driver, v1alpha1.DeviceKindFabric, v1alpha1.AttributeFabric)
}

// AnySelectsNIC reports whether one of the selectors selects NICs of the driver by their kind. The DriverConfig may
// give fabrics the attributes of NICs.
func AnySelectsNIC(selectors []resourceapi.DeviceSelector, driver string) bool {
	return anySelects(selectors, driver, v1alpha1.DeviceKindNIC, "")
}

func anySelects(selectors []resourceapi.DeviceSelector, driver, kind, own string) bool {
	return slices.ContainsFunc(selectors, func(s resourceapi.DeviceSelector) bool {
		return s.CEL != nil && selectsKind(s.CEL.Expression, driver, kind, own)
	})
}

// AnySelectsDriver reports whether one of the selectors selects devices of the driver: it has the name of the driver in
// a comparison other than one that excludes it. Like selectsKind, it examines the tokens.
func AnySelectsDriver(selectors []resourceapi.DeviceSelector, driver string) bool {
	const isDriver = `device \. driver = = `
	name := regexp.QuoteMeta(strconv.Quote(driver))
	matcher := regexp.MustCompile(`(?P<not>! = |! \( (?:` + isDriver + `)?)?` + name + ` (?P<not>! = )?`)
	return slices.ContainsFunc(selectors, func(s resourceapi.DeviceSelector) bool {
		if s.CEL == nil || !strings.Contains(s.CEL.Expression, driver) {
			return false
		}
		return slices.ContainsFunc(matcher.FindAllStringSubmatch(normalize(s.CEL.Expression), -1), func(m []string) bool {
			return m[1] == "" && m[2] == ""
		})
	})
}

// selectsKind reports whether a CEL expression selects the driver's devices of a kind: it compares the attribute kind
// with the kind, or uses the attribute own, which only devices of that kind have; own is "" if there is no such
// attribute. It examines the tokens of the expression and does not evaluate it, so it does not recognize attributes
// that the expression gives another name with cel.bind.
func selectsKind(expression, driver, kind, own string) bool {
	if !strings.Contains(expression, kind) && (own == "" || !strings.Contains(expression, own)) {
		return false // the usual case
	}
	tokens := normalize(expression)
	all := `device \. attributes \[ ` + regexp.QuoteMeta(strconv.Quote(driver)) + ` \] `
	attribute := func(name string) string { return all + fmt.Sprintf(`(?:\. %[1]s|\[ "%[1]s" \]) `, name) }
	patterns := []string{
		attribute(v1alpha1.AttributeKind) + `(?:\. orValue \( "[^"]*" \) )?(?:= =|in \[ [^\]]*) ?"` + kind + `" `,
		`"` + kind + `" = = ` + attribute(v1alpha1.AttributeKind),
	}
	if own != "" {
		// "not" matches what makes the expression select other devices.
		const not = `(?P<not>! (?:\( )?(?:has \( )?)?`
		patterns = append(patterns, not+attribute(own), not+`"`+own+`" in `+all+`(?:[^.\[]|$)`)
	}
	for _, pattern := range patterns {
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
