// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command cluster runs a real Kubernetes cluster on one Linux machine without
// a container engine: etcd, the control plane, and one or two nodes, each a
// kubelet with a container runtime, containerd by default, all built from Go modules.
//
// A cluster is identified by its directory. Its processes run in private network, mount, and PID namespaces below one
// process. The cluster ends when this process ends:
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
	"slices"
	"syscall"

	"github.com/dra-shared/dra-driver-shared/test/cluster/build"
	"github.com/dra-shared/dra-driver-shared/test/cluster/image"
	"github.com/dra-shared/dra-driver-shared/test/cluster/kindnode"
)

var errUsage = errors.New(`usage:
  cluster up     --dir DIR [--nodes 0|1|2] [--gates GATES] [--kubernetes VERSION] [--kubelet VERSION]
                 [--runtime containerd|containerd-1.7|cri-o|cri-o-1.34] [--oci-runtime runc|crun]
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
	"no-capacity (turns consumable capacity off), no-granular-status (turns the granular authorization " +
	"of claims' status off), or workload (PodGroups of Kubernetes, without their claims)"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

// arguments are the parsed arguments of a verb.
type arguments struct {
	*flag.FlagSet
	dir, source, name  string
	contents, tag, out string // of an image
	arch               string
	options            options
}

func parse(verb string, args []string) (*arguments, error) {
	a := &arguments{FlagSet: flag.NewFlagSet(verb, flag.ContinueOnError)}
	versions := &a.options.Versions
	a.StringVar(&a.dir, "dir", ".cluster", "directory of the cluster")
	a.IntVar(&a.options.Nodes, "nodes", 1, "number of nodes: 1, 2, or 0 for only a control plane")
	a.StringVar(&a.options.Gates, "gates", "default", gatesUsage)
	a.StringVar(&versions.Kubernetes, "kubernetes", build.KubernetesVersion, "version of Kubernetes")
	a.StringVar(&versions.Kubelet, "kubelet", "", "version of the nodes' kubelets; default: the version of --kubernetes")
	a.StringVar(&versions.Runtime, "runtime", build.Containerd,
		"container runtime: containerd, containerd-1.7, cri-o, or cri-o-1.34")
	a.StringVar(&a.options.OCIRuntime, "oci-runtime", "runc", "OCI runtime: runc or crun")
	a.StringVar(&a.source, "source", "test/cluster", "directory of this module, whose go.mod files pin the binaries")
	a.StringVar(&a.name, "name", "", "node name: n1, n2, ..., or n9")
	a.StringVar(&a.contents, "contents", "", "content list of the image: lines of SOURCE DESTINATION")
	a.StringVar(&a.tag, "tag", "", "name and tag of the image")
	a.StringVar(&a.out, "out", "", "path of the image archive, or directory of the files, to write")
	a.StringVar(&a.arch, "arch", runtime.GOARCH, "processor architecture of the image's binaries")
	a.Func("image", "image archive to import into every node (repeatable)", func(s string) error {
		abs, err := filepath.Abs(s)
		a.options.Images = append(a.options.Images, abs)
		return err
	})
	return a, a.Parse(args)
}

// isHelp reports whether the argument asks for the usage.
func isHelp(argument string) bool {
	return slices.Contains([]string{"help", "-h", "-help", "--help"}, argument)
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	verb := args[0]
	if isHelp(verb) {
		fmt.Println(errUsage)
		return nil
	}
	if verb == "oci" { // it has the arguments of the OCI runtime
		return execOCIRuntime(args[1:])
	}
	a, err := parse(verb, args[1:])
	if err != nil {
		return err
	}
	switch verb {
	case "build", "binaries", "kind-node", "image", "compare":
		return runBuild(ctx, verb, a)
	case "init":
		return initProcess(os.Args[0], append([]string{"sandbox"}, args[1:]...))
	}
	c, err := newCluster(a.dir)
	if err != nil {
		return err
	}
	return c.run(ctx, verb, a)
}

// runBuild runs the verbs that do not need a cluster.
func runBuild(ctx context.Context, verb string, a *arguments) error {
	switch verb {
	case "build":
		_, err := build.Binaries(ctx, a.source, a.options.Versions, os.Stdout)
		return err
	case "binaries":
		dirs, err := build.Binaries(ctx, a.source, a.options.Versions, os.Stderr)
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(dirs)
	case "kind-node":
		dir, err := kindnode.Build(ctx, a.source, os.Stderr)
		if err != nil {
			return err
		}
		fmt.Println(filepath.Join(dir, kindnode.Archive))
		return nil
	case "image":
		return image.Write(a.contents, a.tag, a.arch, a.out)
	default: // compare
		if a.NArg() != 2 {
			return errUsage
		}
		return image.Compare(a.Arg(0), a.Arg(1))
	}
}

// run runs the verbs of a cluster, and the verbs that its processes start each other with.
func (c *cluster) run(ctx context.Context, verb string, a *arguments) error {
	switch verb {
	case "up":
		return c.up(ctx, a.options, a.source)
	case "down":
		return c.down()
	case "id":
		fmt.Println(c.id)
		return nil
	case "gates":
		return c.setGates(a.Args())
	case "stop", "start":
		if a.NArg() != 1 {
			return errUsage
		}
		if verb == "stop" {
			return c.stop(a.Arg(0))
		}
		return c.start(a.Arg(0))
	case "join":
		return c.join(a.name, a.out)
	case "load":
		return c.load(ctx, a.Args())
	case "guard":
		return c.guard()
	case "sandbox":
		return c.sandbox(ctx)
	case "node":
		return c.node(ctx, a.name)
	default:
		return fmt.Errorf("unknown verb %q\n%w", verb, errUsage)
	}
}
