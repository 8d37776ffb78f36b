// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Packages of the API.
const (
	parametersPath = "api/v1alpha1"
	configPath     = "api/config/v1alpha1"
	schedulingPath = "api/scheduling/v1beta1"
	networkPath    = "api/network/v1alpha1"
)

func parametersPage(root string) (string, error) {
	return typesPage(root, parametersPath, "dra-shared.dev/v1alpha1", "NetworkAttachment", "AcceleratorShare")
}

func configPage(root string) (string, error) {
	return typesPage(root, configPath, "config.dra-shared.dev/v1alpha1", "DriverConfig")
}

func podGroupPage(root string) (string, error) {
	body, err := typesPage(root, schedulingPath, "scheduling.dra-shared.dev/v1beta1", "PodGroup")
	if err != nil {
		return "", err
	}
	conditions, err := constantsPage(root, schedulingPath, "conditions.go")
	if err != nil {
		return "", err
	}
	jobs, err := typesPage(root, schedulingPath, "", "ListedClaim")
	return body + conditions + jobs, err
}

func addressPoolPage(root string) (string, error) {
	body, err := typesPage(root, networkPath, "network.dra-shared.dev/v1alpha1", "AddressPool", "AddressBlock")
	if err != nil {
		return "", err
	}
	conditions, err := constantsPage(root, networkPath, "conditions.go")
	return body + conditions, err
}

func statusPage(root string) (string, error) {
	var m markdown
	m.paragraph("The driver writes one element of `status.devices` per share into a ResourceClaim. " +
		"Its field `data` holds one of the kinds below. Consumers must check `apiVersion` and `kind` before they " +
		"read other fields.")
	data, err := typesPage(root, parametersPath, "dra-shared.dev/v1alpha1",
		"NetworkStatus", "NetworkStatusSummary", "FabricStatusSummary")
	if err != nil {
		return "", err
	}
	conditions, err := constantsPage(root, parametersPath, "conditions.go")
	return m.String() + data + conditions, err
}

func namesPage(root string) (string, error) {
	names, err := constantsPage(root, parametersPath, "names.go")
	if err != nil {
		return "", err
	}
	labels, err := constantsPage(root, parametersPath, "metrics.go")
	if err != nil {
		return "", err
	}
	scheduling, err := constantsPage(root, schedulingPath, "names.go")
	if err != nil {
		return "", err
	}
	membership, err := typesPage(root, parametersPath, "dra-shared.dev/v1alpha1", "FabricMembership")
	return names + labels + scheduling + membership, err
}

// typesPage describes kinds, or other types if apiVersion is empty, and the types that they refer to.
func typesPage(root, path, apiVersion string, kinds ...string) (string, error) {
	s, err := readSource(root, path)
	if err != nil {
		return "", err
	}
	var m markdown
	described := map[string]bool{}
	for _, kind := range kinds {
		m.heading(2, kind)
		m.paragraph(s.userText(s.docs[kind]))
		if apiVersion != "" {
			m.item("`apiVersion` (string, required)", code(apiVersion)+".")
			m.item("`kind` (string, required)", code(kind)+".")
		}
		if err := s.describeFields(&m, kind, described); err != nil {
			return "", err
		}
	}
	return m.String(), nil
}

// describeFields lists the fields of a type, followed by sections for the types that
// they refer to.
func (s *source) describeFields(m *markdown, typeName string, described map[string]bool) error {
	fields, err := s.fields(typeName)
	if err != nil {
		return err
	}
	var structures []string
	for _, f := range fields {
		qualifiers := f.kind
		if f.required {
			qualifiers += ", required"
		}
		text := s.userText(f.doc)
		switch {
		case f.refers == "":
		case s.isEnum(f.refers):
			values, err := s.enumText(f.refers)
			if err != nil {
				return err
			}
			text += "\n\n" + values
		default:
			qualifiers = strings.Replace(qualifiers, f.refers, fmt.Sprintf("[%s](#%s)", f.refers, strings.ToLower(f.refers)), 1)
			if !described[f.refers] && !slices.Contains(structures, f.refers) {
				structures = append(structures, f.refers)
			}
		}
		m.item(fmt.Sprintf("%s (%s)", code(f.name), qualifiers), text)
	}
	for _, name := range structures {
		if described[name] {
			continue
		}
		described[name] = true
		m.heading(3, name)
		m.paragraph(s.userText(s.docs[name]))
		if err := s.describeFields(m, name, described); err != nil {
			return err
		}
	}
	return nil
}

// enumText lists the values of a string type.
func (s *source) enumText(typeName string) (string, error) {
	var texts []string
	for _, c := range s.enums[typeName] {
		_, text, err := splitComment(c.doc, c.name)
		if err != nil {
			return "", fmt.Errorf("%s: %w", s.path, err)
		}
		texts = append(texts, code(c.value)+": "+s.userText(text))
	}
	return strings.Join(texts, "\n\n"), nil
}

var goIdentifier = regexp.MustCompile(`\b[A-Z][a-z]+[A-Z]\w*\b`)

// userText formats a comment for users: the names of constants become their values.
func (s *source) userText(doc string) string {
	return codify(goIdentifier.ReplaceAllStringFunc(doc, func(name string) string {
		if value, ok := s.values[name]; ok {
			return code(value)
		}
		return name
	}))
}

// constantsPage describes the constants of a file, one section per group.
func constantsPage(root, path, file string) (string, error) {
	s, err := readSource(root, path)
	if err != nil {
		return "", err
	}
	groups, err := s.groups(file)
	if err != nil {
		return "", err
	}
	var m markdown
	for _, g := range groups {
		if g.doc != "" {
			title, text := splitSentence(g.doc)
			m.heading(2, codify(title))
			m.paragraph(s.userText(text))
		}
		for _, c := range g.constants {
			if c.doc == "" || c.name == "Group" {
				continue
			}
			remark, text, err := splitComment(c.doc, c.name)
			if err != nil {
				return "", fmt.Errorf("%s/%s: %w", path, file, err)
			}
			term := code(c.value)
			if remark != "" {
				term += " (" + remark + ")"
			}
			m.item(term, s.userText(text))
		}
	}
	return m.String(), nil
}
