// Package e2e holds the stories that are told on a real cluster, as scripts
// (testdata/*.txtar) that read as a specification. Each has a namespace of its
// own, $NS, and leaves nothing on the nodes, which is checked after each.
//
// `make e2e` runs them on clusters of their own; E2E_KEEP=1 leaves those to look
// at, and E2E_CLUSTER=DIR runs the stories on one that is there. E2E_RUN is a regular expression for the scripts' names.
package e2e

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
)

const (
	eventually = 90 * time.Second
	tolerance  = 0.10
	serverPort = 5001
)

// suite is a cluster, and the other end of every measurement.
type suite struct {
	bed    *clusterclient.Cluster
	server string
	nodes  []string
}

func TestOneNode(t *testing.T) {
	tell(t, "testdata/one-node testdata/groups testdata/bridge", ".cluster-e2e", clusterclient.Options{Nodes: 1})
}

// Two nodes, with every gate for dynamic resource allocation and workloads on:
// what is told of groups must be so in native mode as well.
func TestTwoNodesWithAllGates(t *testing.T) {
	if os.Getenv("E2E_CLUSTER") != "" && os.Getenv("E2E_NATIVE") == "" {
		t.Skip("E2E_CLUSTER names a cluster of one node; E2E_NATIVE=1 says that it is one of two with all gates")
	}
	tell(t, "testdata/two-nodes testdata/groups testdata/native", ".cluster-e2e-two", clusterclient.Options{Nodes: 2, Gates: "all"})
}

// A cluster whose feature gates are switched under groups that live.
func TestModes(t *testing.T) {
	if os.Getenv("E2E_CLUSTER") != "" && os.Getenv("E2E_MODES") == "" {
		t.Skip("it switches the cluster's feature gates; E2E_MODES=1 says that it may")
	}
	tell(t, "testdata/modes", ".cluster-e2e-modes", clusterclient.Options{Nodes: 1})
}

// A cluster that drops what we publish.
func TestNoConsumableCapacity(t *testing.T) {
	if os.Getenv("E2E_CLUSTER") != "" {
		t.Skip("E2E_CLUSTER names a cluster with the gate on")
	}
	tell(t, "testdata/no-capacity", ".cluster-e2e-old", clusterclient.Options{Nodes: 1, Gates: "no-capacity"})
}

func tell(t *testing.T, stories, dir string, o clusterclient.Options) {
	t.Helper()
	needsCluster(t)
	b, err := clusterclient.New(dir)
	if err != nil {
		t.Fatal(err)
	}
	tellOn(t, stories, b, o)
}

func needsCluster(t *testing.T) {
	t.Helper()
	if os.Getenv("E2E") == "" && os.Getenv("E2E_CLUSTER") == "" {
		t.Skip("needs a cluster: run `make e2e`")
	}
}

func tellOn(t *testing.T, stories string, b *clusterclient.Cluster, o clusterclient.Options) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	s := start(ctx, t, b, o)
	var files []string
	for _, dir := range strings.Fields(stories) {
		found, err := filepath.Glob(filepath.Join(dir, "*.txtar"))
		if err != nil || len(found) == 0 {
			t.Fatalf("no stories in %s: %v", dir, err)
		}
		files = append(files, found...)
	}
	testscript.RunT(narrate(t), testscript.Params{
		Files:               files,
		RequireExplicitExec: true,
		Condition: func(name string) (bool, error) {
			if name != "native" {
				return false, fmt.Errorf("unknown condition %s", name)
			}
			return o.Gates == "all", nil
		},
		Setup: func(env *testscript.Env) error { return s.setup(ctx, env) },
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"kubectl":    s.script("kubectl"),
			"node":       s.script("node"),
			"pod":        s.script("pod"),
			"network":    s.script("network"),
			"share":      s.share,
			"until":      s.until,
			"within":     s.within,
			"daemon":     s.daemon,
			"measure":    s.measure,
			"together":   s.together,
			"install":    s.install,
			"plugin":     s.plugin,
			"controller": s.controller,
			"example":    s.example,
			"gates":      s.gates,
			"unchecked":  s.unchecked,
			"clean":      s.clean,
		},
	})
}

