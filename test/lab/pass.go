// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/kernelcheck"
	"github.com/dra-shared/dra-driver-shared/test/lab/kernel"
	"github.com/dra-shared/dra-driver-shared/test/lab/matrix"
)

// kernelPackages are the packages with tests that depend on the kernel.
var kernelPackages = []string{"netdev", "netdev/bpffs", "netdev/classify", "netdev/classify/trial"}

// A quick pass runs the tests and stories with names that match these. On the kernel, it tests that the kernel accepts
// the programs, the traffic of shares, attacks, links, and how the driver finds NICs. On the node, it runs a story that
// measures, and one that restarts a container. The others measure for longer, load the programs in other ways, which
// takes seconds in a guest, wait for the kubelet to try again, or install the chart again.
const (
	quickTests = "^(TestRun|TestMount|TestProgram_(drops|onlyCounts|gateway)|" +
		"TestTraffic_onStackedNIC|TestRawFrames|TestForwardedByNode_shareCannot|" +
		"TestReceived_forOtherAddress|TestInspect_bridge|" +
		"TestBridgeMode_(delivers|limitsBroadcasts)|TestFairQueue|" +
		"TestAttack_(rawFrames|gateway|additionalLink|modeBridge|sourceMode$|content)|" +
		"TestIdentity_(nodeARP|delayedRepliesWith)|" +
		"TestQueues_(frames|limitShares|follow)|" +
		"TestInventory_List|TestNode_(Attach|Detach|Read|Watch_reports|Manage_takesOver))" +
		"|^TestForwardedByNode_framesThroughVLANHaveGuarantee$/^the_VLAN_is_created_later" +
		"|^TestAttack_kernelARPWithForeignAddress$/^of_a_sibling" +
		"|^TestAttack_listedSenders$/^a_link_that_is_down"
	quickStories = "^(grants|node|multiple-containers)$"
)

// pass is the run of all tests of the lab on one kernel.
type pass struct {
	selector string
	append   []string
	quick    bool
	parts    string
}

// runPass runs the kernel pass and the node pass on each kernel, and writes the
// results.
func runPass(ctx context.Context, cache string, args []string) (int, error) {
	var p pass
	flags := flag.NewFlagSet("lab pass", flag.ContinueOnError)
	flags.BoolVar(&p.quick, "quick", false, "run fewer tests and stories")
	flags.StringVar(&p.parts, "only", "", "run only this part: kernel or node")
	flags.Func("append", "argument for the kernels (repeatable)", func(s string) error {
		p.append = append(p.append, s)
		return nil
	})
	table := flags.String("matrix", "", "file whose section about kernels receives the results")
	if err := flags.Parse(args); err != nil {
		return 2, err
	}
	if flags.NArg() == 0 || p.parts != "" && p.parts != "kernel" && p.parts != "node" {
		return 2, errUsage
	}
	status := 0
	for _, selector := range flags.Args() {
		p.selector = selector
		row, err := p.run(ctx, cache)
		if ctx.Err() != nil {
			return 1, context.Cause(ctx)
		}
		if err != nil {
			return 1, fmt.Errorf("kernel %s: %w", selector, err)
		}
		fmt.Printf("lab: %s\n", row)
		if row.Failed() {
			status = 1
		}
		if *table == "" {
			continue
		}
		if err := matrix.Update(*table, row); err != nil {
			return 1, err
		}
	}
	return status, nil
}

// run returns the row of one kernel. It returns an error if the tests could not
// run; tests that fail are part of the row.
func (p pass) run(ctx context.Context, cache string) (row matrix.Row, err error) {
	k, err := kernel.Fetch(ctx, p.selector, filepath.Join(cache, "kernels"))
	if err != nil {
		return row, err
	}
	row = matrix.Row{
		Kernel: k.Release, Arguments: strings.Join(p.append, " "), Date: time.Now().UTC().Format(time.DateOnly),
	}
	fmt.Printf("lab: pass on Linux %s %s\n", row.Kernel, row.Arguments)
	if p.parts != "node" {
		if err := p.kernel(ctx, cache, k, &row); err != nil {
			return row, err
		}
	}
	if p.parts != "kernel" {
		if err := p.node(ctx, cache, &row); err != nil {
			return row, err
		}
	}
	return row, nil
}

