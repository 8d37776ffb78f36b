// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package kind creates a cluster of kind with the driver and a NIC to share, with the commands that users run. It also
// does what users do not need to do: it finds or starts a Docker daemon (package engine), builds a node image where
// none can be pulled (test/cluster/kindnode), and configures the cluster for machines where a kubelet does not run by
// default (config.go).
//
// The NIC is a Docker network. Each node is connected to it as eth1. A container of that network answers measurements.
package kind

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/kind/engine"
)

const (
	// clusterName is the name in demo/kind/*.yaml. Docker's names of nodes begin with it.
	clusterName = "dra-shared"
	// network is the Docker network that the nodes share. Docker takes the default
	// route of a container from the network that is first in alphabetical order, which
	// must be kind's.
	network = "kind-storage"
	// kindNetwork is the network that kind creates and does not remove.
	kindNetwork = "kind"
	server      = "dra-shared-server"
	// ServerAddress is where a server for `nettool measure` answers.
	ServerAddress = "10.20.255.254:5001"
	// standIn is the name of the node image that test/cluster/kindnode builds.
	standIn = "kindest/node:dra-shared-local"
	nettool = "registry.local/nettool:dev"
)

// Cluster is a cluster of kind. There can be one for each Docker daemon.
type Cluster struct {
	// Root is the root directory of the repository; its bin directory holds binaries
	// and images.
	Root string
	// Dir is the directory of the cluster's files.
	Dir string
	// Out receives the progress of Up, Demo, and Down.
	Out io.Writer

	state state
}

// state records the resources that Down removes. Each resource is recorded before it is created.
type state struct {
	Engine *engine.Engine
	// Started reports whether Up has found the names of its resources unused, and creates the resources.
	Started bool
	// Ready reports whether Up has created all of them.
	Ready    bool
	Networks []string
	Images   []string
	// Sysctls are the values of the machine's sysctls that a kubelet changes.
	Sysctls map[string]string
}

// Up creates a cluster with one node, or with a control plane and a worker, installs the
// chart, and returns when its pods are ready. It first removes what an interrupted run
// left in Dir. It returns ErrExists if Dir has a complete cluster. After another error,
// call Down.
func (c *Cluster) Up(ctx context.Context, nodes int) error {
	configs := map[int]string{1: "one-node.yaml", 2: "two-nodes.yaml"}
	config, ok := configs[nodes]
	if !ok {
		return fmt.Errorf("%d nodes: want 1 or 2", nodes)
	}
	if err := c.removeUnfinished(ctx); err != nil {
		return err
	}
	if err := c.findEngine(ctx); err != nil {
		return err
	}
	if err := c.reserveNames(ctx); err != nil {
		return err
	}
	image, err := c.nodeImage(ctx)
	if err != nil {
		return err
	}
	config, err = c.adaptConfig(filepath.Join("demo/kind", config), image != "")
	if err != nil {
		return err
	}
	start := time.Now()
	if err := c.createCluster(ctx, config, image); err != nil {
		return err
	}
	c.say("The cluster is Ready after %.0f s", time.Since(start).Seconds())
	if err := c.connectNIC(ctx); err != nil {
		return err
	}
	if err := c.installChart(ctx); err != nil {
		return err
	}
	if err := c.startServer(ctx); err != nil {
		return err
	}
	c.state.Ready = true
	return c.save()
}

// ErrExists means that a cluster exists that an earlier Up created.
var ErrExists = errors.New("a cluster exists: remove it with `make kind-down`")

// removeUnfinished removes what remains of a cluster whose creation was interrupted. It returns ErrExists if the
// cluster is complete.
func (c *Cluster) removeUnfinished(ctx context.Context) error {
	found, err := c.load()
	if err != nil {
		return err
	}
	if found && c.state.Ready {
		return fmt.Errorf("%s: %w", c.Dir, ErrExists)
	}
	return c.Down(ctx)
}

// findEngine finds a Docker daemon, or starts one.
func (c *Cluster) findEngine(ctx context.Context) error {
	if err := os.MkdirAll(c.path("bin"), 0o755); err != nil {
		return err
	}
	c.state.Sysctls = readSysctls()
	report := func(message string) { c.say("%s", message) }
	var err error
	if c.state.Engine, err = engine.Find(ctx, c.path("docker"), c.buildRunc, report); err != nil {
		return err
	}
	return errors.Join(c.save(), c.writeScripts(ctx))
}

