// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"maps"
	"math"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// Identification of reports.
const (
	ReportAPIVersion = "conformance.dra-shared.dev/v1alpha1"
	ReportKind       = "ConformanceReport"
	// KubernetesVersion is the version of Kubernetes that the tested requirements belong to.
	KubernetesVersion = "v1.37"
)

// Implementation identifies a driver.
type Implementation struct {
	Organization string `json:"organization,omitempty"`
	Project      string `json:"project,omitempty"`
	URL          string `json:"url,omitempty"`
	// Version is a release, such as v1.2.3, and never a branch.
	Version string   `json:"version,omitempty"`
	Contact []string `json:"contact,omitempty"`
}

// Report is the result of a run. report.schema.json is its schema.
type Report struct {
	APIVersion     string         `json:"apiVersion"`
	Kind           string         `json:"kind"`
	Implementation Implementation `json:"implementation"`
	Driver         string         `json:"driver"`
	Suite          SuiteVersion   `json:"suite"`
	// KubernetesVersion is the version of the API server. If the suite serves the API, it is the version that the tested
	// requirements belong to.
	KubernetesVersion string `json:"kubernetesVersion"`
	// Kubelet is simulated if only the suite called the driver, and real if pods of a cluster
	// were started too.
	Kubelet string `json:"kubelet"`
	// APIServer is fake or real.
	APIServer string `json:"apiServer"`
	// Date is the day of the run, as YYYY-MM-DD in UTC.
	Date     string     `json:"date"`
	Profiles []Group    `json:"profiles"`
	Features FeatureSet `json:"features"`
	// Measurements are numbers that the requirements do not limit.
	Measurements map[string]float64 `json:"measurements,omitempty"`

	results []Result
}

// SuiteVersion identifies the suite.
type SuiteVersion struct {
	Version string `json:"version"`
	// Requirements is the checksum of the requirements.
	Requirements string `json:"requirements"`
}

// FeatureSet lists features by what the driver declares.
type FeatureSet struct {
	Supported   []Group  `json:"supported"`
	Unsupported []string `json:"unsupported"`
}

// Group is the result of a profile or a feature.
type Group struct {
	Name string `json:"name"`
	// Result is success if each must passed, partial if some were skipped and the others
	// passed, and failure if one failed.
	Result     string     `json:"result"`
	Statistics Statistics `json:"statistics"`
	Failed     []Entry    `json:"failed,omitempty"`
	Skipped    []Entry    `json:"skipped,omitempty"`
	// Recommendations are shoulds that the driver does not meet.
	Recommendations []Entry `json:"recommendations,omitempty"`
}

// Statistics counts musts.
type Statistics struct {
	Passed  int `json:"passed"`
	Failed  int `json:"failed"`
	Skipped int `json:"skipped"`
}

// Entry is a requirement with a reason.
type Entry struct {
	ID      string `json:"id"`
	Message string `json:"message"`
}

func newReport(c Config, results []Result, kubernetes string, start time.Time) Report {
	r := Report{
		APIVersion: ReportAPIVersion, Kind: ReportKind, Implementation: c.Implementation, Driver: c.Driver,
		Suite: SuiteVersion{suiteVersion(), requirementsSum()}, KubernetesVersion: kubernetes,
		Kubelet: "simulated", APIServer: "fake", Date: start.UTC().Format(time.DateOnly), results: results,
		Features: FeatureSet{Supported: []Group{}, Unsupported: []string{}},
	}
	if c.isLive() {
		r.APIServer = "real"
	}
	if c.needsOnlyAPI() {
		r.Kubelet = "none"
	}
	if c.Pods.Image != "" {
		r.Kubelet = "real"
	}
	names := map[string]bool{}
	for _, x := range results {
		q := x.Requirement
		if names[q.Group()] {
			continue
		}
		names[q.Group()] = true
		switch {
		case q.Profile != "":
			g := newGroup(q.Group(), results)
			if g.Statistics.Passed+g.Statistics.Failed > 0 || slices.Contains(c.Profiles, q.Profile) {
				r.Profiles = append(r.Profiles, g)
			}
		case slices.Contains(c.Features, q.Feature):
			r.Features.Supported = append(r.Features.Supported, newGroup(q.Group(), results))
		default:
			r.Features.Unsupported = append(r.Features.Unsupported, q.Feature)
		}
	}
	r.Measurements = measurements(results, time.Since(start))
	return r
}

