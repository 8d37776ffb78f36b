// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// buildProgram returns the path of a program of cmd, built as for the image.
func buildProgram(t testing.TB, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", path, "../../cmd/"+name)
	build.Env = append(build.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return path
}

// program returns the command that starts the plugin's program with a configuration. The program finds the
// directories of the environment where a kubelet has them.
func (e *testEnv) program(c pluginConfig) *exec.Cmd {
	e.t.Helper()
	plugins := e.path("kubelet", "plugins")
	for link, target := range map[string]string{
		filepath.Join(plugins, driverName):    e.path("plugin"),
		e.path("kubelet", "plugins_registry"): e.path("registry"),
	} {
		e.must("create the kubelet's directories", os.MkdirAll(plugins, 0o700))
		if err := os.Symlink(target, link); err != nil && !os.IsExist(err) {
			e.t.Fatal(err)
		}
	}
	for name, content := range map[string]string{
		"config.yaml": c.driverConfig(),
		"hook-source": "#!/bin/sh\n",
		"kubeconfig": fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "test",
			"clusters": [{"name": "test", "cluster": {"server": %q}}],
			"contexts": [{"name": "test", "context": {"cluster": "test"}}]}`, c.URL),
	} {
		e.must("write a file of the plugin", os.WriteFile(e.path(name), []byte(content), 0o600))
	}
	return exec.Command(c.Program, "--node-name", c.Node, "--pod-uid", c.Instance,
		"--config", e.path("config.yaml"), "--kubeconfig", e.path("kubeconfig"),
		"--hook", e.path("hook-source"), "--hook-dir", e.path("hook"), "--kubelet-dir", e.path("kubelet"),
		"--cdi-dir", e.path("cdi"), "--run-dir", e.path("run"), "--bpffs", c.BPFFS)
}
