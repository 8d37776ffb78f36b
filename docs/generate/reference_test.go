// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const root = "../.."

// The other pages depend on commands and packages that are expensive to build; for
// them, make generate-check is the only check.
func TestPages_currentAPI(t *testing.T) {
	for _, p := range pages() {
		if p.file == "flags.md" || p.file == "metrics.md" {
			continue
		}
		t.Run(p.file, func(t *testing.T) {
			want, err := p.content(root)
			if err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(filepath.Join(root, directory, p.file))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, string(got)); diff != "" {
				t.Errorf("%s differs from its source, run make generate (-want +got):\n%s", p.file, diff)
			}
		})
	}
}

func TestParseFlags(t *testing.T) {
	for _, tc := range []struct {
		name, help string
		want       []flagDoc
	}{
		{"cobra", `Usage:
  x [flags]

Flags:
      --config string           the DriverConfig (default "/etc/x")
  -h, --help                    help for x
      --pprof                   serve profiles
  -v, --v Level                 number for the log level verbosity
      --vmodule pattern=N,...   list of
                                settings
`, []flagDoc{
			{"--config", "string", `The DriverConfig (default "/etc/x")`},
			{"--pprof", "", "Serve profiles"},
			{"--v", "Level", "Number for the log level verbosity"},
			{"--vmodule", "pattern=N,...", "List of settings"},
		}},
		{"package flag", "Usage of x:\n  -claim string\n    \tUID of the claim\n  -b\tshort\n", []flagDoc{
			{"--claim", "string", "UID of the claim"},
			{"--b", "", "Short"},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, parseFlags(tc.help), cmp.AllowUnexported(flagDoc{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestSplitComment(t *testing.T) {
	for doc, want := range map[string][2]string{
		"ReasonAttached (True) means that it works.":  {"True", "It works."},
		"Name is the name.":                           {"", "The name."},
		"name selects one.":                           {"", "Selects one."},
		"Name (a remark) lists\nthe names.":           {"a remark", "The names."},
		"Name means that it works. It, and that one.": {"", "It works. It, and that one."},
		`Name is "true" for some.`:                    {"", `"true" for some.`},
		"":                                            {"", ""},
	} {
		remark, text, err := splitComment(doc, "ReasonAttached", "Name", "name")
		if got := [2]string{remark, text}; err != nil || got != want {
			t.Errorf("%q: got %q and %v, want %q", doc, got, err, want)
		}
	}
}

func TestSplitComment_refusesIncompleteSentences(t *testing.T) {
	for _, doc := range []string{
		"no name",
		"Names is the name.",
		"Name are the names.",
		"Name (annotation), set to Disabled, makes it stop.",
		"Name means that it works, and that it\nis fast.",
		"Name (True) means that it works, or that it does not.",
		"Name means that status.reservedFor of it is full.",
	} {
		if remark, text, err := splitComment(doc, "Name", "name"); err == nil {
			t.Errorf("%q: got (%s) %q, want an error", doc, remark, text)
		}
	}
}

func TestCodify(t *testing.T) {
	for text, want := range map[string]string{
		"see status.reservedFor of it.": "see `status.reservedFor` of it.",
		"DRA_SHARED_<REQUEST>_X is set": "`DRA_SHARED_<REQUEST>_X` is set",
		`"*", "?", and "[a-z]"`:         "`*`, `?`, and `[a-z]`",
		"a < b, `x.y`":                  `a \< b, ` + "`x.y`",
		`device.attributes["a.b"].kind`: "`device.attributes[\"a.b\"].kind`",
		"such as 10.20.0.5/24.":         "such as 10.20.0.5/24.",
		"see docs/user/enforcement.md.": "see `docs/user/enforcement.md`.",
	} {
		if got := codify(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// test/monitoring evaluates the alerts.
func TestReadAlerts_namesExistingMetrics(t *testing.T) {
	alerts, err := readAlerts(root)
	if err != nil {
		t.Fatal(err)
	}
	page, err := metricsPage(root)
	if err != nil {
		t.Fatal(err)
	}
	if len(alerts) == 0 {
		t.Error("there are no alerts")
	}
	metricName := regexp.MustCompile(`dra_shared_\w+`)
	for _, a := range alerts {
		for _, name := range metricName.FindAllString(a.Expr, -1) {
			name = strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_count")
			if !strings.Contains(page, "- `"+name+"`") {
				t.Errorf("alert %s: no component exports the metric %s", a.Alert, name)
			}
		}
	}
}