// kernel runs the tests of kernelPackages in one guest. They fail if a check that the kernel is expected to pass
// does not pass.
func (p pass) kernel(ctx context.Context, cache string, k kernel.Kernel, row *matrix.Row) error {
	dir, err := os.MkdirTemp("", "lab-test-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	test := kernelTest{
		selector: p.selector, append: p.append, timeout: p.testTimeout() + 2*time.Minute, cpus: 2, memoryMiB: 1536, dir: dir,
	}
	test.job.Dir = "/tmp"
	// The tests run in the initial namespaces, as the plugin does on most nodes; see package nstest.
	test.job.Env = []string{
		"NSTEST_INSIDE=1", kernelcheck.Variable + "=" + strings.Join(expectedChecks(k.Release, p.append), " "),
	}
	if err := test.add(ctx, kernelPackages); err != nil {
		return err
	}
	pattern := "."
	if p.quick {
		pattern = quickTests
	}
	start := time.Now()
	r, status, err := withRerun(ctx, pattern, 0, func(ctx context.Context, pattern string) (result, int, error) {
		test.job.Args = []string{"-test.v", "-test.timeout=" + p.testTimeout().String(), "-test.run=" + pattern}
		var output bytes.Buffer
		status, err := test.run(ctx, cache, io.MultiWriter(&output, os.Stdout))
		return readResult(output.String()), status, err
	})
	row.Key = r.strongestKey()
	if err == nil {
		err = checkKey(row.Key, k.Release, p.append)
	}
	row.Tests = describe(r, status, err, time.Since(start))
	return nil
}

// testTimeout limits the time of a package's tests, and, with two minutes for the guest, of all packages' tests. They
// take about 15 minutes on two idle processors, most of it in netdev/classify.
func (p pass) testTimeout() time.Duration {
	if p.quick {
		return 15 * time.Minute
	}
	return 30 * time.Minute
}

// errNotInstalled is the error of a cluster with a running node if the chart does not become ready there.
var errNotInstalled = errors.New("the chart does not become ready")

// node runs the stories on a cluster with a guest as its node.
func (p pass) node(ctx context.Context, cache string, row *matrix.Row) error {
	pattern := "."
	if p.quick {
		pattern = quickStories
	}
	var took time.Duration
	var noNode error
	r, status, err := withRerun(ctx, pattern, 1, func(ctx context.Context, pattern string) (result, int, error) {
		b := bed{selector: p.selector, append: p.append, dir: ".cluster-lab", cpus: 2, memoryMiB: 1280}
		defer b.down(ctx)
		if err := b.up(ctx, cache); err != nil {
			if ctx.Err() != nil || b.guest == nil {
				noNode = err
				return result{}, 1, err
			}
			fmt.Println("lab:", err)
			return result{}, 1, errNotInstalled
		}
		var output bytes.Buffer
		start := time.Now()
		status, err := b.stories(ctx, pattern, io.MultiWriter(&output, os.Stdout))
		took += time.Since(start)
		return readResult(output.String()), status, err
	})
	row.Stories = describe(r, status, err, took)
	return noNode
}

// describe returns the result for the table. Tests that end with an error without a
// failed test, because of a timeout for example, have failed.
func describe(r result, status int, err error, took time.Duration) string {
	text := fmt.Sprintf("%s in %.0f s", r, took.Seconds())
	if err == nil && status != 0 && len(r.failed) == 0 {
		err = errors.New("the tests ended early")
	}
	if err != nil {
		first, _, _ := strings.Cut(err.Error(), "\n")
		return matrix.Failed(first + "; " + text)
	}
	return text
}
