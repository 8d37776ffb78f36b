// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package clusterclient starts and ends a test cluster (see test/cluster) from
// Go, and runs commands in it.
package clusterclient

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
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// Cluster is a test cluster.
type Cluster struct {
	// Root is the root directory of the repository; its bin directory holds the
	// binaries.
	Root string
	// Dir is the directory of the cluster.
	Dir string
	// Values are additional Helm arguments for every installation of the chart.
	Values []string
	// Kubeconfig is set for a cluster that this package did not start. Only Kubectl and
	// the methods that use it work then, with the program kubectl.
	Kubeconfig string

	lock    sync.Mutex
	queries *queryClient // nil before the first query, and after one that failed
}

// requestTimeout is how long kubectl waits before it ends a request.
const requestTimeout = 30 * time.Second

// New returns the cluster in dir, which is relative to the root of the
// repository that contains the working directory. It does not start the cluster.
func New(dir string) (*Cluster, error) {
	root, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	for {
		if _, err := os.Stat(filepath.Join(root, "deployments/helm")); err == nil {
			break
		}
		if parent := filepath.Dir(root); parent != root {
			root = parent
			continue
		}
		return nil, errors.New("find the repository: the working directory is not inside it")
	}
	if !filepath.IsAbs(dir) {
		dir = filepath.Join(root, dir)
	}
	return &Cluster{Root: root, Dir: dir}, nil
}

// NoNodes is the value of Options.Nodes for a control plane without nodes.
const NoNodes = -1

// Options configures Up.
type Options struct {
	// Nodes is the number of nodes: 1 or 2, or NoNodes. 0 means 1.
	Nodes int
	// Gates selects the feature gates: default, all, capacity, no-capacity,
	// no-granular-status, or workload. Empty means default.
	Gates string
	// Kubernetes is the version to run. Empty means the default version.
	Kubernetes string
	// Kubelet is the version of the nodes' kubelets. Empty means the same as Kubernetes.
	Kubelet string
	// Runtime is the container runtime: containerd, containerd-1.7, or cri-o. Empty
	// means containerd.
	Runtime string
	// OCIRuntime is runc or crun. Empty means runc.
	OCIRuntime string
	// Bare skips the installation of the chart.
	Bare bool
	// Before runs after the nodes are Ready and before the chart is installed.
	Before func(context.Context) error
}

// images are imported into the nodes of every cluster; the Makefile builds them.
var images = []string{"bin/images/dra-driver-shared.tar", "bin/images/nettool.tar"}

// Up starts the cluster, waits until its nodes are Ready, and installs the chart.
// It writes the progress of the start to progress.
func (c *Cluster) Up(ctx context.Context, o Options, progress io.Writer) error {
	nodes := max(o.Nodes, 1)
	if o.Nodes == NoNodes {
		nodes = 0
	}
	args := []string{"up", "--dir", c.Dir, "--nodes", strconv.Itoa(nodes), "--gates", cmp.Or(o.Gates, "default")}
	if o.Kubernetes != "" {
		args = append(args, "--kubernetes", o.Kubernetes)
	}
	if o.Kubelet != "" {
		args = append(args, "--kubelet", o.Kubelet)
	}
	if o.Runtime != "" {
		args = append(args, "--runtime", o.Runtime)
	}
	if o.OCIRuntime != "" {
		args = append(args, "--oci-runtime", o.OCIRuntime)
	}
	for _, image := range images {
		args = append(args, "--image", filepath.Join(c.Root, image))
	}
	up := exec.CommandContext(ctx, filepath.Join(c.Root, "bin/cluster"), args...)
	up.Dir, up.Stdout, up.Stderr = c.Root, progress, progress
	up.Cancel = func() error { return up.Process.Signal(syscall.SIGINT) }
	up.WaitDelay = 30 * time.Second
	if err := up.Run(); err != nil {
		return fmt.Errorf("start the cluster: %w", err)
	}
	if o.Before != nil {
		if err := o.Before(ctx); err != nil {
			return err
		}
	}
	if o.Bare {
		return nil
	}
	return c.Install(ctx)
}

// Install installs or upgrades the chart and waits until its pods are ready. Each
// element of set is a value for Helm's --set.
func (c *Cluster) Install(ctx context.Context, set ...string) error {
	args := []string{
		"upgrade", "dra-shared", filepath.Join(c.Root, "deployments/helm/dra-driver-shared"), "--install",
		"--namespace", "dra-shared-system", "--create-namespace",
		"--values", filepath.Join(c.Root, "test/env/values.yaml"), "--wait", "--timeout", "60s",
	}
	args = append(args, c.Values...)
	for _, s := range set {
		args = append(args, "--set", s)
	}
	if out, err := c.Helm(ctx, args...); err != nil {
		return fmt.Errorf("install the chart: %w\n%s", err, out)
	}
	return nil
}

// Helm runs Helm against the cluster and returns its standard output.
func (c *Cluster) Helm(ctx context.Context, args ...string) (string, error) {
	helm := []string{filepath.Join(c.Root, "bin/helm"), "--kubeconfig", filepath.Join(c.Dir, "kubeconfig")}
	return c.run(ctx, "network", append(helm, args...)...)
}

