// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package controlplane tests the controller against a real control plane with simulated nodes. It covers what the
// clusters of test/e2e cannot: a thousand pods, a controller that is killed between any two writes, and versions of
// Kubernetes without node binaries here.
//
// make test-controlplane runs the tests twice. The first process starts the
// control plane. The second runs in its network namespace, where the API server
// reaches the admission webhook that the test serves: the chart is installed,
// the controller's pod is simulated, and the test answers at its address.
package controlplane

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
)

// Environment variables of the tests.
const (
	envRun     = "CONTROLPLANE"         // not empty: run the tests
	envInside  = "CONTROLPLANE_INSIDE"  // directory of the cluster that this process shares the network namespace of
	envVersion = "CONTROLPLANE_VERSION" // version of Kubernetes
	envGates   = "CONTROLPLANE_GATES"   // feature gates, as for the command cluster
	envBench   = "CONTROLPLANE_BENCH"   // not empty: run TestController_measuresManyPods
	envOther   = "CONTROLPLANE_OTHER"   // name of another controller: run also its long tests, as `make test-<name>`
)

func TestMain(m *testing.M) {
	if os.Getenv(envRun) == "" || os.Getenv(envInside) != "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := outside(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "control plane tests:", err)
		os.Exit(1)
	}
}

// outside starts the control plane and runs this program again in its network
// namespace.
func outside(ctx context.Context) error {
	dir := ".cluster-controlplane-" + os.Getenv(envVersion) + os.Getenv(envGates)
	c, err := clusterclient.New(strings.TrimRight(dir, "-"))
	if err != nil {
		return err
	}
	if err := c.Down(ctx); err != nil {
		return err
	}
	defer func() {
		if err := c.Down(context.WithoutCancel(ctx)); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}()
	options := clusterclient.Options{
		Nodes: clusterclient.NoNodes, Kubernetes: os.Getenv(envVersion), Gates: os.Getenv(envGates), Bare: true,
	}
	if err := c.Up(ctx, options, os.Stdout); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	args := append([]string{self}, os.Args[1:]...)
	inside := exec.CommandContext(ctx, filepath.Join(c.Dir, "network"), args...)
	inside.Env = append(os.Environ(), envInside+"="+c.Dir)
	inside.Stdout, inside.Stderr = os.Stdout, os.Stderr
	return inside.Run()
}