func start(ctx context.Context, t *testing.T, b *clusterclient.Cluster, o clusterclient.Options) *suite {
	t.Helper()
	if given := os.Getenv("E2E_CLUSTER"); given != "" {
		dir, err := filepath.Abs(filepath.Join(b.Root, given))
		if err != nil {
			t.Fatal(err)
		}
		b.Dir = dir
	} else {
		if err := b.Down(ctx); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if os.Getenv("E2E_KEEP") != "" {
				return
			}
			if err := b.Down(context.WithoutCancel(ctx)); err != nil {
				t.Error(err)
			}
		})
		if err := b.Up(ctx, o, os.Stdout); err != nil {
			t.Fatal(err)
		}
	}
	server, err := b.Serve(ctx, serverPort)
	if err != nil {
		t.Fatal(err)
	}
	return &suite{bed: b, server: server, nodes: []string{"n1", "n2"}[:o.Nodes]}
}

// setup gives a script its namespace and the paths it may name.
func (s *suite) setup(ctx context.Context, env *testscript.Env) error {
	name := strings.TrimPrefix(filepath.Base(env.WorkDir), "script-")
	env.Setenv("NS", "e2e-"+name)
	env.Setenv("SERVER", s.server)
	env.Setenv("ROOT", s.bed.Root)
	env.Setenv("CLUSTER", s.bed.Dir)
	if _, err := s.bed.Kubectl(ctx, "create", "namespace", "e2e-"+name); err != nil {
		return err
	}
	n, ok := env.T().(narrator)
	if !ok {
		return fmt.Errorf("the stories' T is a %T", env.T())
	}
	env.Defer(func() {
		if n.Failed() {
			n.Log(state(context.WithoutCancel(ctx), s.bed, "e2e-"+name))
		}
		if _, err := s.bed.Kubectl(context.WithoutCancel(ctx), "delete", "namespace", "e2e-"+name, "--wait=false"); err != nil {
			n.Log(err)
		}
	})
	return nil
}

// args puts the script's namespace in, unless it names one.
func namespaced(ts *testscript.TestScript, script string, args []string) []string {
	if script != "kubectl" {
		return args
	}
	for _, a := range args {
		if a == "-n" || a == "-A" || strings.HasPrefix(a, "--namespace") || a == "resourceslice" || a == "resourceslices" {
			return args
		}
	}
	return append([]string{"-n", ts.Getenv("NS")}, args...)
}

// script runs one of the cluster's scripts; its output can be asked about by
// `stdout` and `stderr`.
func (s *suite) script(name string) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		err := ts.Exec(filepath.Join(s.bed.Dir, name), namespaced(ts, name, args)...)
		if neg && err == nil {
			ts.Fatalf("%s %s: succeeded, and should not", name, strings.Join(args, " "))
		}
		if !neg && err != nil {
			ts.Fatalf("%s %s: %v", name, strings.Join(args, " "), err)
		}
	}
}

// until REGEXP SCRIPT ARGS...: repeats until what it prints matches; with `!`,
// until it does not.
func (s *suite) until(ts *testscript.TestScript, neg bool, args []string) {
	s.repeat(ts, neg, eventually, args)
}

// within DURATION REGEXP SCRIPT ARGS...: as until, and no later.
func (s *suite) within(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 4 {
		ts.Fatalf("usage: within DURATION REGEXP SCRIPT ARGS...")
	}
	limit, err := time.ParseDuration(args[0])
	ts.Check(err)
	s.repeat(ts, neg, limit, args[1:])
}

func (s *suite) repeat(ts *testscript.TestScript, neg bool, limit time.Duration, args []string) {
	if len(args) < 3 {
		ts.Fatalf("usage: until REGEXP kubectl|node|pod|network ARGS...")
	}
	want, err := regexp.Compile("(?s)" + args[0])
	ts.Check(err)
	var out string
	err = clusterclient.Eventually(context.Background(), limit, func() error {
		raw, err := s.bed.Command(context.Background(), args[1], namespaced(ts, args[1], args[2:])...).CombinedOutput()
		out = string(raw)
		if err != nil && !neg {
			return err
		}
		if want.MatchString(out) == neg {
			return fmt.Errorf("what it prints matches %q: %t", args[0], neg)
		}
		return nil
	})
	if err != nil {
		ts.Fatalf("%v\n%s", err, out)
	}
}

