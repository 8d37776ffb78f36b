// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// TestFaults disturbs the plugin on a node. All cases run on one cluster.
func TestFaults(t *testing.T) {
	runFaults(t, ".cluster-e2e-faults", []faultCase{
		{"plugin killed at any step", (*faults).crash},
		{"ten rolling updates", (*faults).rollingUpdates},
		{"uninstall", (*faults).uninstall},
	})
}

// TestPrivileges checks that the plugin needs each of its privileges. `make test-privileges` runs it.
func TestPrivileges(t *testing.T) {
	runFaults(t, ".cluster-e2e-privileges", []faultCase{{"each is needed", (*faults).privileges}})
}

// faults is a suite with Go functions as cases.
type faults struct {
	*suite
	// rollout is how long a plugin may take to become ready; see measureRollout.
	rollout time.Duration
}

type faultCase struct {
	name string
	run  func(*faults, context.Context, *testing.T)
}

func runFaults(t *testing.T, dir string, cases []faultCase) {
	t.Helper()
	requireCluster(t)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	c, err := clusterclient.New(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, tc := range cases {
		names = append(names, strings.ReplaceAll(tc.name, " ", "-"))
	}
	requireSelected(t, names)
	r := newReporter(t)
	f := &faults{suite: start(ctx, t, c, clusterclient.Options{Nodes: 1})}
	for _, tc := range cases {
		r.runCase(tc.name, func(t *testing.T) { tc.run(f, ctx, t) })
	}
}

// kubectl runs kubectl, which must succeed, and returns its standard output.
func (f *faults) kubectl(ctx context.Context, t *testing.T, args ...string) string {
	t.Helper()
	out, err := f.cluster.Kubectl(ctx, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// apply applies a manifest in the default namespace.
func (f *faults) apply(ctx context.Context, manifest string) error {
	cmd := f.cluster.Command(ctx, "kubectl", "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(manifest)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apply: %w: %s", err, out)
	}
	return nil
}

// shareManifest returns a claim for a share of nic1 and a pod that uses it.
func shareManifest(name string) string {
	values := map[string]string{"name": name, "pod": name, "network": "backup", "bandwidth": "20M", "node": "n1"}
	return os.Expand(shareClaim+"---\n"+sharePod, func(key string) string { return values[key] })
}

// triggerSync changes a pod to make the kubelet process it immediately. After the plugin was unavailable, the kubelet
// would wait for up to 90 s.
func (f *faults) triggerSync(ctx context.Context, pod string) {
	annotation := fmt.Sprintf("sync=%d", time.Now().UnixNano())
	_, _ = f.cluster.Kubectl(ctx, "annotate", "pod", pod, "--overwrite", annotation) // the pod may be gone
}

// awaitReady waits until a pod is Ready.
func (f *faults) awaitReady(ctx context.Context, pod string, timeout time.Duration) error {
	return eventually.Poll(ctx, timeout, func() error {
		out, err := f.cluster.Kubectl(ctx, "get", "pod", pod,
			"-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out != "True" {
			f.triggerSync(ctx, pod)
			err = fmt.Errorf("condition Ready of pod %s: got %q, want True", pod, out)
		}
		return err
	})
}

// remove deletes pods and the claims of the same names, and waits until nothing of
// them remains on the node.
func (f *faults) remove(ctx context.Context, pods ...string) error {
	if _, err := f.cluster.Kubectl(ctx, append([]string{"delete", "pod", "--wait=false"}, pods...)...); err != nil {
		return err
	}
	if err := eventually.Poll(ctx, waitTimeout, func() error {
		out, err := f.cluster.Kubectl(ctx, append([]string{"get", "pod", "--ignore-not-found", "-o", "name"}, pods...)...)
		if err == nil && strings.TrimSpace(out) != "" {
			for _, pod := range strings.Fields(out) {
				f.triggerSync(ctx, strings.TrimPrefix(pod, "pod/"))
			}
			err = fmt.Errorf("deleted pods still exist: %s", strings.Fields(out))
		}
		return err
	}); err != nil {
		return err
	}
	if _, err := f.cluster.Kubectl(ctx, append([]string{"delete", "resourceclaim"}, pods...)...); err != nil {
		return err
	}
	return f.awaitNoLeftovers(ctx, 30*time.Second)
}
