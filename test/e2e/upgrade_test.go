// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
)

// TestUpgrade installs the previous release, upgrades it, and rolls it back.
func TestUpgrade(t *testing.T) {
	requireCluster(t)
	if os.Getenv("E2E_CLUSTER") != "" {
		t.Skip("needs a cluster without the chart, and E2E_CLUSTER has it")
	}
	c, err := clusterclient.New(".cluster-e2e-upgrade")
	if err != nil {
		t.Fatal(err)
	}
	var missing *missingReleaseError
	switch _, err := previousRelease(t.Context(), c.Root); {
	case errors.As(err, &missing):
		t.Skip(missing)
	case err != nil:
		t.Fatal(err)
	}
	runStoriesOn(t, "testdata/upgrade", c, clusterclient.Options{Nodes: 1, Bare: true})
}

// missingReleaseError is the reason why the previous release cannot be built.
type missingReleaseError struct{ reason string }

func (e *missingReleaseError) Error() string { return e.reason }

// previousRelease returns the directory with image, chart, and values of the
// previous release. It builds the image if it is not in the cache.
func previousRelease(ctx context.Context, root string) (dir string, err error) {
	build := exec.CommandContext(ctx, filepath.Join(root, "test/e2e/previous.sh"))
	var stdout, stderr bytes.Buffer
	build.Stdout, build.Stderr = &stdout, &stderr
	err = build.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() == 3:
		return "", &missingReleaseError{strings.TrimSpace(stderr.String())}
	case err != nil:
		return "", fmt.Errorf("build the previous release: %w: %s", err, stderr.String())
	}
	return strings.TrimSpace(stdout.String()), nil
}

// chart previous|present|rollback: installs the previous release, upgrades the
// chart to this release, or rolls the chart back to its first revision. It returns
// when the pods of that release are ready.
func (s *suite) chart(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: chart previous|present|rollback")
	}
	ctx := context.Background()
	switch args[0] {
	case "previous":
		dir, err := previousRelease(ctx, s.cluster.Root)
		ts.Check(err)
		ts.Check(s.cluster.Load(ctx, filepath.Join(dir, "image.tar")))
		_, err = s.cluster.Helm(ctx, "install", "dra-shared", filepath.Join(dir, "chart"),
			"--namespace", system, "--create-namespace", "--values", filepath.Join(dir, "values.yaml"),
			"--set", "image.tag=previous", "--wait", "--timeout", "60s")
		ts.Check(err)
	case "present":
		ts.Check(s.cluster.Install(ctx))
	case "rollback":
		_, err := s.cluster.Helm(ctx, "rollback", "dra-shared", "1", "--namespace", system, "--wait", "--timeout", "60s")
		ts.Check(err)
	default:
		ts.Fatalf("chart %s: must be previous, present, or rollback", args[0])
	}
}