// measure POD[,POD...] send|receive|both MBIT[,MBIT...] [ADDRESS]: the pods, at
// the same time, get those rates, within a tenth; one rate is of all together.
func (s *suite) measure(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 3 || neg {
		ts.Fatalf("usage: measure POD[,POD...] send|receive|both MBIT[,MBIT...] [ADDRESS]")
	}
	address := s.server
	if len(args) > 3 {
		address = args[3]
	}
	pods, wants := strings.Split(args[0], ","), strings.Split(args[2], ",")
	together := len(wants) == 1
	if !together && len(pods) != len(wants) {
		ts.Fatalf("measure: %d pods, %d rates", len(pods), len(wants))
	}
	measured := make([]clusterclient.Rates, len(pods))
	errs := make([]error, len(pods))
	var all sync.WaitGroup
	for i, pod := range pods {
		all.Go(func() {
			measured[i], errs[i] = s.bed.Measure(context.Background(), ts.Getenv("NS")+"/"+pod, address, args[1], 2*time.Second)
		})
	}
	all.Wait()
	ts.Check(errors.Join(errs...))
	if together {
		var sum clusterclient.Rates
		for _, r := range measured {
			sum.Send, sum.Receive = sum.Send+r.Send, sum.Receive+r.Receive
		}
		measured, pods = []clusterclient.Rates{sum}, args[:1]
	}
	for i, r := range measured {
		ts.Logf("%s: send %.1f, receive %.1f Mbit/s", pods[i], r.Send/1e6, r.Receive/1e6)
		want, err := strconv.ParseFloat(wants[i], 64)
		ts.Check(err)
		for direction, got := range map[string]float64{"send": r.Send, "receive": r.Receive} {
			if (args[1] == direction || args[1] == "both") && math.Abs(got/1e6-want)/want > tolerance {
				ts.Fatalf("pod %s: %s %.1f Mbit/s, want %.0f", pods[i], direction, got/1e6, want)
			}
		}
	}
}

// together FILE FILE... MBIT: the pods that a file names, POD[,POD...], get that
// rate together, the pods of all files at the same time.
func (s *suite) together(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 2 || neg {
		ts.Fatalf("usage: together FILE... MBIT")
	}
	want, err := strconv.ParseFloat(args[len(args)-1], 64)
	ts.Check(err)
	sums := make([]float64, len(args)-1)
	var mu sync.Mutex
	var all sync.WaitGroup
	var errs error
	for i, file := range args[:len(args)-1] {
		for pod := range strings.SplitSeq(strings.TrimSpace(ts.ReadFile(file)), ",") {
			all.Go(func() {
				r, err := s.bed.Measure(context.Background(), ts.Getenv("NS")+"/"+pod, s.server, "send", 2*time.Second)
				mu.Lock()
				defer mu.Unlock()
				sums[i] += r.Send / 1e6
				errs = errors.Join(errs, err)
			})
		}
	}
	all.Wait()
	ts.Check(errs)
	ts.Logf("together: %.1f Mbit/s", sums)
	for i, sum := range sums {
		if math.Abs(sum-want)/want > tolerance {
			ts.Fatalf("the pods of %s send %.1f Mbit/s together, want %.0f", args[i], sum, want)
		}
	}
}

// daemon kill|stop|continue kubelet|containerd|apiserver: kills it, upon which
// it is started again, or keeps it from doing anything for a while.
func (s *suite) daemon(ts *testscript.TestScript, neg bool, args []string) {
	signals := map[string]string{"kill": "-KILL", "stop": "-STOP", "continue": "-CONT"}
	patterns := map[string]string{"kubelet": "kube kubelet .*-override=n1", "containerd": "^[^ ]*/containerd --config", "apiserver": "kube kube-apiserver "}
	if len(args) != 2 || neg || signals[args[0]] == "" || patterns[args[1]] == "" {
		ts.Fatalf("usage: daemon kill|stop|continue kubelet|containerd|apiserver")
	}
	send := func(signal string) error {
		_, err := s.bed.Node(context.Background(), "n1", "pkill", signal, "-f", patterns[args[1]])
		return err
	}
	ts.Check(send(signals[args[0]]))
	if args[0] == "stop" {
		ts.Defer(func() { _ = send("-CONT") })
	}
}

