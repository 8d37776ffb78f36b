// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package build

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// writeModule writes the module of the multi-call binary for a version of Kubernetes other than KubernetesVersion into
// dir. It replaces the modules that k8s.io/kubernetes takes from its staging directories with their published versions.
func writeModule(ctx context.Context, source, version, dir string) error {
	out, err := exec.CommandContext(ctx, "go", "mod", "download", "-json", "k8s.io/kubernetes@"+version).Output()
	if err != nil {
		return fmt.Errorf("download k8s.io/kubernetes %s: %w: does this version exist?", version, err)
	}
	var module struct{ GoMod string }
	if err := json.Unmarshal(out, &module); err != nil {
		return err
	}
	upstream, err := os.ReadFile(module.GoMod)
	if err != nil {
		return err
	}
	main, err := os.ReadFile(filepath.Join(source, "main.go"))
	if err != nil {
		return err
	}
	return errors.Join(
		os.MkdirAll(dir, 0o755),
		os.WriteFile(filepath.Join(dir, "go.mod"), goMod(string(upstream), version), 0o644),
		os.WriteFile(filepath.Join(dir, "main.go"), main, 0o644),
	)
}

var (
	staged = regexp.MustCompile(`(?m)^\s*(k8s\.io/\S+) => \./staging/`)
	etcd   = regexp.MustCompile(`(?m)^\s*(go\.etcd\.io/etcd/server/v3 \S+)`)
)

// goMod returns the go.mod of the module, given the one of k8s.io/kubernetes.
func goMod(upstream, version string) []byte {
	staging := "v0" + strings.TrimPrefix(version, "v1")
	var b strings.Builder
	fmt.Fprintf(&b, "module kube\n\ngo 1.26.0\n\nrequire k8s.io/kubernetes %s\n", version)
	if m := etcd.FindStringSubmatch(upstream); m != nil {
		fmt.Fprintf(&b, "require %s\n", m[1])
	}
	for _, m := range staged.FindAllStringSubmatch(upstream, -1) {
		fmt.Fprintf(&b, "replace %s => %s %s\n", m[1], m[1], staging)
	}
	return []byte(b.String())
}
