// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"crypto/sha256"
	_ "embed"
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

//go:embed requirements.yaml
var requirementsYAML []byte

// Level is how binding a requirement is.
type Level string

// Levels of requirements.
const (
	// Must marks requirements that the sources state with must, required, or shall, and
	// requirements without which the kubelet or the API server fails.
	Must Level = "must"
	// Should marks recommendations of the sources. A driver that does not meet one still
	// conforms; the report lists it.
	Should Level = "should"
)

// Way is what the test of a requirement needs.
type Way string

// Ways to test requirements.
const (
	Socket  Way = "socket"  // the driver's gRPC socket and an API server, which may be fake
	API     Way = "api"     // the objects that the driver writes
	Process Way = "process" // to end and start the driver
	Kubelet Way = "kubelet" // a kubelet and a container runtime
	Network Way = "network" // a device that can fail, or a network
)

// Requirement is a sentence that a DRA driver has to meet.
type Requirement struct {
	// ID is stable: it is never given to another requirement.
	ID    string `json:"id"`
	Level Level  `json:"level"`
	Way   Way    `json:"way"`
	Text  string `json:"text"`
	// Profile is the profile that the requirement belongs to; empty for a feature.
	Profile string `json:"profile,omitempty"`
	// Feature is the feature that a driver declares to be tested for the requirement.
	Feature string `json:"feature,omitempty"`
	// Reference names all documents that the requirement is derived from.
	Reference string `json:"reference"`
	// Source is the sentence that the requirement rests on; nil for requirements without a single sentence.
	Source *Source `json:"source,omitempty"`
	// Cause is the usual cause of a failure.
	Cause string `json:"cause,omitempty"`
	// Note is the decision of the suite where sources contradict each other.
	Note string `json:"note,omitempty"`
	// Implies lists requirements that a driver cannot meet if it does not meet this one.
	Implies []string `json:"implies,omitempty"`
}

// Source is a sentence of a file.
type Source struct {
	// File is the import path of the module and the path of the file in it.
	File  string `json:"file"`
	Quote string `json:"quote"`
}

// SourceVersions maps the modules of sources to the versions that the quotes are from.
func SourceVersions() map[string]string {
	return map[string]string{
		"k8s.io/api": "v0.37.2", "k8s.io/kubelet": "v0.37.2", "k8s.io/dynamic-resource-allocation": "v0.37.2",
		"k8s.io/kubernetes": "v1.37.1",
	}
}

// Version returns the version of the file, or "".
func (s Source) Version() string {
	for module, version := range SourceVersions() {
		if strings.HasPrefix(s.File, module+"/") {
			return version
		}
	}
	return ""
}

// Group returns the profile or the feature of the requirement.
func (r Requirement) Group() string {
	if r.Profile != "" {
		return r.Profile
	}
	return r.Feature
}

// group returns the profile or the feature as words.
func (r Requirement) group() string {
	if r.Profile != "" {
		return "the profile " + r.Profile
	}
	return "the feature " + r.Feature
}

// Implemented reports whether the suite has a case for the requirement.
func (r Requirement) Implemented() bool { return cases()[r.ID] != nil }

// needsOnlyAPI reports whether the requirement's case does not call the driver or the kubelet.
func (r Requirement) needsOnlyAPI() bool {
	return r.Way == API && !slices.Contains([]string{"SHARE-09", "SEC-04"}, r.ID) // which prepare claims
}

// Requirements returns all requirements, in the order of the documentation.
func Requirements() ([]Requirement, error) {
	var all []Requirement
	if err := yaml.UnmarshalStrict(requirementsYAML, &all); err != nil {
		return nil, fmt.Errorf("requirements.yaml: %w", err)
	}
	return all, nil
}

// requirementsSum identifies the version of the requirements in reports. Fields that explain a requirement, or are
// about the reference driver, do not change results and do not count.
func requirementsSum() string {
	all, _ := Requirements() // a test decodes them
	for i := range all {
		all[i].Reference, all[i].Source, all[i].Cause, all[i].Note, all[i].Implies = "", nil, "", "", nil
	}
	raw, _ := yaml.Marshal(all) // strings only
	return fmt.Sprintf("sha256:%x", sha256.Sum256(raw))
}

// Explain describes a requirement, as text for a terminal.
func Explain(id string) (string, error) {
	all, err := Requirements()
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(all, func(r Requirement) bool { return r.ID == strings.ToUpper(id) })
	if i < 0 {
		return "", fmt.Errorf("requirement %q does not exist: `dra-conformance list` prints all IDs", id)
	}
	return all[i].explain(), nil
}

func (r Requirement) explain() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s (%s, %s; tested by %s)\n\n  %s.\n", r.ID, r.Level, r.Group(), r.Way, r.Text)
	if r.Source != nil {
		fmt.Fprintf(&b, "\nSource: %s %s\n  %q\n", r.Source.File, r.Source.Version(), r.Source.Quote)
	}
	fmt.Fprintf(&b, "\nDerived from: %s\n", r.Reference)
	for _, part := range []struct{ title, text string }{
		{"Usual cause of a failure", r.Cause},
		{"Decision of the suite", r.Note},
		{"A failure makes these fail too", strings.Join(r.Implies, ", ")},
	} {
		if part.text != "" {
			fmt.Fprintf(&b, "\n%s: %s\n", part.title, part.text)
		}
	}
	if !r.Implemented() {
		b.WriteString("\nThe suite has no case for it yet.\n")
	}
	return b.String()
}