// reserveNames records that Down removes the resources with the names of this package. It fails if another program, or
// a user who followed the quickstart by hand, has created one of them.
func (c *Cluster) reserveNames(ctx context.Context) error {
	var errs []error
	for _, used := range []struct {
		what, remedy string
		list         []string // docker arguments that list the resource
	}{
		{"kind cluster " + clusterName, "kind delete cluster --name " + clusterName,
			[]string{"ps", "--all", "--quiet", "--filter", "label=io.x-k8s.kind.cluster=" + clusterName}},
		{"Docker network " + network, "docker network rm " + network,
			[]string{"network", "ls", "--quiet", "--filter", "name=^" + network + "$"}},
		{"container " + server, "docker rm --force " + server,
			[]string{"ps", "--all", "--quiet", "--filter", "name=^/?" + server + "$"}},
	} {
		found, err := c.state.Engine.Docker(ctx, used.list...)
		if err == nil && strings.TrimSpace(found) != "" {
			err = fmt.Errorf("the %s exists, and this command did not create it: remove it with %q", used.what, used.remedy)
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	c.state.Started = true
	return c.save()
}

// buildRunc installs and builds the dependencies of a private daemon, and returns the path of
// runc.
func (c *Cluster) buildRunc(ctx context.Context) (string, error) {
	if err := c.prerequisites(ctx, "kind-docker"); err != nil {
		return "", err
	}
	build := exec.CommandContext(ctx, "bin/cluster", "binaries")
	build.Dir, build.Stderr = c.Root, c.Out
	out, err := build.Output()
	if err != nil {
		return "", fmt.Errorf("build runc: %w", err)
	}
	var dirs struct{ Node string }
	if err := json.Unmarshal(out, &dirs); err != nil {
		return "", err
	}
	return dirs.Node + "/runc", nil
}

func (c *Cluster) prerequisites(ctx context.Context, what string) error {
	cmd := exec.CommandContext(ctx, "test/env/prerequisites.sh", what)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.Root, c.Out, c.Out
	return cmd.Run()
}

// pullTimeout limits how long a registry may take to answer. It does not limit how long
// the image takes.
const pullTimeout = 20 * time.Second

// nodeImage returns the name of the node image that was built on this machine, or an
// empty string if kind's default can be pulled.
func (c *Cluster) nodeImage(ctx context.Context) (string, error) {
	if _, err := c.state.Engine.Docker(ctx, "image", "inspect", officialImage); err == nil {
		return "", nil
	}
	reason := pull(ctx, c.state.Engine, officialImage)
	if reason == nil {
		return "", nil
	}
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	name, _, _ := strings.Cut(officialImage, "@")
	c.say("Docker cannot pull %s (%v): the nodes run an image built from Debian packages and Go modules", name, reason)
	if err := c.prerequisites(ctx, "kind-node"); err != nil {
		return "", err
	}
	build := exec.CommandContext(ctx, "bin/cluster", "kind-node")
	build.Dir, build.Stderr = c.Root, c.Out
	archive, err := build.Output()
	if err != nil {
		return "", fmt.Errorf("build the node image: %w", err)
	}
	c.state.Images = append(c.state.Images, standIn)
	if err := c.save(); err != nil {
		return "", err
	}
	_, err = c.state.Engine.Docker(ctx, "load", "--quiet", "--input", strings.TrimSpace(string(archive)))
	return standIn, err
}

// createCluster runs kind, and waits until the nodes are Ready.
func (c *Cluster) createCluster(ctx context.Context, config, image string) error {
	if _, err := c.state.Engine.Docker(ctx, "network", "inspect", kindNetwork); err != nil {
		c.state.Networks = append(c.state.Networks, kindNetwork)
	}
	if err := c.save(); err != nil {
		return err
	}
	args := []string{"bin/kind", "create", "cluster", "--config", config, "--kubeconfig", c.relative("kubeconfig")}
	if image != "" {
		args = append(args, "--image", image)
	}
	if err := c.run(ctx, args...); err != nil {
		return err
	}
	// The node has the kubectl of its version.
	_, err := c.state.Engine.Docker(ctx, "cp", "--follow-link", clusterName+"-control-plane:/usr/bin/kubectl",
		c.path("bin/kubectl"))
	if err != nil {
		return err
	}
	return c.run(ctx, "kubectl", "wait", "node", "--all", "--for=condition=Ready", "--timeout=120s")
}

// connectNIC creates the Docker network and connects each node.
func (c *Cluster) connectNIC(ctx context.Context) error {
	c.state.Networks = append(c.state.Networks, network)
	if err := c.save(); err != nil {
		return err
	}
	// Jumbo frames as on a storage network. Docker assigns addresses from the range;
	// pods have the others.
	err := c.run(ctx, "docker", "network", "create", "--internal", "--opt", "com.docker.network.driver.mtu=9000",
		"--subnet", "10.20.0.0/16", "--ip-range", "10.20.255.0/25", "--gateway", "10.20.255.126", network)
	if err != nil {
		return err
	}
	nodes, err := c.Nodes(ctx)
	if err != nil {
		return err
	}
	for _, node := range nodes {
		if err := c.run(ctx, "docker", "network", "connect", network, node); err != nil {
			return err
		}
	}
	return nil
}

// Nodes returns the names of the nodes, which are also the names of their containers.
func (c *Cluster) Nodes(ctx context.Context) ([]string, error) {
	out, err := c.Kubectl(ctx, "get", "nodes", "-o", "jsonpath={.items[*].metadata.name}")
	return strings.Fields(out), err
}

func (c *Cluster) installChart(ctx context.Context) error {
	for _, archive := range []string{"bin/images/dra-driver-shared.tar", "bin/images/nettool.tar"} {
		if err := c.run(ctx, "bin/kind", "load", "image-archive", archive, "--name", clusterName); err != nil {
			return err
		}
	}
	return c.Install(ctx)
}

// Install installs or upgrades the chart; set is a list of values for Helm's --set.
func (c *Cluster) Install(ctx context.Context, set ...string) error {
	return c.installWithin(ctx, 90*time.Second, set...)
}

// installWithin is Install with a timeout.
func (c *Cluster) installWithin(ctx context.Context, limit time.Duration, set ...string) error {
	args := []string{
		"bin/helm", "upgrade", "dra-shared", "deployments/helm/dra-driver-shared", "--install",
		"--kubeconfig", c.relative("kubeconfig"), "--namespace", "dra-shared-system", "--create-namespace",
		"--values", "demo/kind/values-kind.yaml", "--wait", "--timeout", limit.String(),
	}
	for _, s := range set {
		args = append(args, "--set", s)
	}
	if err := c.run(ctx, args...); err != nil {
		pods, _ := c.Kubectl(ctx, "describe", "pods", "-n", "dra-shared-system")
		return fmt.Errorf("%w\n%s", err, pods)
	}
	return nil
}

// startServer starts a container in the Docker network that answers measurements.
func (c *Cluster) startServer(ctx context.Context) error {
	if _, err := c.state.Engine.Docker(ctx, "image", "inspect", nettool); err != nil {
		c.state.Images = append(c.state.Images, nettool)
		if err := c.save(); err != nil {
			return err
		}
		if err := c.run(ctx, "docker", "load", "--quiet", "--input", "bin/images/nettool.tar"); err != nil {
			return err
		}
	}
	host, port, _ := strings.Cut(ServerAddress, ":")
	return c.run(ctx, "docker", "run", "--detach", "--name", server, "--network", network, "--ip", host,
		nettool, "serve", ":"+port)
}

// Demo runs the demo in the cluster.
func (c *Cluster) Demo(ctx context.Context) error {
	return c.run(ctx, "bin/demo", "--kubeconfig", c.relative("kubeconfig"), "--server", ServerAddress)
}

// Down removes the cluster and all its resources, even after Up failed or was killed.
// It succeeds if there is no cluster.
func (c *Cluster) Down(ctx context.Context) error {
	found, err := c.load()
	if err != nil {
		return err
	}
	if !found {
		return os.RemoveAll(c.Dir)
	}
	start := time.Now()
	if c.state.Engine.Private() {
		err = c.state.Engine.Stop(ctx)
	} else {
		err = c.removeFromDocker(ctx)
	}
	if err != nil {
		return err
	}
	// The nodes have ended and no longer set them.
	switch err := writeSysctls(c.state.Sysctls); {
	case errors.Is(err, os.ErrPermission):
		c.say("The kubelet changed sysctls of this machine, and only root can set them again: %v", err)
	case err != nil:
		return err
	}
	c.say("Removed the cluster in %.0f s", time.Since(start).Seconds())
	return os.RemoveAll(c.Dir)
}

// load reads the state that an earlier call saved, and reports whether there is one.
func (c *Cluster) load() (found bool, err error) {
	raw, err := os.ReadFile(c.path("state.json"))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	c.state = state{}
	if err := json.Unmarshal(raw, &c.state); err != nil {
		return false, fmt.Errorf("%s: %w", c.path("state.json"), err)
	}
	return true, nil
}

// removeFromDocker removes the resources that Up created in a daemon that other programs also use.
func (c *Cluster) removeFromDocker(ctx context.Context) error {
	if !c.state.Started {
		return nil
	}
	kind := c.Command(ctx, filepath.Join(c.Root, "bin/kind"), "delete", "cluster", "--name", clusterName,
		"--kubeconfig", c.path("kubeconfig"))
	if out, err := kind.CombinedOutput(); err != nil {
		return fmt.Errorf("kind delete cluster: %w: %s", err, out)
	}
	remove := func(args ...string) error {
		_, err := c.state.Engine.Docker(ctx, args...)
		if err != nil && strings.Contains(strings.ToLower(err.Error()), "no such ") {
			return nil
		}
		return err
	}
	err := remove("rm", "--force", "--volumes", server)
	for _, n := range c.state.Networks {
		if _, inspectErr := c.state.Engine.Docker(ctx, "network", "inspect", n); inspectErr == nil {
			err = errors.Join(err, remove("network", "rm", n))
		}
	}
	for _, image := range c.state.Images {
		err = errors.Join(err, remove("image", "rm", image))
	}
	return err
}

// Command returns a command that uses the cluster. kubectl, docker, and kind do not need additional flags.
func (c *Cluster) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := c.state.Engine.Command(ctx, name, args...)
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Dir = c.Root
	cmd.Env = append(cmd.Env, "KUBECONFIG="+c.path("kubeconfig"), "PATH="+c.path("bin")+":"+os.Getenv("PATH"))
	if strings.Contains(cmd.Path, "nsenter") || name != "kubectl" {
		return cmd
	}
	cmd.Path, cmd.Err = c.path("bin/kubectl"), nil // exec looked it up in the caller's PATH
	return cmd
}

// Kubectl runs kubectl and returns its standard output.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := c.Command(ctx, "kubectl", args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// Node runs a command in a node and returns its standard output.
func (c *Cluster) Node(ctx context.Context, node string, args ...string) (string, error) {
	return c.state.Engine.Docker(ctx, append([]string{"exec", node}, args...)...)
}

// run prints a command and runs it with its output to Out.
func (c *Cluster) run(ctx context.Context, args ...string) error {
	c.say("$ %s", strings.TrimPrefix(strings.Join(args, " "), "bin/"))
	cmd := c.Command(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = c.Out, c.Out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(args, " "), cmp.Or(ctx.Err(), err))
	}
	return nil
}