// suiteVersion returns the version of the module in the program that runs it.
func suiteVersion() string {
	const module = "github.com/dra-shared/dra-driver-shared/conformance"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "(devel)"
	}
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == module && m.Version != "" {
			return m.Version
		}
	}
	return "(devel)"
}

func newGroup(name string, results []Result) Group {
	g := Group{Name: name, Result: "success"}
	for _, x := range results {
		if x.Requirement.Group() != name {
			continue
		}
		must, entry := x.Requirement.Level == Must, Entry{x.Requirement.ID, firstLine(x.Message)}
		switch {
		case x.Status == Failed && must:
			g.Statistics.Failed++
			g.Failed = append(g.Failed, entry)
		case x.Status == Failed:
			g.Recommendations = append(g.Recommendations, entry)
		case x.Status == Skipped:
			g.Skipped = append(g.Skipped, entry)
			if must {
				g.Statistics.Skipped++
			}
		case must:
			g.Statistics.Passed++
		}
	}
	switch {
	case g.Statistics.Failed > 0:
		g.Result = "failure"
	case g.Statistics.Skipped > 0:
		g.Result = "partial"
	}
	return g
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// measurements returns the measurements of the cases, and the time that all of them took.
func measurements(results []Result, total time.Duration) map[string]float64 {
	m := map[string]float64{}
	for _, r := range results {
		maps.Copy(m, r.Measurements)
	}
	m["suiteSeconds"] = math.Round(total.Seconds()*10) / 10
	return m
}

// Failed returns the musts that the driver does not meet.
func (r Report) Failed() (ids []string) {
	for _, x := range r.results {
		if x.Status == Failed && x.Requirement.Level == Must {
			ids = append(ids, x.Requirement.ID)
		}
	}
	return ids
}

// Results returns the results of all cases.
func (r Report) Results() []Result { return slices.Clone(r.results) }

// YAML returns the report as YAML.
func (r Report) YAML() ([]byte, error) { return yaml.Marshal(r) }

// JUnit returns the results as a JUnit file.
func (r Report) JUnit() ([]byte, error) {
	type text struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
	type testcase struct {
		Class   string `xml:"classname,attr"`
		Name    string `xml:"name,attr"`
		Time    string `xml:"time,attr"`
		Failure *text  `xml:"failure,omitempty"`
		Skipped *text  `xml:"skipped,omitempty"`
		Out     string `xml:"system-out,omitempty"`
	}
	var out struct {
		XMLName  xml.Name   `xml:"testsuite"`
		Name     string     `xml:"name,attr"`
		Tests    int        `xml:"tests,attr"`
		Failures int        `xml:"failures,attr"`
		Skipped  int        `xml:"skipped,attr"`
		Cases    []testcase `xml:"testcase"`
	}
	out.Name, out.Tests = "dra-conformance "+r.Driver, len(r.results)
	for _, x := range r.results {
		c := testcase{Class: x.Requirement.Group(), Name: x.Requirement.ID, Time: fmt.Sprintf("%.3f", x.Duration.Seconds())}
		switch {
		case x.Status == Failed && x.Requirement.Level == Must:
			out.Failures++
			c.Failure = &text{firstLine(x.Message), x.Explain()}
		case x.Status == Failed:
			c.Out = "recommendation: " + x.Explain()
		case x.Status == Skipped:
			out.Skipped++
			c.Skipped = &text{Message: x.Message}
		}
		out.Cases = append(out.Cases, c)
	}
	raw, err := xml.MarshalIndent(out, "", "  ")
	return append([]byte(xml.Header), append(raw, '\n')...), err
}

// Evidence returns a paragraph for the evidence of a PRODUCT.yaml. url is where the
// report is published.
func (r Report) Evidence(url string) string {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s was tested with dra-conformance %s against the requirements of Kubernetes %s on %s.\n",
		r.Implementation.Project, r.Implementation.Version, r.Suite.Version, KubernetesVersion, r.Date)
	if r.APIServer == "real" {
		fmt.Fprintf(&b, "It ran on Kubernetes %s.\n", r.KubernetesVersion)
	}
	for _, g := range slices.Concat(r.Profiles, r.Features.Supported) {
		fmt.Fprintf(&b, "%s: %s (%d passed, %d failed, %d skipped).\n",
			g.Name, g.Result, g.Statistics.Passed, g.Statistics.Failed, g.Statistics.Skipped)
	}
	fmt.Fprintf(&b, "Report: %s\n", url)
	return b.String()
}
