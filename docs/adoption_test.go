// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/module"
	modzip "golang.org/x/mod/zip"
	"sigs.k8s.io/yaml"
)

const (
	suiteModule  = "github.com/dra-shared/dra-driver-shared/conformance"
	suiteVersion = "v0.37.99" // only the proxy of the test has it
)

// TestConformance_adoption follows docs/user/conformance.md as the author of a driver: get
// the module from a proxy, run the suite in a test, and run it with the action.
func TestConformance_adoption(t *testing.T) {
	a := newAuthor(t)
	a.write("main.go", `package main

import (
	"log"
	"os"

	"github.com/dra-shared/dra-driver-shared/conformance/reference"
)

func main() {
	if err := reference.Main(os.Getenv); err != nil {
		log.Fatal(err)
	}
}
`)
	a.run("go", "get", suiteModule+"@"+suiteVersion)
	a.run("go", "build", "-o", "bin/driver", ".")

	t.Run("test", func(t *testing.T) {
		const header = "package conformance_test\n\n" +
			"import (\n\t\"testing\"\n\n\t\"" + suiteModule + "\"\n)\n\n"
		test := strings.Replace(documentedTest(t), "Command:", "Only: []string{\"REG\"},\n\t\tCommand:", 1)
		a.write("conformance/conformance_test.go", header+test)
		a.run("go", "-C", "conformance", "mod", "init", "gpu.example.com/conformance")
		a.run("go", "-C", "conformance", "get", suiteModule+"@"+suiteVersion)
		out := a.run("go", "-C", "conformance", "test", "-v", "./...")
		if !strings.Contains(out, "--- PASS: TestConformance/REG-01") {
			t.Errorf("output of go test does not contain the result of REG-01:\n%s", out)
		}
	})
	t.Run("action", func(t *testing.T) {
		a.write("conformance.yaml", "driver: gpu.example.com\ncommand: [bin/driver]\nonly: [REG]\n")
		a.env = append(a.env, "CONFIG=conformance.yaml", "VERSION="+suiteVersion, "REPORT=report.yaml", "JUNIT=junit.xml")
		a.run("bash", "-eo", "pipefail", "-c", actionScript(t))
		for file, want := range map[string]string{"report.yaml": "kind: ConformanceReport", "junit.xml": "<testsuite"} {
			if raw, err := os.ReadFile(filepath.Join(a.dir, file)); err != nil || !strings.Contains(string(raw), want) {
				t.Errorf("%s: got error %v and %d bytes, want a file that contains %q", file, err, len(raw), want)
			}
		}
	})
}

// author is the author of a driver, with an empty module and no replace directives.
type author struct {
	t   *testing.T
	dir string
	env []string
}

func newAuthor(t *testing.T) *author {
	t.Helper()
	goEnv := func(name string) string {
		out, err := exec.Command("go", "env", name).Output()
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out))
	}
	dir, proxy := t.TempDir(), t.TempDir()
	writeModule(t, proxy)
	// Most modules that the suite needs are in the cache of this test's own build, which has
	// the layout of a proxy. A separate module cache keeps the version of the test out of
	// the cache of the build.
	a := &author{t: t, dir: dir, env: append(os.Environ(),
		"GOPROXY=file://"+proxy+",file://"+filepath.Join(goEnv("GOMODCACHE"), "cache/download")+","+goEnv("GOPROXY"),
		"GOMODCACHE="+t.TempDir(), "GOPATH="+t.TempDir(), "GOFLAGS=-modcacherw -trimpath", "GONOSUMDB=*", "GOWORK=off",
		"CGO_ENABLED=0")}
	a.write("go.mod", "module driver.example.com\n\ngo 1.26.0\n")
	return a
}

// write writes a file of the author's module.
func (a *author) write(name, content string) {
	a.t.Helper()
	name = filepath.Join(a.dir, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		a.t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
		a.t.Fatal(err)
	}
}

// run runs a command in the author's module, which must succeed.
func (a *author) run(name string, args ...string) string {
	a.t.Helper()
	cmd := exec.CommandContext(a.t.Context(), name, args...)
	cmd.Dir, cmd.Env = a.dir, a.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		a.t.Fatalf("%s: %v:\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// writeModule writes the module of the suite to the directory of a proxy (GOPROXY=file://).
func writeModule(t *testing.T, proxy string) {
	t.Helper()
	dir := filepath.Join(proxy, suiteModule, "@v")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	archive, err := os.Create(filepath.Join(dir, suiteVersion+".zip"))
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	version := module.Version{Path: suiteModule, Version: suiteVersion}
	if err := modzip.CreateFromDir(archive, version, "../conformance"); err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile("../conformance/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	info, err := json.Marshal(map[string]any{"Version": suiteVersion, "Time": time.Unix(0, 0).UTC()})
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		suiteVersion + ".mod": mod, suiteVersion + ".info": info, "list": []byte(suiteVersion + "\n"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// documentedTest returns the test of docs/user/conformance.md.
func documentedTest(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile("user/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?s)```go\n(func TestConformance.*?)```").FindSubmatch(page)
	if block == nil {
		t.Fatal("docs/user/conformance.md has no block with a test")
	}
	return string(block[1])
}

// actionScript returns the script of the last step of the action.
func actionScript(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile("../conformance/action.yml")
	if err != nil {
		t.Fatal(err)
	}
	var action struct {
		Runs struct {
			Steps []struct {
				Run string            `json:"run"`
				Env map[string]string `json:"env"`
			} `json:"steps"`
		} `json:"runs"`
	}
	if err := yaml.Unmarshal(raw, &action); err != nil {
		t.Fatal(err)
	}
	step := action.Runs.Steps[len(action.Runs.Steps)-1]
	for _, name := range []string{"config", "version", "report", "junit"} {
		if got, want := step.Env[strings.ToUpper(name)], fmt.Sprintf("${{ inputs.%s }}", name); got != want {
			t.Errorf("variable %s of the action: got %q, want %q", strings.ToUpper(name), got, want)
		}
	}
	return step.Run
}
