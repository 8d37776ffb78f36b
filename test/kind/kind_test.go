// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package kind

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/kind/engine"
	"github.com/dra-shared/dra-driver-shared/test/measure"
)

func TestMain(m *testing.M) {
	engine.Main() // the test binary is also the private daemon and its runtime
	os.Exit(m.Run())
}

// timeout includes the time to build a node image where none can be pulled.
const timeout = 12 * time.Minute

// TestCluster_sharesNICsOfTwoNodesAndCleansUp runs the driver in a cluster with two nodes, and
// looks for what remains after the cluster is removed.
func TestCluster_sharesNICsOfTwoNodesAndCleansUp(t *testing.T) {
	if os.Getenv("TEST_KIND") == "" {
		t.Skip("needs programs and images that `make test-kind` builds")
	}
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	usesDefaultImage(t, root)
	before := snapshot(t)
	c := &Cluster{Root: root, Dir: filepath.Join(root, ".cluster-kind-test"), Out: t.Output()}
	down := func() {
		if err := c.Down(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(down)
	if err := c.Up(ctx, 2); err != nil {
		t.Fatal(err)
	}
	if !t.Run("demo", func(t *testing.T) {
		if err := c.Demo(ctx); err != nil {
			t.Error(err)
		}
	}) {
		return
	}
	t.Run("two nodes", func(t *testing.T) { testTwoNodes(ctx, t, c) })
	t.Run("no BPF file system", func(t *testing.T) { testWithoutBPFFS(ctx, t, c) })
	inDocker := remains(ctx, c.state.Engine, c.state.Networks)
	down()
	t.Run("nothing remains", func(t *testing.T) {
		if after := snapshot(t); after != before {
			t.Errorf("this machine before the cluster was created:\n%s\nand after it was removed:\n%s", before, after)
		}
		if left := inDocker(); left != "" {
			t.Errorf("Docker still has:\n%s", left)
		}
	})
}

// A user may have created the cluster and the network of the quickstart by hand.
func TestCluster_keepsResourcesOfUser(t *testing.T) {
	root, calls := t.TempDir(), filepath.Join(t.TempDir(), "calls")
	docker := `#!/bin/sh
echo "docker $*" >>` + calls + `
case "$*" in
*label=*) echo 6b1f6f1c; echo 4f2d1c3a ;;
*name=^kind-storage*) echo 9d0a5c77 ;;
esac
`
	kind := "#!/bin/sh\necho \"kind $*\" >>" + calls + "\n"
	for path, script := range map[string]string{"docker": docker, "bin/kind": kind} {
		path = filepath.Join(root, path)
		err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(script), 0o755))
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", root+":"+os.Getenv("PATH"))
	c := &Cluster{Root: root, Dir: t.TempDir(), Out: t.Output(), state: state{Engine: &engine.Engine{}}}
	err := errors.Join(c.save(), c.reserveNames(t.Context()))
	for _, want := range []string{"kind delete cluster --name dra-shared", "docker network rm kind-storage"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want one with the remedy %q", err, want)
		}
	}
	if err != nil && strings.Contains(err.Error(), server) {
		t.Errorf("the error %v names a container that does not exist", err)
	}
	if err := c.Down(t.Context()); err != nil {
		t.Error(err)
	}
	called, err := os.ReadFile(calls)
	if err != nil || strings.Contains(string(called), "delete") || strings.Contains(string(called), " rm ") {
		t.Errorf("calls (error %v), want none that removes a resource:\n%s", err, called)
	}
}

// make kind-demo must not replace the cluster of make kind-up.
func TestCluster_Up_keepsCompleteCluster(t *testing.T) {
	c := &Cluster{Dir: t.TempDir(), Out: t.Output(), state: state{Engine: &engine.Engine{}, Ready: true}}
	if err := c.save(); err != nil {
		t.Fatal(err)
	}
	if err := c.Up(t.Context(), 1); !errors.Is(err, ErrExists) {
		t.Errorf("got error %v, want %v", err, ErrExists)
	}
	if _, err := os.Stat(c.path("state.json")); err != nil {
		t.Error(err)
	}
}

// TestInterrupt interrupts the command while kind creates the cluster.
func TestInterrupt(t *testing.T) {
	if os.Getenv("TEST_KIND") == "" {
		t.Skip("needs programs and images that `make test-kind` builds")
	}
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	before := snapshot(t)
	demo := exec.CommandContext(ctx, "bin/kind-demo", "demo", "--dir", ".cluster-kind-test")
	demo.Dir, demo.Stderr = root, t.Output()
	demo.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // as a shell does
	output, err := demo.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := demo.Start(); err != nil {
		t.Fatal(err)
	}
	interrupted := false
	for scan := bufio.NewScanner(output); scan.Scan(); {
		t.Log(scan.Text())
		if strings.Contains(scan.Text(), "Starting control-plane") && !interrupted {
			interrupted = true
			if err := syscall.Kill(-demo.Process.Pid, syscall.SIGINT); err != nil { // the group, as a terminal does
				t.Error(err)
			}
		}
	}
	if err := demo.Wait(); err == nil || !interrupted {
		t.Errorf("the command ended with error %v, interrupted %t", err, interrupted)
	}
	if after := snapshot(t); after != before {
		t.Errorf("this machine before the command:\n%s\nand after it was interrupted:\n%s", before, after)
	}
}

