// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// LoadReport reads a Report from YAML. Its Results are empty.
func LoadReport(raw []byte) (r Report, err error) {
	err = yaml.UnmarshalStrict(raw, &r)
	return r, err
}

// Compare returns tables that compare the reports of drivers, as Markdown: the result of
// each profile and feature, and the requirements that are not met.
func Compare(reports []Report) string {
	var b strings.Builder
	b.WriteString("| Driver | Version | On | Date |")
	var names []string
	for _, r := range reports {
		for _, g := range slices.Concat(r.Profiles, r.Features.Supported) {
			if !slices.Contains(names, g.Name) {
				names = append(names, g.Name)
			}
		}
	}
	for _, name := range names {
		fmt.Fprintf(&b, " %s |", name)
	}
	b.WriteString("\n|---|---|---|---|" + strings.Repeat("---|", len(names)) + "\n")
	for _, r := range reports {
		fmt.Fprintf(&b, "| [%s](%s) | %s | %s | %s |", r.Implementation.Project, r.Implementation.URL,
			r.Implementation.Version, r.on(), r.Date)
		for _, name := range names {
			fmt.Fprintf(&b, " %s |", r.cell(name))
		}
		b.WriteString("\n")
	}
	b.WriteString("\n| Driver | On | Level | Requirement | What happened |\n|---|---|---|---|---|\n")
	for _, r := range reports {
		for _, g := range slices.Concat(r.Profiles, r.Features.Supported) {
			for _, e := range g.Failed {
				fmt.Fprintf(&b, "| %s | %s | must | %s | %s |\n", r.Implementation.Project, r.on(), e.ID, escape(e.Message))
			}
			for _, e := range g.Recommendations {
				fmt.Fprintf(&b, "| %s | %s | should | %s | %s |\n", r.Implementation.Project, r.on(), e.ID, escape(e.Message))
			}
		}
	}
	return b.String()
}

// on returns where the driver ran: with a fake API server, or on the node of a cluster.
func (r Report) on() string {
	if r.APIServer == "real" {
		return "cluster"
	}
	return "socket"
}

// cell returns the result of a profile or a feature.
func (r Report) cell(name string) string {
	all := slices.Concat(r.Profiles, r.Features.Supported)
	i := slices.IndexFunc(all, func(g Group) bool { return g.Name == name })
	if i < 0 {
		return "–"
	}
	s := all[i].Statistics
	return fmt.Sprintf("%d passed, %d failed, %d skipped", s.Passed, s.Failed, s.Skipped)
}
