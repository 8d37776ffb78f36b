// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command lab runs tests on kernels that this machine does not run, in virtual
// machines that QEMU emulates. Kernels come from the package archive of Debian.
//
//	lab test      boots a kernel with only test binaries, and returns their exit status
//	lab up        starts a cluster with a guest as its node
//	lab stories   runs the stories of test/e2e on such a cluster
//	lab pass      runs the tests of netdev and the stories on each of several kernels
//	lab fetch     fetches kernels into the cache
//
// In a guest, this program is process 1 (see package vminit).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/dra-shared/dra-driver-shared/test/lab/kernel"
	"github.com/dra-shared/dra-driver-shared/test/lab/vminit"
)

var errUsage = errors.New(`usage of lab:
  lab test   --kernel KERNEL [flags] BINARY|PACKAGE... [-- ARGUMENTS]
                       run static binaries, or the tests of packages, in a guest
  lab up     --kernel KERNEL [flags]
                       start a cluster whose node is a guest
  lab stories --kernel KERNEL [flags]
                       run stories of test/e2e on a cluster whose node is a guest
  lab pass [flags] KERNEL...
                       run the tests of netdev in a guest, and stories on a node
  lab fetch  KERNEL... fetch kernels, and print their releases
  lab agent            run the commands of lab exec (in a guest)
  lab exec ADDRESS -- COMMAND...
                       run a command in a guest
KERNEL is a series (6.12), a series and a flavor (6.12-amd64), a package, or a package file;
'lab VERB -h' lists the flags of a verb`)

func main() {
	if os.Getpid() == 1 {
		vminit.Main()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	status, err := run(ctx, os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		status = max(status, 1)
	}
	os.Exit(status)
}

// run returns the exit status of the program.
func run(ctx context.Context, args []string) (int, error) {
	if len(args) == 0 {
		return 2, errUsage
	}
	if slices.Contains([]string{"help", "-h", "-help", "--help"}, args[0]) {
		fmt.Println(errUsage)
		return 0, nil
	}
	cache, err := os.UserCacheDir()
	if err != nil && args[0] != "agent" && args[0] != "exec" { // a service does not have a HOME
		return 1, fmt.Errorf("find the cache directory: %w: set HOME or XDG_CACHE_HOME", err)
	}
	cache = filepath.Join(cache, "dra-shared", "lab")
	switch args[0] {
	case "test":
		return runTest(ctx, cache, args[1:])
	case "up":
		return runUp(ctx, cache, args[1:])
	case "stories":
		return runStories(ctx, cache, args[1:])
	case "pass":
		return runPass(ctx, cache, args[1:])
	case "agent":
		return runAgent(ctx, args[1:])
	case "exec":
		return runExec(ctx, args[1:])
	case "fetch":
		for _, selector := range args[1:] {
			k, err := kernel.Fetch(ctx, selector, filepath.Join(cache, "kernels"))
			if err != nil {
				return 1, err
			}
			fmt.Println(k.Release)
		}
		return 0, nil
	default:
		return 2, fmt.Errorf("unknown verb %q\n%w", args[0], errUsage)
	}
}

// parse parses flags and returns the arguments before and after "--".
func parse(flags *flag.FlagSet, args []string) (before, after []string, err error) {
	for i, arg := range args {
		if arg == "--" {
			args, after = args[:i], args[i+1:]
			break
		}
	}
	if err := flags.Parse(args); err != nil {
		return nil, nil, err
	}
	return flags.Args(), after, nil
}
