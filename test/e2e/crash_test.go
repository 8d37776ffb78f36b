// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// crash kills the plugin before or after samples of the steps that it takes for a
// claim, spread over all of them. After each crash the claim must become ready, and
// its removal must leave nothing on the node.
func (f *faults) crash(ctx context.Context, t *testing.T) {
	const samples = 10
	f.installCrashPlugin(ctx, t)
	f.node(ctx, t, "echo >/run/dra-shared/steps")
	f.runLifecycle(ctx, t, "recorded")
	recorded := f.node(ctx, t, "cat /run/dra-shared/steps; rm /run/dra-shared/steps")
	steps := strings.Split(strings.TrimSpace(recorded), "\n")
	t.Logf("%d steps: %s", len(steps), strings.Join(steps, ", "))
	if len(steps) < samples {
		t.Fatalf("recorded steps of a claim: got %d, want at least %d", len(steps), samples)
	}
	for i := range samples {
		number := 1 + i*(len(steps)-1)/(samples-1)
		when := []string{"before", "after"}[i%2]
		f.crashAt(ctx, t, when, number, steps[number-1])
	}
	restarts := strings.TrimSpace(f.kubectl(ctx, t, "-n", system, "get", "pods",
		"-l", "app.kubernetes.io/component=plugin", "-o", "jsonpath={.items[*].status.containerStatuses[*].restartCount}"))
	t.Logf("the plugin was restarted %s times", restarts)
	if restarts == "0" {
		t.Error("restarts of the plugin: got 0, want one for each sampled step")
	}
}

// crashAt kills the plugin before or after a step. The number of steps varies with
// the number of status updates, so a claim may be removed before the plugin gets to
// the last ones: crashAt tries up to five claims.
func (f *faults) crashAt(ctx context.Context, t *testing.T, when string, number int, name string) {
	t.Helper()
	const attempts = 5
	for attempt := range attempts {
		f.node(ctx, t, fmt.Sprintf(
			"printf '%s %d' >/run/dra-shared/die.new; mv /run/dra-shared/die.new /run/dra-shared/die", when, number))
		f.runLifecycle(ctx, t, fmt.Sprintf("crash-%d-%d", number, attempt))
		// The plugin removes the file when it crashes.
		pending := f.node(ctx, t, "cat /run/dra-shared/die 2>/dev/null || true; rm -f /run/dra-shared/die")
		if pending == "" {
			t.Logf("crashed %s step %d, %s", when, number, name)
			return
		}
	}
	t.Errorf("plugin did not crash %s step %d (%s): it did not reach the step in %d claims", when, number, name, attempts)
}

// installCrashPlugin installs a plugin that kills itself at a step that a file names.
func (f *faults) installCrashPlugin(ctx context.Context, t *testing.T) {
	t.Helper()
	if err := f.cluster.Load(ctx, filepath.Join(f.cluster.Root, "bin/images/crash.tar")); err != nil {
		t.Fatal(err)
	}
	if err := f.cluster.Install(ctx, "image.tag=crash"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.cluster.Install(ctx); err != nil {
			t.Error(err)
		}
	})
}

// node runs a shell script on the node, which must succeed.
func (f *faults) node(ctx context.Context, t *testing.T, script string) string {
	t.Helper()
	out, err := f.cluster.Node(ctx, "n1", "sh", "-ec", script)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// runLifecycle creates a claim and its pod, checks the pod's link and the claim's
// status, and removes both.
func (f *faults) runLifecycle(ctx context.Context, t *testing.T, name string) {
	t.Helper()
	if err := f.apply(ctx, shareManifest(name)); err != nil {
		t.Fatal(err)
	}
	if err := f.awaitReady(ctx, name, waitTimeout); err != nil {
		t.Fatal(err)
	}
	f.node(ctx, t, "for p in $(pgrep -f -x /bin/nettool); do nsenter -t $p -n ip link show net1; done | "+
		"grep -q 'state UP'")
	err := eventually.Poll(ctx, waitTimeout, func() error {
		out, err := f.cluster.Kubectl(ctx, "get", "resourceclaim", name,
			"-o", "jsonpath={.status.devices[0].conditions[*].status}")
		if err == nil && out != "True True True" {
			err = fmt.Errorf("conditions of claim %s: got %q, want %q", name, out, "True True True")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.remove(ctx, name); err != nil {
		t.Fatal(err)
	}
}
