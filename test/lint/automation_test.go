// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// root is the root directory of the repository.
const root = "../.."

func TestDependabot_directories(t *testing.T) {
	var config struct {
		Updates []struct {
			Ecosystem   string   `json:"package-ecosystem"`
			Directories []string `json:"directories"`
		} `json:"updates"`
	}
	if err := yaml.Unmarshal([]byte(read(t, ".github/dependabot.yml")), &config); err != nil {
		t.Fatal(err)
	}
	files := map[string]string{"gomod": "go.mod", "github-actions": "action.yml"}
	for _, update := range config.Updates {
		file, ok := files[update.Ecosystem]
		if !ok {
			t.Errorf("ecosystem %s: the test does not know its files", update.Ecosystem)
			continue
		}
		want := directoriesWith(t, file)
		if update.Ecosystem == "github-actions" {
			want = append(want, root) // stands for the workflows
		}
		var got []string
		for _, pattern := range update.Directories {
			matches, err := filepath.Glob(filepath.Join(root, pattern))
			if err != nil {
				t.Fatal(err)
			}
			for _, match := range matches {
				if info, err := os.Stat(match); err == nil && info.IsDir() {
					got = append(got, match)
				}
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("directories of %s are\n%v, want those with %s:\n%v", update.Ecosystem, got, file, want)
		}
	}
}

// directoriesWith returns the directories of the repository that contain a file, except directories of build results
// and test clusters.
func directoriesWith(t *testing.T, name string) (directories []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(file string, entry os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && (entry.Name() == "bin" || strings.HasPrefix(entry.Name(), ".") && file != root) {
			return filepath.SkipDir
		}
		if entry.Name() == name {
			directories = append(directories, filepath.Dir(file))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return directories
}

func TestWorkflow_usesToolchainOfModule(t *testing.T) {
	toolchain := regexp.MustCompile(`(?m)^toolchain go(\S+)$`).FindStringSubmatch(read(t, "go.mod"))
	if toolchain == nil {
		t.Fatal("go.mod has no line toolchain")
	}
	workflow := read(t, ".github/workflows/ci.yml")
	images := regexp.MustCompile(`golang:(\S+)-bookworm`).FindAllStringSubmatch(workflow, -1)
	if len(images) == 0 {
		t.Error("ci.yml has no job in a container with Go")
	}
	for _, image := range images {
		if image[1] != toolchain[1] {
			t.Errorf("ci.yml has the container %s, want version %s as in go.mod", image[0], toolchain[1])
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}
