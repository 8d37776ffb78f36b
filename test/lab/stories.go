// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
	"github.com/dra-shared/dra-driver-shared/test/lab/agent"
	"github.com/dra-shared/dra-driver-shared/test/lab/guest"
	"github.com/dra-shared/dra-driver-shared/test/lab/kernel"
	"github.com/dra-shared/dra-driver-shared/test/lab/node"
)

// bed is a cluster with a guest as its only node.
type bed struct {
	selector        string
	append          []string
	dir             string
	cpus, memoryMiB int
	bare            bool
	cluster         *clusterclient.Cluster // nil before it runs
	guest           *guest.Guest           // nil before it runs
}

func (b *bed) flags(name string) *flag.FlagSet {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.StringVar(&b.selector, "kernel", "6.12", "kernel of the node")
	flags.StringVar(&b.dir, "dir", ".cluster-lab", "directory of the cluster")
	flags.Func("append", "argument for the kernel (repeatable)", func(s string) error {
		b.append = append(b.append, s)
		return nil
	})
	flags.IntVar(&b.cpus, "cpus", 2, "number of processors of the node")
	flags.IntVar(&b.memoryMiB, "memory", 1280, "memory of the node in MiB")
	return flags
}

// runUp starts a cluster with a guest as its node, and ends it when it is
// interrupted.
func runUp(ctx context.Context, cache string, args []string) (int, error) {
	var b bed
	flags := b.flags("lab up")
	flags.BoolVar(&b.bare, "bare", false, "do not install the chart")
	if err := flags.Parse(args); err != nil {
		return 2, err
	}
	defer b.down(ctx)
	if err := b.up(ctx, cache); err != nil {
		return 1, err
	}
	fmt.Printf("lab: the cluster is in %s: kubectl and node n1 run commands; an interrupt ends it\n", b.cluster.Dir)
	select {
	case <-ctx.Done():
		return 0, nil
	case <-b.guest.Done():
		return 1, fmt.Errorf("the guest ended: %w", b.guest.Wait())
	}
}

// runStories runs the stories of test/e2e for a node in a guest.
func runStories(ctx context.Context, cache string, args []string) (int, error) {
	var b bed
	flags := b.flags("lab stories")
	pattern := flags.String("run", ".", "regular expression for the names of the stories; uninstall is one")
	if err := flags.Parse(args); err != nil {
		return 2, err
	}
	defer b.down(ctx)
	if err := b.up(ctx, cache); err != nil {
		return 1, err
	}
	return b.stories(ctx, *pattern, os.Stdout)
}

// stories runs the stories with names that match the pattern, and returns the exit status of the tests. The last one
// uninstalls the chart.
func (b *bed) stories(ctx context.Context, pattern string, output io.Writer) (int, error) {
	selected, err := regexp.Compile(pattern)
	if err != nil {
		return 2, err
	}
	status, err := b.runTests(ctx, "^TestGuestNode$/"+pattern, output)
	if err != nil || !selected.MatchString("uninstall") {
		return status, err
	}
	uninstallStatus, err := b.runTests(ctx, "^TestFaults$/^uninstall$", output)
	return max(status, uninstallStatus), err
}

// runTests runs tests of test/e2e on the cluster and returns their exit status.
func (b *bed) runTests(ctx context.Context, pattern string, output io.Writer) (int, error) {
	tests := exec.CommandContext(ctx, filepath.Join(b.cluster.Root, "bin/e2e.test"),
		"-test.v", "-test.parallel=1", "-test.timeout=20m", "-test.run="+pattern)
	tests.Dir = filepath.Join(b.cluster.Root, "test/e2e")
	tests.Env = append(os.Environ(), "E2E_CLUSTER="+b.cluster.Dir, "E2E_GUEST=1", "E2E_CARRIES="+carries,
		"E2E_HELM="+strings.Join(b.cluster.Values, " "))
	tests.Stdout, tests.Stderr = output, output
	tests.Cancel = func() error { return tests.Process.Signal(os.Interrupt) }
	tests.WaitDelay = 10 * time.Second
	err := tests.Run()
	if ctx.Err() != nil {
		return 1, context.Cause(ctx)
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(exit.ExitCode(), 1), nil
	}
	return 0, err
}

// carries is the rate in Mbit/s that an emulated node reaches on a busy machine.
// Stories expect more of a share with a larger grant only as a limit.
const carries = "15"

// helm returns arguments of Helm for each installation of the chart.
func (b *bed) helm() []string {
	// An emulated processor needs longer than the clusters of other tests.
	args := []string{"--timeout", "300s"}
	if node.SELinux(b.append) {
		args = append(args, "--set", "plugin.seLinuxOptions.type=spc_t")
	}
	return args
}

// up starts the cluster and its node, and installs the chart. It fails if a cluster
// already runs in the directory.
func (b *bed) up(ctx context.Context, cache string) error {
	cluster, err := clusterclient.New(b.dir)
	if err != nil {
		return err
	}
	cluster.Values = b.helm()
	k, err := kernel.Fetch(ctx, b.selector, filepath.Join(cache, "kernels"))
	if err != nil {
		return err
	}
	modules, err := k.Staged(ctx, guestModules, filepath.Join(cache, "modules"))
	if err != nil {
		return err
	}
	options := clusterclient.Options{Nodes: clusterclient.NoNodes, Bare: true}
	if err := cluster.Up(ctx, options, os.Stdout); err != nil {
		return err
	}
	b.cluster = cluster // down ends it from here on
	root := b.cluster.Root
	b.guest, err = node.Start(ctx, node.Config{
		Cluster: b.cluster, Name: "n1", Kernel: k, Modules: modules, Append: b.append, Cache: cache,
		Images: []string{
			filepath.Join(root, "bin/images/dra-driver-shared.tar"), filepath.Join(root, "bin/images/nettool.tar"),
		},
		Programs: []string{filepath.Join(root, "bin/nettool")},
		CPUs:     b.cpus, MemoryMiB: b.memoryMiB,
	}, os.Stdout)
	if err != nil || b.bare {
		return err
	}
	start := time.Now()
	if err := b.cluster.Install(ctx); err != nil {
		return err
	}
	fmt.Printf("lab: the chart is installed in %.0f s\n", time.Since(start).Seconds())
	return nil
}

// down ends the guest and the cluster.
func (b *bed) down(ctx context.Context) {
	if b.guest != nil {
		b.guest.Stop()
	}
	if b.cluster == nil {
		return
	}
	if err := b.cluster.Down(context.WithoutCancel(ctx)); err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
	}
}

// runAgent serves the commands of tests in a guest.
func runAgent(ctx context.Context, args []string) (int, error) {
	flags := flag.NewFlagSet("lab agent", flag.ContinueOnError)
	address := flags.String("listen", ":"+node.AgentPort, "address to listen on")
	if err := flags.Parse(args); err != nil {
		return 2, err
	}
	listener, err := net.Listen("tcp", *address)
	if err != nil {
		return 1, err
	}
	return 0, agent.Serve(ctx, listener, os.Getenv("PATH"))
}

// runExec runs a command in a guest.
func runExec(ctx context.Context, args []string) (int, error) {
	before, after, err := parse(flag.NewFlagSet("lab exec", flag.ContinueOnError), args)
	if err != nil {
		return 2, err
	}
	if len(before) != 1 || len(after) == 0 {
		return 2, errUsage
	}
	return agent.Run(ctx, before[0], after, os.Stdin, os.Stdout, os.Stderr)
}
