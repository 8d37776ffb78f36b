// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command kind-demo runs the driver in a kind cluster: it creates the cluster and a
// Docker network, which is the NIC that pods share, installs the chart, and measures
// what each pod gets. It prints the commands that it runs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/dra-shared/dra-driver-shared/test/kind"
	"github.com/dra-shared/dra-driver-shared/test/kind/engine"
)

var errUsage = errors.New(`usage of kind-demo:
  kind-demo demo [--dir DIR] [--nodes 1|2]  create a cluster, show the demo, and remove the cluster
  kind-demo up   [--dir DIR] [--nodes 1|2]  create a cluster and install the chart
  kind-demo down [--dir DIR]                remove the cluster and everything that came with it
in the root directory of the repository`)

func main() {
	engine.Main()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	// Without a reader of the output, writing fails instead of ending this process, which
	// still has to remove the cluster.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "kind-demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	dir := flags.String("dir", ".cluster-kind", "directory of the cluster's files")
	nodes := flags.Int("nodes", 1, "number of nodes: 1 or 2")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	absolute, err := filepath.Abs(*dir)
	if err != nil {
		return err
	}
	c := &kind.Cluster{Root: root, Dir: absolute, Out: os.Stdout}
	switch args[0] {
	case "demo":
		err := demo(ctx, c, *nodes)
		if errors.Is(err, kind.ErrExists) {
			return err
		}
		// WithoutCancel: the cluster must end even after an interrupt.
		return errors.Join(err, c.Down(context.WithoutCancel(ctx)))
	case "up":
		return up(ctx, c, *nodes)
	case "down":
		return c.Down(ctx)
	default:
		return errUsage
	}
}

// up creates a cluster, and removes what it created if that fails.
func up(ctx context.Context, c *kind.Cluster, nodes int) error {
	err := c.Up(ctx, nodes)
	if errors.Is(err, kind.ErrExists) {
		return err
	}
	if err != nil {
		return errors.Join(err, c.Down(context.WithoutCancel(ctx)))
	}
	fmt.Printf("\nThe cluster is ready: %s. `make kind-down` removes it.\n", filepath.Join(c.Dir, "kubectl"))
	return nil
}

func demo(ctx context.Context, c *kind.Cluster, nodes int) error {
	if err := c.Up(ctx, nodes); err != nil {
		return err
	}
	return c.Demo(ctx)
}