// share NAME KEY=VALUE...: a claim NAME to a share of a NIC and a pod NAME that
// uses it. Keys: network (backup), bandwidth (100M), address, node, and
// parameters, a JSON object's fields; pod=none makes the claim only.
func (s *suite) share(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 1 || neg {
		ts.Fatalf("usage: share NAME KEY=VALUE...")
	}
	values := map[string]string{"name": args[0], "network": "backup", "bandwidth": "100M", "node": "n1", "pod": args[0]}
	for _, a := range args[1:] {
		key, value, ok := strings.Cut(a, "=")
		if !ok {
			ts.Fatalf("share: %q is not KEY=VALUE", a)
		}
		values[key] = value
	}
	if a := values["address"]; a != "" {
		values["parameters"] = fmt.Sprintf(`"addresses": [%q]`, a)
	}
	if p := values["parameters"]; p != "" {
		values["config"] = fmt.Sprintf(shareConfig, p)
	}
	manifest := shareClaim
	if values["pod"] != "none" {
		manifest += "---\n" + sharePod
	}
	manifest = os.Expand(manifest, func(key string) string { return values[key] })
	file := ts.MkAbs("share-" + args[0] + ".yaml")
	ts.Check(os.WriteFile(file, []byte(manifest), 0o644))
	s.script("kubectl")(ts, false, []string{"apply", "-f", file})
}

const shareClaim = `apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: $name}
spec:
  devices:
    requests:
    - name: nic
      exactly:
        deviceClassName: nic.dra-shared.dev
        selectors: [{cel: {expression: 'device.attributes["dra-shared.dev"].network == "$network"'}}]
        capacity: {requests: {bandwidth: "$bandwidth"}}
$config`

const shareConfig = `    config:
    - opaque:
        driver: dra-shared.dev
        parameters: {apiVersion: dra-shared.dev/v1alpha1, kind: NetworkAttachment, %s}
`

const sharePod = `apiVersion: v1
kind: Pod
metadata: {name: $pod}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: $node}
  resourceClaims: [{name: nic, resourceClaimName: $name}]
  containers:
  - {name: work, image: "registry.local/nettool:dev", imagePullPolicy: Never, resources: {claims: [{name: nic}]}}
`

// install VALUE...: upgrades the chart with values set, until the script ends.
func (s *suite) install(ts *testscript.TestScript, neg bool, args []string) {
	err := s.bed.Install(context.Background(), args...)
	if neg != (err != nil) {
		ts.Fatalf("install %v: %v", args, err)
	}
	if err != nil {
		ts.Logf("%v", err)
		return
	}
	ts.Defer(func() {
		if err := s.bed.Install(context.Background()); err != nil {
			ts.Logf("%v", err)
		}
	})
}

// example FILE NAME OUT: writes the YAML block of a document that makes an
// object of that name. What the documents show is what is tested.
func (s *suite) example(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 3 || neg {
		ts.Fatalf("usage: example FILE NAME OUT")
	}
	raw, err := os.ReadFile(filepath.Join(s.bed.Root, args[0]))
	ts.Check(err)
	for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(raw, -1) {
		if strings.Contains(string(block[1]), "metadata: {name: "+args[1]+"}") {
			ts.Check(os.WriteFile(ts.MkAbs(args[2]), block[1], 0o644))
			return
		}
	}
	ts.Fatalf("%s has no example that makes %s", args[0], args[1])
}

// plugin stop|start: takes the plugin off all nodes, or lets it come back. It
// comes back by itself when the script ends.
func (s *suite) plugin(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: plugin stop|start")
	}
	ctx := context.Background()
	start := func() error {
		if _, err := s.bed.Kubectl(ctx, "-n", "dra-shared-system", "patch", "daemonset", "dra-shared-plugin", "-p", `{"spec":{"template":{"spec":{"nodeSelector":{"nowhere":null}}}}}`); err != nil {
			return err
		}
		_, err := s.bed.Kubectl(ctx, "-n", "dra-shared-system", "rollout", "status", "daemonset", "--timeout=60s")
		return err
	}
	if args[0] == "start" {
		ts.Check(start())
		return
	}
	ts.Defer(func() {
		if err := start(); err != nil {
			ts.Logf("%v", err)
		}
	})
	_, err := s.bed.Kubectl(ctx, "-n", "dra-shared-system", "patch", "daemonset", "dra-shared-plugin", "-p", `{"spec":{"template":{"spec":{"nodeSelector":{"nowhere":"yes"}}}}}`)
	ts.Check(err)
	s.until(ts, false, []string{"^$", "kubectl", "-n", "dra-shared-system", "get", "pods", "-l", "app.kubernetes.io/component=plugin", "-o", "name"})
}

// gates default|all: the cluster's components start again with those feature
// gates.
func (s *suite) gates(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: gates default|all")
	}
	ts.Check(s.bed.SetGates(context.Background(), args[0]))
	s.until(ts, false, []string{"ok", "kubectl", "-n", "default", "get", "--raw", "/readyz"})
}

