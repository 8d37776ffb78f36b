// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command generate writes docs/user/reference from the code: the API types and
// constants below api/, the metrics that the plugin and the controller register, the
// flags of the commands, and the values of the chart.
//
// It runs in the root of the repository. Flags are read from the help texts of the
// commands, which it builds.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/dra-shared/dra-driver-shared/conformance"
)

// directory is where the pages are, relative to the root of the repository.
const directory = "docs/user/reference"

// page is a generated document.
type page struct {
	file, title, summary string
	body                 func(root string) (string, error)
}

// pages returns all pages except the index, in the order of the index.
func pages() []page {
	return []page{
		{"parameters.md", "Parameters of claims",
			"the opaque parameters that a DeviceClass, a ResourceClaim, or a ResourceClaimTemplate may carry", parametersPage},
		{"driverconfig.md", "DriverConfig",
			"the configuration of the driver, which the chart takes from its value `config`", configPage},
		{"podgroup.md", "PodGroup",
			"a group of pods that share claims, with its conditions, and the claims of Jobs", podGroupPage},
		{"addresspool.md", "AddressPool",
			"the addresses that the links of pods can have, and the blocks that nodes take from them", addressPoolPage},
		{"status.md", "Status of claims",
			"the data, conditions, reasons, and events that the driver reports for claims and pods", statusPage},
		{"names.md", "Names",
			"environment variables, attributes, capacities, taints, annotations, and labels", namesPage},
		{"metrics.md", "Metrics",
			"the metrics that the plugin and the controller export to Prometheus", metricsPage},
		{"alerts.md", "Alerts",
			"rules for Prometheus, with what to do", alertsPage},
		{"flags.md", "Commands and flags",
			"the flags of each command", flagsPage},
		{"values.md", "Chart values",
			"the values of the Helm chart", valuesPage},
		{"requirements.md", "Requirements on DRA drivers",
			"the requirements of the conformance suite, each with the sentence that it rests on",
			func(string) (string, error) { return conformance.Page() }},
	}
}

// content returns the text of the page.
func (p page) content(root string) (string, error) {
	body, err := p.body(root)
	if err != nil {
		return "", fmt.Errorf("%s: %w", p.file, err)
	}
	var m markdown
	m.header(p.title)
	return m.String() + body, nil
}

func main() {
	out := flag.String("out", directory, "directory for the pages")
	flag.Parse()
	if err := run(".", *out); err != nil {
		fmt.Fprintf(os.Stderr, "generate: %v\n", err)
		os.Exit(1)
	}
}

// run writes all pages into the directory out.
func run(root, out string) error {
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	index := markdown{}
	index.header("Reference")
	index.paragraph("These pages are generated from the code by `make generate`. Do not edit them.")
	for _, p := range pages() {
		index.item(fmt.Sprintf("[%s](%s)", p.title, p.file), p.summary+".")
		content, err := p.content(root)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(out, p.file), []byte(content), 0o644); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(out, "README.md"), []byte(index.String()), 0o644)
}
