// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package restconfig_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dra-shared/dra-driver-shared/internal/restconfig"
)

const kubeconfig = `apiVersion: v1
kind: Config
clusters:
- name: c
  cluster: {server: "https://192.0.2.1:6443"}
contexts:
- name: c
  context: {cluster: c}
current-context: c
`

func TestLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := restconfig.Load(path)
	if err != nil || c.Host != "https://192.0.2.1:6443" {
		t.Errorf("got %+v, %v, want the server of the file", c, err)
	}
}

func TestLoad_errors(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for path, want := range map[string]string{
		"":         "set --kubeconfig",
		"/missing": "--kubeconfig: stat /missing",
	} {
		if _, err := restconfig.Load(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Load(%q): got %v, want an error with %q", path, err, want)
		}
	}
}