// usesDefaultImage checks that officialImage is what kind uses.
func usesDefaultImage(t *testing.T, root string) {
	t.Helper()
	binary, err := os.ReadFile(filepath.Join(root, "bin/kind"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(binary), officialImage) {
		t.Errorf("bin/kind does not contain %q: update officialImage to its default node image", officialImage)
	}
}

// share is the claim and the pod of a share of 100 Mbit/s on a node.
const share = `apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %[1]s}
spec:
  devices:
    requests:
    - name: nic
      exactly:
        deviceClassName: nic.dra-shared.dev
        capacity: {requests: {bandwidth: 100M}}
    config:
    - opaque:
        driver: dra-shared.dev
        parameters: {apiVersion: dra-shared.dev/v1alpha1, kind: NetworkAttachment, addresses: ["%[3]s"]}
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: %[2]s}
  tolerations: [{operator: Exists}]
  resourceClaims: [{name: nic, resourceClaimName: %[1]s}]
  containers:
  - name: work
    image: registry.local/nettool:dev
    imagePullPolicy: Never
    resources: {claims: [{name: nic}]}
`

// testWithoutBPFFS installs the chart without the value for nodes that do not have a BPF file system. The installation
// must fail, and an event must name the value.
func testWithoutBPFFS(ctx context.Context, t *testing.T, c *Cluster) {
	if _, err := c.Kubectl(ctx, "delete", "pods,resourceclaims", "--all", "--timeout=60s"); err != nil {
		t.Fatal(err) // while claims hold shares, the chart cannot be uninstalled
	}
	if err := c.run(ctx, "bin/helm", "uninstall", "dra-shared", "--kubeconfig", c.relative("kubeconfig"),
		"--namespace", "dra-shared-system", "--wait"); err != nil {
		t.Fatal(err)
	}
	nodes, err := c.Nodes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range nodes {
		if _, err := c.Node(ctx, node, "umount", "/sys/fs/bpf"); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.installWithin(ctx, 20*time.Second, "plugin.mountBPFFS=false"); err == nil {
		t.Error("the installation succeeded")
	}
	if err := eventually.Poll(ctx, 30*time.Second, func() error {
		events, err := c.Kubectl(ctx, "get", "events", "-A", "--field-selector", "reason=DeviceUnusable",
			"-o", "jsonpath={.items[*].message}")
		if err == nil && !strings.Contains(events, "set plugin.mountBPFFS in the chart's values") {
			err = fmt.Errorf("the events are %q", events)
		}
		return err
	}); err != nil {
		t.Errorf("no event names the value: %v", err)
	}
}

// testTwoNodes checks that the nodes, which share the kernel of this machine, do not
// share the driver's state there. Each share holds its grant, even after the driver is
// removed from the other node.
func testTwoNodes(ctx context.Context, t *testing.T, c *Cluster) {
	nodes, err := c.Nodes(ctx)
	if err != nil || len(nodes) != 2 {
		t.Fatalf("got nodes %q and error %v, want two nodes", nodes, err)
	}
	for i, node := range nodes {
		name := fmt.Sprintf("share-%d", i)
		if err := c.apply(ctx, fmt.Sprintf(share, name, node, fmt.Sprintf("10.20.1.%d/16", i+1))); err != nil {
			t.Fatal(err)
		}
	}
	for i := range nodes {
		if err := c.awaitPod(ctx, fmt.Sprintf("share-%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	holdsGrant(ctx, t, c, "share-0", "share-1")
	// Each node has a separate BPF file system with the pins of its own NIC.
	pins := make([]string, len(nodes))
	for i, node := range nodes {
		if pins[i], err = c.Node(ctx, node, "sh", "-euc",
			"stat -c %d /sys/fs/bpf; test -n \"$(find /sys/fs/bpf -mindepth 2)\""); err != nil {
			t.Fatalf("pins of node %s: %v", node, err)
		}
	}
	if pins[0] == pins[1] {
		t.Errorf("both nodes have the BPF file system with device number %s", pins[0])
	}

	// The driver leaves the first node.
	if _, err := c.Kubectl(ctx, "delete", "pod/share-0", "resourceclaim/share-0", "--timeout=60s"); err != nil {
		t.Fatal(err)
	}
	if err := c.Install(ctx, "plugin.nodeSelector.kubernetes\\.io/hostname="+nodes[1]); err != nil {
		t.Fatal(err)
	}
	if err := eventually.Poll(ctx, time.Minute, func() error { return findRemains(ctx, c, nodes[0]) }); err != nil {
		t.Errorf("node %s after the driver was removed from it: %v", nodes[0], err)
	}
	holdsGrant(ctx, t, c, "share-1")
	if out, err := c.Node(ctx, nodes[1], "tc", "class", "show", "dev", "eth1"); err != nil ||
		!strings.Contains(out, "rate 100Mbit") {
		t.Errorf("classes of eth1 of node %s: got error %v and output %q, want a class with rate 100Mbit", nodes[1], err, out)
	}
}

// findRemains returns an error that lists what the driver left on a node. The kernel
// adds maps.debug and progs.debug to each BPF file system.
func findRemains(ctx context.Context, c *Cluster, node string) error {
	out, err := c.Node(ctx, node, "sh", "-euc", `
find /sys/fs/bpf -mindepth 1 -not -name '*.debug'
find /var/lib/kubelet/plugins -mindepth 1 -type f -not -path '*/locks/*' -o -type s
ip -brief link | sed -n '/ifb-/p'
tc qdisc show dev eth1 | sed -nE '/htb/p'`)
	if err == nil && out != "" {
		err = fmt.Errorf("the driver left:\n%s", out)
	}
	return err
}

// holdsGrant checks that pods with shares of 100 Mbit/s, measured at the same time, send
// and receive within 10 % of that. It measures again if a rate is too low.
func holdsGrant(ctx context.Context, t *testing.T, c *Cluster, pods ...string) {
	t.Helper()
	const grant, tolerance = 100e6, 0.1
	for _, direction := range []string{"send", "receive"} {
		var lowest, highest float64
		tries := measure.Attempts{}
		for lowest < grant*(1-tolerance) && highest <= grant*(1+tolerance) && tries.Next() {
			rates := measureRates(ctx, t, c, direction, pods)
			lowest, highest = slices.Min(rates), slices.Max(rates)
			t.Logf("%s: got %.0f bit/s", direction, rates)
		}
		if lowest < grant*(1-tolerance) || highest > grant*(1+tolerance) {
			t.Errorf("pods %q: %s: got %.1f to %.1f Mbit/s, want %.0f Mbit/s",
				pods, direction, lowest/1e6, highest/1e6, grant/1e6)
		}
	}
}

// measureRates measures the rates of the pods concurrently, in bits per second.
func measureRates(ctx context.Context, t *testing.T, c *Cluster, direction string, pods []string) []float64 {
	t.Helper()
	rates := make([]float64, len(pods))
	errs := make([]error, len(pods))
	var wait sync.WaitGroup
	for i, pod := range pods {
		wait.Go(func() {
			var out string
			if out, errs[i] = c.Kubectl(ctx, "exec", pod, "--", "/bin/nettool", "measure", "--json",
				"--direction="+direction, "--for=3s", ServerAddress); errs[i] != nil {
				return
			}
			var measured struct{ Send, Receive float64 }
			errs[i] = json.Unmarshal([]byte(out), &measured)
			rates[i] = measured.Send + measured.Receive
		})
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return rates
}

func (c *Cluster) apply(ctx context.Context, manifest string) error {
	cmd := c.Command(ctx, "kubectl", "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(manifest)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("kubectl apply: %w: %s", err, out)
	}
	return nil
}

// snapshot lists what a cluster could leave on this machine: mounts, links, cgroups,
// processes, sysctls, and network namespaces.
func snapshot(t *testing.T) string {
	t.Helper()
	var lines []string
	add := func(prefix string, values ...string) {
		for _, v := range values {
			lines = append(lines, prefix+" "+v)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, ".cluster-kind-test") || strings.Contains(line, "docker") {
			add("mount", strings.TrimSpace(line))
		}
	}
	for _, pattern := range []string{
		"/sys/class/net/br-*", "/sys/class/net/docker0", "/var/run/docker.sock", "/var/lib/docker",
		"/sys/fs/cgroup/dra-shared-kind*", "/sys/fs/cgroup/*/dra-shared-kind*", "../../.cluster-kind-test",
	} {
		matches, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		add("file", matches...)
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range commands {
		raw, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue // the process has ended
		}
		command := strings.ReplaceAll(string(raw), "\x00", " ")
		if strings.Contains(command, ".cluster-kind-test") {
			add("process", command)
		}
	}
	for name, value := range readSysctls() {
		add("sysctl", name+" = "+value)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// remains returns a function that lists the cluster's resources in Docker. The list is
// empty for a private daemon that has ended.
func remains(ctx context.Context, e *engine.Engine, networks []string) func() string {
	if e.Private() {
		return func() string {
			if err := exec.Command("docker", "--host", e.Host, "version").Run(); err == nil {
				return "the daemon at " + e.Host
			}
			return ""
		}
	}
	return func() string {
		var list []string
		containers, err := e.Docker(ctx, "ps", "--all", "--format", "{{.Names}}", "--filter", "name=dra-shared")
		if err != nil {
			return err.Error()
		}
		list = append(list, strings.Fields(containers)...)
		present, err := e.Docker(ctx, "network", "ls", "--format", "{{.Name}}")
		if err != nil {
			return err.Error()
		}
		for _, n := range strings.Fields(present) {
			if slices.Contains(networks, n) {
				list = append(list, n)
			}
		}
		return strings.Join(list, "\n")
	}
}
