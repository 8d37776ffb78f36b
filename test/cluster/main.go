// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command cluster runs a real Kubernetes cluster on one Linux machine without
// a container engine: etcd, the control plane, and one or two nodes, each a
// kubelet with containerd and runc, all built from Go modules.
//
// A cluster is identified by its directory. Its processes run in private
// network, mount, and PID namespaces below one process, so that the cluster ends
// when this process ends:
//
//	up      prints progress and returns when the nodes are Ready
//	guard   the only process outside the namespaces; it holds the cluster's lock,
//	        ends the cluster on SIGTERM, and removes what the kernel leaves
//	  init      process 1 of the PID namespace; it reaps orphans
//	    sandbox   makes the mounts and bridges and starts the control plane
//	      node      one per node: makes its namespaces, starts containerd and kubelet
//
// The links nic0 and nic1 of a node are veths to the bridge "switch", which
// takes the place of the switch that a real machine's NICs are connected to.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/dra-shared/dra-driver-shared/test/cluster/build"
	"github.com/dra-shared/dra-driver-shared/test/cluster/image"
)

var errUsage = errors.New(`usage:
  cluster up     --dir DIR [--nodes 0|1|2] [--gates default|all|capacity|no-capacity] [--kubernetes VERSION]
                 [--image TAR]...          start a cluster and wait until its nodes are Ready
  cluster gates  --dir DIR default|all     restart the components with other feature gates
  cluster down   --dir DIR                 end the cluster and remove everything it created
  cluster id     --dir DIR                 print the prefix of the names of the cluster's cgroups
  cluster load   --dir DIR TAR...          import images into every node
  cluster build  [--kubernetes VERSION]    build the cluster's binaries into the cache
  cluster image  --contents FILE --tag NAME:TAG --out TAR [--arch amd64|arm64]
                                           write an image archive
  cluster compare TAR TAR                  compare the files and the configuration of two images`)

const gatesUsage = "feature gates: default, all (every DRA and workload gate), " +
	"capacity (turns consumable capacity on where it is off by default), " +
	"or no-capacity (turns consumable capacity off)"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	verb := args[0]
	var (
		flags   = flag.NewFlagSet(verb, flag.ContinueOnError)
		dir     = flags.String("dir", ".cluster", "directory of the cluster")
		nodes   = flags.Int("nodes", 1, "number of nodes: 1, 2, or 0 for only a control plane")
		gates   = flags.String("gates", "default", gatesUsage)
		version = flags.String("kubernetes", build.KubernetesVersion, "Kubernetes version; only the default has nodes")
		source  = flags.String("source", "test/cluster", "directory of this module, whose go.mod files pin the binaries")
		name    = flags.String("name", "", "node name (internal)")
		list    = flags.String("contents", "", "content list of the image: lines of SOURCE DESTINATION")
		tag     = flags.String("tag", "", "name and tag of the image")
		out     = flags.String("out", "", "path of the image archive to write")
		arch    = flags.String("arch", runtime.GOARCH, "processor architecture of the image's binaries")
		images  []string
	)
	flags.Func("image", "image archive to import into every node (repeatable)", func(s string) error {
		abs, err := filepath.Abs(s)
		images = append(images, abs)
		return err
	})
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	c, err := newCluster(*dir)
	if err != nil {
		return err
	}
	switch verb {
	case "up":
		return c.up(ctx, options{Nodes: *nodes, Gates: *gates, Kubernetes: *version, Images: images}, *source)
	case "down":
		return c.down()
	case "id":
		fmt.Println(c.id)
		return nil
	case "gates":
		return c.setGates(flags.Args())
	case "load":
		return c.load(ctx, flags.Args())
	case "build":
		_, err := build.Binaries(ctx, *source, *version, os.Stdout)
		return err
	case "image":
		return image.Write(*list, *tag, *arch, *out)
	case "compare":
		if flags.NArg() != 2 {
			return errUsage
		}
		return image.Compare(flags.Arg(0), flags.Arg(1))
	case "guard":
		return c.guard()
	case "init":
		return initProcess(os.Args[0], append([]string{"sandbox"}, args[1:]...))
	case "sandbox":
		return c.sandbox(ctx)
	case "node":
		return c.node(ctx, *name)
	default:
		return fmt.Errorf("unknown verb %q\n%w", verb, errUsage)
	}
}
