// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// rollingUpdates replaces the plugin ten times while it creates pods continuously.
// No pod may fail or start without its link.
func (f *faults) rollingUpdates(ctx context.Context, t *testing.T) {
	const updates, alive = 10, 40
	rolling, done := context.WithCancel(ctx)
	var rollouts sync.WaitGroup
	rollouts.Go(func() {
		defer done()
		for range updates {
			if _, err := f.cluster.Kubectl(ctx, "-n", system, "rollout", "restart", "daemonset/dra-shared-plugin"); err != nil {
				t.Error(err)
			}
			if err := f.awaitPlugin(ctx, 60*time.Second); err != nil {
				t.Error(err)
			}
		}
	})
	var (
		pods []string
		took []time.Duration
	)
	for i := 0; rolling.Err() == nil; i++ {
		name := fmt.Sprintf("rolling-%d", i)
		manifest := strings.ReplaceAll(shareManifest(name), "  containers:\n", "  restartPolicy: Never\n  containers:\n")
		manifest = strings.ReplaceAll(manifest, `imagePullPolicy: Never,`, `imagePullPolicy: Never, args: [show, --wait],`)
		start := time.Now()
		if err := f.apply(ctx, manifest); err != nil {
			t.Fatal(err)
		}
		pods = append(pods, name)
		if err := f.awaitStarted(ctx, name); err != nil {
			t.Fatal(err)
		}
		took = append(took, time.Since(start))
		if len(pods) > alive {
			f.kubectl(ctx, t, "delete", "pod", pods[0], "--wait=false", "--grace-period=1")
			pods = pods[1:]
		}
	}
	rollouts.Wait()
	slices.Sort(took)
	t.Logf("%d pods during %d updates, each with its link; time from apply to running: p50 %s, p99 %s, maximum %s",
		len(took), updates, took[len(took)/2], took[len(took)*99/100], took[len(took)-1])
	if len(took) < updates {
		t.Errorf("pods created during %d updates: got %d, want at least one for each update", updates, len(took))
	}
	f.kubectl(ctx, t, "delete", "pod", "--all", "--grace-period=1", "--timeout=60s")
	f.kubectl(ctx, t, "delete", "resourceclaim", "--all", "--timeout=60s")
	if err := f.awaitNoLeftovers(ctx, 30*time.Second); err != nil {
		t.Error(err)
	}
}

// awaitStarted waits until the pod's container runs and checks that it saw its
// link when it started. The pod must not restart its containers.
func (f *faults) awaitStarted(ctx context.Context, pod string) error {
	var failed error
	err := eventually.Poll(ctx, 20*time.Second, func() error {
		out, err := f.cluster.Kubectl(ctx, "get", "pod", pod, "-o", "jsonpath={.status.phase}")
		switch {
		case err != nil:
			return err
		case out == "Failed":
			failed = fmt.Errorf("phase of pod %s: got Failed, want Running", pod)
			return nil
		case out != "Running":
			return fmt.Errorf("phase of pod %s: got %s, want Running", pod, out)
		}
		return nil
	})
	if err = errors.Join(err, failed); err != nil {
		return err
	}
	return eventually.Poll(ctx, 5*time.Second, func() error {
		out, err := f.cluster.Kubectl(ctx, "logs", pod)
		if err == nil && !strings.Contains(out, "net1") {
			err = fmt.Errorf("links of pod %s when it started: got %q, want net1", pod, out)
		}
		return err
	})
}
