// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command cluster runs a real Kubernetes cluster on one Linux machine without
// a container engine: etcd, the control plane, and one or two nodes, each a
// kubelet with a container runtime, containerd by default, all built from Go modules.
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
//	      node      one per node: makes its namespaces, starts the container runtime and the kubelet
//
// The links nic0 and nic1 of a node are veths to the bridge "switch", which
// takes the place of the switch that a real machine's NICs are connected to.
package main

import (
	"context"
	"encoding/json"
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
	"github.com/dra-shared/dra-driver-shared/test/cluster/kindnode"
)

var errUsage = errors.New(`usage:
  cluster up     --dir DIR [--nodes 0|1|2] [--gates GATES] [--kubernetes VERSION] [--kubelet VERSION]
                 [--runtime containerd|containerd-1.7|cri-o] [--oci-runtime runc|crun]
                 [--image TAR]...          start a cluster and wait until its nodes are Ready
  cluster gates  --dir DIR GATES           restart the components with other feature gates
  cluster stop   --dir DIR COMPONENT       kill a component of the control plane, such as kube-apiserver
  cluster start  --dir DIR COMPONENT       start a component that stop has killed
  cluster down   --dir DIR                 end the cluster and remove everything it created
  cluster id     --dir DIR                 print the prefix of the names of the cluster's cgroups
  cluster load   --dir DIR TAR...          import images into every node
  cluster join   --dir DIR --name NODE --out DIR2
                                           write the files with which another machine runs a node
  cluster build  [--kubernetes VERSION] [--kubelet VERSION] [--runtime NAME]
                                           build the cluster's binaries into the cache
  cluster binaries                         build them, and print their directories as JSON
  cluster kind-node                        build a node image of kind into the cache, and print the path of its
                                           archive, for docker load
  cluster image  --contents FILE --tag NAME:TAG --out TAR [--arch amd64|arm64]
                                           write an image archive
  cluster compare TAR TAR                  compare the files and the configuration of two images`)

const gatesUsage = "feature gates: default, all (every DRA and workload gate), " +
	"capacity (turns consumable capacity on where it is off by default), " +
	"no-capacity (turns consumable capacity off), or no-granular-status (turns the granular authorization " +
	"of claims' status off)"

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
		version = flags.String("kubernetes", build.KubernetesVersion, "version of Kubernetes")
		kubelet = flags.String("kubelet", "", "version of the nodes' kubelets; the default is that of --kubernetes")
		cri     = flags.String("runtime", build.Containerd, "container runtime: containerd, containerd-1.7, or cri-o")
		oci     = flags.String("oci-runtime", "runc", "OCI runtime: runc or crun")
		source  = flags.String("source", "test/cluster", "directory of this module, whose go.mod files pin the binaries")
		name    = flags.String("name", "", "node name: n1, n2, ..., or n9")
		list    = flags.String("contents", "", "content list of the image: lines of SOURCE DESTINATION")
		tag     = flags.String("tag", "", "name and tag of the image")
		out     = flags.String("out", "", "path of the image archive, or directory of the files, to write")
		arch    = flags.String("arch", runtime.GOARCH, "processor architecture of the image's binaries")
		images  []string
	)
	flags.Func("image", "image archive to import into every node (repeatable)", func(s string) error {
		abs, err := filepath.Abs(s)
		images = append(images, abs)
		return err
	})
	if verb == "oci" { // internal; its arguments are those of the OCI runtime
		return execOCIRuntime(args[1:])
	}
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	c, err := newCluster(*dir)
	if err != nil {
		return err
	}
	versions := build.Versions{Kubernetes: *version, Kubelet: *kubelet, Runtime: *cri}
	switch verb {
	case "up":
		return c.up(ctx, options{Nodes: *nodes, Gates: *gates, Versions: versions, OCIRuntime: *oci, Images: images}, *source)
	case "down":
		return c.down()
	case "id":
		fmt.Println(c.id)
		return nil
	case "gates":
		return c.setGates(flags.Args())
	case "stop", "start":
		if flags.NArg() != 1 {
			return errUsage
		}
		if verb == "stop" {
			return c.stop(flags.Arg(0))
		}
		return c.start(flags.Arg(0))
	case "join":
		return c.join(*name, *out)
	case "load":
		return c.load(ctx, flags.Args())
	case "build":
		_, err := build.Binaries(ctx, *source, versions, os.Stdout)
		return err
	case "binaries":
		dirs, err := build.Binaries(ctx, *source, versions, os.Stderr)
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(dirs)
	case "kind-node":
		dir, err := kindnode.Build(ctx, *source, os.Stderr)
		if err != nil {
			return err
		}
		fmt.Println(filepath.Join(dir, kindnode.Archive))
		return nil
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
