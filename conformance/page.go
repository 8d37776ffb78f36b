// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	_ "embed"
	"fmt"
	"strings"
)

//go:embed report.schema.json
var reportSchema string

// Schema returns the JSON schema of reports.
func Schema() string { return reportSchema }

// Page returns the documentation of all requirements, as Markdown without a title.
func Page() (string, error) {
	all, err := Requirements()
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(`
What the conformance suite tests, with the sentence that each requirement rests on. The level is
must or should. The way says what a test needs: the driver's socket and an API server, the objects
that the driver writes (api), control of its process, a kubelet, or a network.
[conformance.md](../conformance.md) explains how to run the suite, and how a requirement is added
or disputed.
`)
	group := ""
	for _, r := range all {
		if r.Group() != group {
			group = r.Group()
			title := "Profile " + group
			if r.Feature != "" {
				title = "Feature " + group
			}
			fmt.Fprintf(&b, "\n## %s\n", title)
		}
		state := ""
		if !r.Implemented() {
			state = "; no case yet"
		}
		fmt.Fprintf(&b, "\n**%s** (%s, %s%s): %s.\n", r.ID, r.Level, r.Way, state, escape(r.Text))
		if r.Source != nil {
			fmt.Fprintf(&b, "Source, %s of `%s`: “%s”\n", r.Source.Version(), r.Source.File, escape(r.Source.Quote))
		} else {
			fmt.Fprintf(&b, "Derived from: %s.\n", escape(r.Reference))
		}
		if r.Note != "" {
			fmt.Fprintf(&b, "Decision: %s\n", escape(r.Note))
		}
	}
	return b.String(), nil
}

// escape protects text from Markdown.
func escape(s string) string {
	return strings.NewReplacer("`", "", "<", "\\<", "|", "\\|", "*", "\\*", "_", "\\_", "[", "\\[").Replace(s)
}