func (c *Cluster) say(format string, args ...any) { fmt.Fprintf(c.Out, format+"\n", args...) }

func (c *Cluster) path(name string) string { return filepath.Join(c.Dir, name) }

// relative returns the path of a file in Dir as users would write it in Root.
func (c *Cluster) relative(name string) string {
	if relative, err := filepath.Rel(c.Root, c.path(name)); err == nil && filepath.IsLocal(relative) {
		return relative
	}
	return c.path(name)
}

func (c *Cluster) save() error {
	raw, err := json.Marshal(c.state)
	if err != nil {
		return err
	}
	return os.WriteFile(c.path("state.json"), raw, 0o644)
}

// writeScripts writes DIR/kubectl and DIR/helm, which run these programs in the cluster from any directory, and
// DIR/network, which runs its arguments as a command in the network of the Docker daemon.
func (c *Cluster) writeScripts(ctx context.Context) (err error) {
	for name, program := range map[string]string{
		"kubectl": c.path("bin/kubectl"), "helm": filepath.Join(c.Root, "bin/helm"), "network": "env",
	} {
		args := strings.Join(c.Command(ctx, program).Args, " ")
		script := fmt.Sprintf("#!/bin/sh\nKUBECONFIG=%s exec %s \"$@\"\n", c.path("kubeconfig"), args)
		err = errors.Join(err, os.WriteFile(c.path(name), []byte(script), 0o755))
	}
	return err
}

// awaitPod waits until a pod is Ready.
func (c *Cluster) awaitPod(ctx context.Context, name string) error {
	return eventually.Poll(ctx, time.Minute, func() error {
		out, err := c.Kubectl(ctx, "get", "pod", name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out != "True" {
			err = fmt.Errorf("condition Ready of pod %s is %q", name, out)
		}
		return err
	})
}