// Down ends the cluster and removes its processes, mounts, cgroups, and
// directory. It succeeds if the cluster does not exist.
func (c *Cluster) Down(ctx context.Context) error {
	down := exec.CommandContext(ctx, filepath.Join(c.Root, "bin/cluster"), "down", "--dir", c.Dir)
	if out, err := down.CombinedOutput(); err != nil {
		return fmt.Errorf("end the cluster: %w\n%s", err, out)
	}
	return nil
}

// SetGates restarts the cluster's components with other feature gates. It does
// not wait until they are ready.
func (c *Cluster) SetGates(ctx context.Context, gates string) error {
	return c.control(ctx, "gates", gates)
}

// Load imports image archives into every node.
func (c *Cluster) Load(ctx context.Context, archives ...string) error {
	return c.control(ctx, "load", archives...)
}

// Stop kills a component of the control plane, such as kube-apiserver. The component
// does not run until Start is called.
func (c *Cluster) Stop(ctx context.Context, component string) error {
	return c.control(ctx, "stop", component)
}

// Start reverts Stop. It does not wait until the component answers.
func (c *Cluster) Start(ctx context.Context, component string) error {
	return c.control(ctx, "start", component)
}

func (c *Cluster) control(ctx context.Context, verb string, args ...string) error {
	args = append([]string{verb, "--dir", c.Dir}, args...)
	cmd := exec.CommandContext(ctx, filepath.Join(c.Root, "bin/cluster"), args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cluster %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// Command returns a command that runs one of the cluster's scripts (kubectl,
// node, pod, or network) in the root directory of the repository.
func (c *Cluster) Command(ctx context.Context, script string, args ...string) *exec.Cmd {
	if c.Kubeconfig != "" && script == "kubectl" {
		return exec.CommandContext(ctx, "kubectl", append([]string{"--kubeconfig", c.Kubeconfig}, args...)...)
	}
	cmd := exec.CommandContext(ctx, filepath.Join(c.Dir, script), args...)
	cmd.Dir = c.Root
	return cmd
}

func (c *Cluster) run(ctx context.Context, script string, args ...string) (string, error) {
	cmd := c.Command(ctx, script, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		message := strings.TrimSpace(stderr.String())
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", script, strings.Join(args, " "), err, message)
	}
	return stdout.String(), nil
}

// Kubectl runs kubectl and returns its standard output. It answers queries itself, such as
// `kubectl get RESOURCE -o jsonpath=TEMPLATE`.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	if q, ok := parseQuery(args); ok && c.Kubeconfig == "" {
		out, err := c.query(ctx, q)
		if err != nil {
			return "", fmt.Errorf("kubectl %s: %w", strings.Join(args, " "), err)
		}
		return out, nil
	}
	return c.run(ctx, "kubectl", append([]string{"--request-timeout=" + requestTimeout.String()}, args...)...)
}

// Get decodes the objects that `kubectl get` prints for args into a typed value.
func (c *Cluster) Get(ctx context.Context, into any, args ...string) error {
	out, err := c.Kubectl(ctx, append(append([]string{"get"}, args...), "-o", "json")...)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), into)
}

// Node runs a command in a node's network and mount namespaces and returns its
// standard output.
func (c *Cluster) Node(ctx context.Context, node string, args ...string) (string, error) {
	return c.run(ctx, "node", append([]string{node}, args...)...)
}

// serverIP is the address of the switch that connects the nodes' NICs.
const serverIP = "10.20.255.254"

// Serve starts the server for `nettool measure` at the switch that connects the
// nodes' NICs, and returns its address once it answers. It stops when ctx is
// canceled.
func (c *Cluster) Serve(ctx context.Context, port int) (string, error) {
	address := fmt.Sprintf("%s:%d", serverIP, port)
	nettool := filepath.Join(c.Root, "bin/nettool")
	serve := c.Command(ctx, "network", nettool, "serve", fmt.Sprintf(":%d", port), "--while-stdin-is-open")
	// The server ends with its standard input, so it cannot outlive this process.
	if _, err := serve.StdinPipe(); err != nil {
		return "", err
	}
	if err := serve.Start(); err != nil {
		return "", err
	}
	go func() { _ = serve.Wait() }() // ctx ends the process
	err := eventually.Poll(ctx, 10*time.Second, func() error {
		local := fmt.Sprintf("127.0.0.1:%d", port)
		_, err := c.run(ctx, "network", nettool, "measure", "--for=1ms", "--direction=send", local)
		return err
	})
	return address, err
}

// Rates are measured payload rates in bits per second. The rate of a direction
// that was not measured is 0.
type Rates struct{ Send, Receive float64 }

// Measure measures the rates between a pod (NAMESPACE/NAME) and an address for a
// duration. direction is nettool's: send, receive, or both; more are additional
// flags for nettool.
func (c *Cluster) Measure(
	ctx context.Context, pod, address, direction string, duration time.Duration, more ...string,
) (r Rates, err error) {
	namespace, name, _ := strings.Cut(pod, "/")
	args := append([]string{
		"exec", "-n", namespace, name, "--",
		"/bin/nettool", "measure", "--json", "--direction=" + direction, "--for=" + duration.String(),
	}, more...)
	out, err := c.Kubectl(ctx, append(args, address)...)
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal([]byte(out), &r)
}
