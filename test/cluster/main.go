// Command cluster runs a real Kubernetes cluster on one Linux machine without
// a container engine: etcd, the control plane, and one or two nodes, each a
// kubelet with containerd and runc, all built from Go modules.
//
// A running cluster is called a bed and lives in one directory. Everything in
// it runs in private network, mount and PID namespaces below one process, so
// ending that process ends the bed:
//
//	up      prints progress, returns when the nodes are Ready
//	guard   the bed's only process outside the namespaces; it holds the bed's
//	        lock, ends the bed on SIGTERM, and removes what the kernel does not
//	  init      process 1 of the bed; reaps
//	    sandbox   mounts, the two bridges, the control plane
//	      node      one per node: its namespaces, containerd, kubelet
//
// The node's links nic0 and nic1 are veths to the bridge "switch", which
// stands for the network that a machine's real NICs are plugged into.
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
  cluster up     --dir DIR [--nodes 0|1|2] [--gates default|all|capacity|no-capacity] [--kubernetes VERSION] [--image TAR]...
  cluster gates  --dir DIR default|all     start its components again with other feature gates
  cluster down   --dir DIR
  cluster id     --dir DIR                  what the names of its cgroups begin with
  cluster load   --dir DIR TAR...          import images into every node
  cluster build  [--kubernetes VERSION]    build the cluster's binaries into the cache
  cluster image  --contents FILE --tag NAME:TAG --out TAR [--arch amd64|arm64]
  cluster compare TAR TAR                  compare the files and the configuration of two images`)

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
		dir     = flags.String("dir", ".cluster", "the bed's directory")
		nodes   = flags.Int("nodes", 1, "how many nodes: 1, 2, or none, for a control plane alone")
		gates   = flags.String("gates", "default", "feature gates: default, all (every DRA and workload gate), capacity (consumable capacity, where it is off by default), or no-capacity (a cluster that is too old to share)")
		version = flags.String("kubernetes", build.KubernetesVersion, "version of Kubernetes; of another than the default there are no nodes")
		source  = flags.String("source", "test/cluster", "this module's directory, to build the cluster's binaries from")
		name    = flags.String("name", "", "node name (internal)")
		list    = flags.String("contents", "", "an image's content list: lines of SOURCE DESTINATION")
		tag     = flags.String("tag", "", "an image's name and tag")
		out     = flags.String("out", "", "where the image's archive goes")
		arch    = flags.String("arch", runtime.GOARCH, "the processor architecture of the image's binaries")
		images  []string
	)
	flags.Func("image", "docker archive to import into every node (repeatable)", func(s string) error {
		abs, err := filepath.Abs(s)
		images = append(images, abs)
		return err
	})
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	bed, err := newBed(*dir)
	if err != nil {
		return err
	}
	switch verb {
	case "up":
		return bed.up(ctx, options{Nodes: *nodes, Gates: *gates, Kubernetes: *version, Images: images}, *source)
	case "down":
		return bed.down()
	case "id":
		fmt.Println(bed.id)
		return nil
	case "gates":
		return bed.setGates(flags.Args())
	case "load":
		return bed.load(ctx, flags.Args())
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
		return bed.guard()
	case "init":
		return initProcess(os.Args[0], append([]string{"sandbox"}, args[1:]...))
	case "sandbox":
		return bed.sandbox(ctx)
	case "node":
		return bed.node(ctx, *name)
	default:
		return fmt.Errorf("unknown verb %q\n%w", verb, errUsage)
	}
}
