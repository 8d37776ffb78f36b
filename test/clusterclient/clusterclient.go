// Package clusterclient drives a test cluster (see test/cluster) from Go: starting and
// ending one, and the commands that reach into it.
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
	"syscall"
	"time"
)

// Cluster is a test cluster.
type Cluster struct {
	Root string // of the repository; binaries are in bin below it
	Dir  string // of the cluster
	// Values are further arguments for Helm, wherever the chart is installed.
	Values []string
}

// New returns the bed in a directory of the repository that the working
// directory is in. It starts nothing.
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
		return nil, errors.New("not inside the repository")
	}
	if !filepath.IsAbs(dir) {
		dir = filepath.Join(root, dir)
	}
	return &Cluster{Root: root, Dir: dir}, nil
}

// None is for a control plane without nodes.
const None = -1

// Options of Up.
type Options struct {
	Nodes int    // 1 if it is 0
	Gates string // default, all, capacity or no-capacity
	// Kubernetes is its version; only the default has nodes.
	Kubernetes string
	// Bare leaves the chart to whoever asks.
	Bare bool
	// Before is called when the nodes run and the chart is not installed yet.
	Before func(context.Context) error
}

// Images that every bed is started with; `make image` and its like build them.
var images = []string{"bin/images/dra-driver-shared.tar", "bin/images/nettool.tar"}

// Up starts the cluster and installs the chart. What is going on is written to
// progress.
func (b *Cluster) Up(ctx context.Context, o Options, progress io.Writer) error {
	nodes := max(o.Nodes, 1)
	if o.Nodes == None {
		nodes = 0
	}
	args := []string{"up", "--dir", b.Dir, "--nodes", strconv.Itoa(nodes), "--gates", cmp.Or(o.Gates, "default")}
	if o.Kubernetes != "" {
		args = append(args, "--kubernetes", o.Kubernetes)
	}
	for _, image := range images {
		args = append(args, "--image", filepath.Join(b.Root, image))
	}
	up := exec.CommandContext(ctx, filepath.Join(b.Root, "bin/cluster"), args...)
	up.Dir, up.Stdout, up.Stderr = b.Root, progress, progress
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
	return b.Install(ctx)
}

// Install installs or upgrades the chart, with further values set.
func (b *Cluster) Install(ctx context.Context, set ...string) error {
	args := []string{"upgrade", "dra-shared", filepath.Join(b.Root, "deployments/helm/dra-driver-shared"), "--install",
		"--namespace", "dra-shared-system", "--create-namespace", "--values", filepath.Join(b.Root, "test/env/values.yaml"), "--wait", "--timeout", "60s"}
	args = append(args, b.Values...)
	for _, s := range set {
		args = append(args, "--set", s)
	}
	if out, err := b.Helm(ctx, args...); err != nil {
		return fmt.Errorf("install the chart: %w\n%s", err, out)
	}
	return nil
}

// Helm runs Helm against the cluster.
func (b *Cluster) Helm(ctx context.Context, args ...string) (string, error) {
	return b.run(ctx, "fabric", append([]string{filepath.Join(b.Root, "bin/helm"), "--kubeconfig", filepath.Join(b.Dir, "kubeconfig")}, args...)...)
}

// Down ends the cluster. Nothing of it is left.
func (b *Cluster) Down(ctx context.Context) error {
	down := exec.CommandContext(ctx, filepath.Join(b.Root, "bin/cluster"), "down", "--dir", b.Dir)
	if out, err := down.CombinedOutput(); err != nil {
		return fmt.Errorf("end the cluster: %w\n%s", err, out)
	}
	return nil
}

// SetGates starts the cluster's components again with other feature gates.
func (b *Cluster) SetGates(ctx context.Context, gates string) error {
	if out, err := exec.CommandContext(ctx, filepath.Join(b.Root, "bin/cluster"), "gates", "--dir", b.Dir, gates).CombinedOutput(); err != nil {
		return fmt.Errorf("set feature gates: %w\n%s", err, out)
	}
	return nil
}

// Command returns one of the cluster's scripts: kubectl, node, pod, fabric.
func (b *Cluster) Command(ctx context.Context, script string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(b.Dir, script), args...)
	cmd.Dir = b.Root
	return cmd
}

func (b *Cluster) run(ctx context.Context, script string, args ...string) (string, error) {
	cmd := b.Command(ctx, script, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", script, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// Kubectl runs kubectl and returns what it printed.
func (b *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return b.run(ctx, "kubectl", append([]string{"--request-timeout=30s"}, args...)...)
}

// Get reads an object into a typed value.
func (b *Cluster) Get(ctx context.Context, into any, args ...string) error {
	out, err := b.Kubectl(ctx, append(append([]string{"get"}, args...), "-o", "json")...)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), into)
}

// Node runs a command in a node's network and mount namespaces.
func (b *Cluster) Node(ctx context.Context, node string, args ...string) (string, error) {
	return b.run(ctx, "node", append([]string{node}, args...)...)
}

// FabricAddress is the far end of the network that the NICs are plugged into.
const FabricAddress = "10.20.255.254"

// Serve starts the other end of `nettool measure` in the fabric and returns
// its address once it answers. It ends with ctx.
func (b *Cluster) Serve(ctx context.Context, port int) (string, error) {
	address := fmt.Sprintf("%s:%d", FabricAddress, port)
	serve := b.Command(ctx, "fabric", filepath.Join(b.Root, "bin/nettool"), "serve", fmt.Sprintf(":%d", port), "--while-stdin-is-open")
	// It must not outlive this process, however that ends.
	if _, err := serve.StdinPipe(); err != nil {
		return "", err
	}
	if err := serve.Start(); err != nil {
		return "", err
	}
	go func() { _ = serve.Wait() }() // ended by ctx
	err := Eventually(ctx, 10*time.Second, func() error {
		_, err := b.run(ctx, "fabric", filepath.Join(b.Root, "bin/nettool"), "measure", "--for=1ms", "--direction=send", fmt.Sprintf("127.0.0.1:%d", port))
		return err
	})
	return address, err
}

// Rates are measured payload rates in bits per second.
type Rates struct{ Send, Receive float64 }

// Measure measures from a pod to an address. direction is as of nettool.
func (b *Cluster) Measure(ctx context.Context, pod, address, direction string, duration time.Duration, more ...string) (r Rates, err error) {
	namespace, name, _ := strings.Cut(pod, "/")
	args := append([]string{"exec", "-n", namespace, name, "--", "/bin/nettool", "measure", "--json", "--direction=" + direction, "--for=" + duration.String()}, more...)
	out, err := b.Kubectl(ctx, append(args, address)...)
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal([]byte(out), &r)
}

// Eventually repeats check until it returns nil; it asks the API server, which
// is the one thing here that has no event for everything. The last error is
// returned after the time is up.
func Eventually(ctx context.Context, within time.Duration, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("after %s: %w", within, err)
		case <-tick.C:
		}
	}
}