// unchecked COMMAND ARGS...: runs a command while admission checks no parameters, as
// for claims that were there before the driver.
func (s *suite) unchecked(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: unchecked share|kubectl ARGS...")
	}
	ctx := context.Background()
	const kind, name = "validatingwebhookconfiguration", "dra-shared-controller"
	raw, err := s.bed.Kubectl(ctx, "get", kind, name, "-o", "json")
	ts.Check(err)
	file := ts.MkAbs("webhook.json")
	ts.Check(os.WriteFile(file, []byte(regexp.MustCompile(`(?m)^\s*"(resourceVersion|uid)": .*\n`).ReplaceAllString(raw, "")), 0o644))
	_, err = s.bed.Kubectl(ctx, "delete", kind, name)
	ts.Check(err)
	restore := sync.OnceValue(func() error {
		_, err := s.bed.Kubectl(ctx, "create", "-f", file)
		return err
	})
	ts.Defer(func() { _ = restore() }) // also if the command fails
	wrong := ts.MkAbs("unchecked.yaml")
	ts.Check(os.WriteFile(wrong, []byte(wrongClaim), 0o644))
	// The API server learns of it a moment later.
	s.until(ts, false, []string{"created", "kubectl", "create", "--dry-run=server", "-f", wrong})
	switch args[0] {
	case "share":
		s.share(ts, false, args[1:])
	default:
		s.script(args[0])(ts, false, args[1:])
	}
	ts.Check(restore())
}

const wrongClaim = `apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: wrong}
spec:
  devices:
    requests: [{name: nic, exactly: {deviceClassName: nic.dra-shared.dev}}]
    config: [{opaque: {driver: dra-shared.dev, parameters: {apiVersion: dra-shared.dev/v1alpha1, kind: Wrong}}}]
`

// controller stop|start: takes the controller away, or lets it come back. It
// comes back by itself when the script ends.
func (s *suite) controller(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: controller stop|start")
	}
	ctx := context.Background()
	const system = "dra-shared-system"
	scale := func(replicas string) error {
		_, err := s.bed.Kubectl(ctx, "-n", system, "scale", "deployment", "dra-shared-controller", "--replicas="+replicas)
		return err
	}
	if args[0] == "start" {
		ts.Check(scale("1"))
		_, err := s.bed.Kubectl(ctx, "-n", system, "rollout", "status", "deployment", "dra-shared-controller", "--timeout=60s")
		ts.Check(err)
		return
	}
	ts.Defer(func() {
		if err := scale("1"); err != nil {
			ts.Logf("%v", err)
		}
	})
	ts.Check(scale("0"))
	s.until(ts, false, []string{"^$", "kubectl", "-n", system, "get", "pods", "-l", "app.kubernetes.io/component=controller", "-o", "name"})
}

// clean: all pods of the script are deleted, and nothing of them is on any node.
func (s *suite) clean(ts *testscript.TestScript, _ bool, _ []string) {
	ctx := context.Background()
	for _, kind := range []string{"pods", "podgroups.scheduling.dra-shared.dev", "resourceclaims"} {
		_, err := s.bed.Kubectl(ctx, "-n", ts.Getenv("NS"), "delete", kind, "--all", "--grace-period=1", "--timeout=60s")
		ts.Check(err)
	}
	var out string
	err := clusterclient.Eventually(ctx, eventually, func() (err error) {
		for _, node := range s.nodes {
			if out, err = s.bed.Node(ctx, node, "sh", "-c", leftovers); err != nil {
				return err
			}
			if strings.TrimSpace(out) != "" {
				return fmt.Errorf("left on %s", node)
			}
		}
		return nil
	})
	if err != nil {
		ts.Fatalf("%v:\n%s", err, out)
	}
}

// leftovers prints claim records, attach records, CDI specs and the classes of
// shares: minor numbers from 10 on are shares'.
const leftovers = `
cd /var/lib/kubelet/plugins/dra-shared.dev
find claims dra-device-metadata files /run/dra-shared/attached /var/run/cdi/ -type f
for nic in nic0 nic1 ifb-nic0 ifb-nic1; do tc class show dev $nic 2>/dev/null | grep -E 'htb d5a:[0-9a-f]{2,} ' | sed "s/^/$nic /"; done
true`
