// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/measure"
)

// measureFor is the duration of one measurement.
const measureFor = 2 * time.Second

// measureTogetherFor is the duration of a measurement with added rates. The flows start and end at slightly different
// times, and a flow that runs alone has the whole bandwidth of its class. A longer measurement makes the overlap
// larger.
const measureTogetherFor = 2 * measureFor

// commands returns the commands of stories, in addition to testscript's own.
func (s *suite) commands() map[string]func(*testscript.TestScript, bool, []string) {
	return map[string]func(*testscript.TestScript, bool, []string){
		"kubectl":         s.script("kubectl"),
		"node":            s.script("node"),
		"pod":             s.script("pod"),
		"network":         s.script("network"),
		"share":           s.share,
		"until":           s.until,
		"within":          s.within,
		"addresses":       s.addresses,
		"daemon":          s.daemon,
		"measure":         s.measure,
		"together":        s.together,
		"install":         s.install,
		"finally":         s.finally,
		"chart":           s.chart,
		"plugin":          s.plugin,
		"controller":      s.controller,
		"example":         s.example,
		"gates":           s.gates,
		"load":            s.load,
		"without-webhook": s.withoutWebhook,
		"clean":           s.clean,
	}
}

// namespaced adds the story's namespace to arguments for kubectl, unless they name
// one or a resource without namespace.
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

// script returns the command that runs one of the cluster's scripts. `stdout` and `stderr` check its output.
func (s *suite) script(name string) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		err := ts.Exec(filepath.Join(s.cluster.Dir, name), namespaced(ts, name, args)...)
		if neg && err == nil {
			ts.Fatalf("%s %s: succeeded, want an error", name, strings.Join(args, " "))
		}
		if !neg && err != nil {
			ts.Fatalf("%s %s: %v", name, strings.Join(args, " "), err)
		}
	}
}

// until REGEXP SCRIPT ARGS...: repeats the script until it succeeds and its output
// matches. With `!`: until it succeeds and its output does not match. A script that
// fails shows nothing, so it never ends the wait.
func (s *suite) until(ts *testscript.TestScript, neg bool, args []string) {
	s.repeat(ts, neg, waitTimeout, args)
}

// within DURATION REGEXP SCRIPT ARGS...: like until, with a time limit.
func (s *suite) within(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 4 {
		ts.Fatalf("usage: within DURATION REGEXP kubectl|node|pod|network ARGS...")
	}
	limit, err := time.ParseDuration(args[0])
	ts.Check(err)
	s.repeat(ts, neg, limit, args[1:])
}

func (s *suite) repeat(ts *testscript.TestScript, neg bool, limit time.Duration, args []string) {
	if len(args) < 3 {
		ts.Fatalf("usage: until REGEXP kubectl|node|pod|network ARGS...")
	}
	pattern, script := args[0], args[1]
	re, err := regexp.Compile("(?s)" + pattern)
	ts.Check(err)
	expectation := "output matches"
	if neg {
		expectation = "output does not match"
	}
	var out string
	err = eventually.Poll(context.Background(), limit, func() error {
		var err error
		if out, err = s.output(script, namespaced(ts, script, args[2:])); err != nil {
			return fmt.Errorf("the command fails: %w", err)
		}
		if re.MatchString(out) == neg {
			return errors.New("the command succeeds, its output is not as expected")
		}
		return nil
	})
	if err != nil {
		ts.Fatalf("%s %s\n  expected: %s %s\n  observed: %v\n  last output:\n%s",
			script, strings.Join(args[2:], " "), expectation, pattern, err, indent(out))
	}
	_, err = io.WriteString(ts.Stdout(), out) // for the command stdout
	ts.Check(err)
}

// output runs a script and returns its standard output and, of programs, their standard error.
func (s *suite) output(script string, args []string) (string, error) {
	if script == "kubectl" && clusterclient.IsQuery(args) {
		return s.cluster.Kubectl(context.Background(), args...)
	}
	out, err := s.cluster.Command(context.Background(), script, args...).CombinedOutput()
	return string(out), err
}

// addresses N: waits until N claims of the story have an address. It fails as soon as two claims have
// the same.
func (s *suite) addresses(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 1 || neg {
		ts.Fatalf("usage: addresses N")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	twice := ""
	ts.Check(eventually.Poll(context.Background(), waitTimeout, func() error {
		out, err := s.cluster.Kubectl(context.Background(), "-n", ts.Getenv("NS"), "get", "resourceclaims",
			"-o", "jsonpath={.items[*].status.devices[*].networkData.ips[*]}")
		if err != nil {
			return err
		}
		found := strings.Fields(out)
		slices.Sort(found)
		if distinct := slices.Compact(slices.Clone(found)); len(distinct) < len(found) {
			twice = fmt.Sprintf("two claims have the same address: %v", found)
			return nil
		}
		if len(found) != want {
			return fmt.Errorf("addresses of claims: got %v, want %d", found, want)
		}
		return nil
	}))
	if twice != "" {
		ts.Fatalf("%s", twice)
	}
}

// measure POD[,POD...] send|receive|both MBIT[,MBIT...] [ADDRESS]: measures the
// pods concurrently and checks their rates to within 10 %. A single rate is the
// sum for all pods. On a cluster that carries less (E2E_CARRIES), a rate must be
// at least what the cluster carries, and at most as expected. A rate that is too low
// is measured again (see package measure).
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
		ts.Fatalf("measure: got %d pods and %d rates, want as many rates as pods, or one", len(pods), len(wants))
	}
	wanted := make([]float64, len(wants))
	for i, want := range wants {
		var err error
		wanted[i], err = strconv.ParseFloat(want, 64)
		ts.Check(err)
	}
	var last error
	for tries := (measure.Attempts{}); tries.Next(); {
		duration := measureFor
		if together && len(pods) > 1 {
			duration = measureTogetherFor
		}
		measured, err := s.measurePods(ts.Getenv("NS"), pods, address, args[1], duration)
		ts.Check(err)
		names := pods
		if together {
			names, measured = args[:1], []clusterclient.Rates{sumOf(measured)}
		}
		tooLow, err := s.checkRates(ts, names, measured, wanted, args[1])
		if err == nil {
			return
		}
		if !tooLow {
			ts.Fatalf("%v", err)
		}
		ts.Logf("measuring again: %v", err)
		last = err
	}
	ts.Fatalf("%v", last)
}

// measurePods measures pods concurrently. Several pods measure both directions one after the other: the time that a pod
// waits for the last bytes that it has sent differs, so the pods would receive at different times.
func (s *suite) measurePods(
	namespace string, pods []string, address, direction string, duration time.Duration,
) ([]clusterclient.Rates, error) {
	directions := []string{direction}
	if direction == "both" && len(pods) > 1 {
		directions = []string{"send", "receive"}
	}
	measured := make([]clusterclient.Rates, len(pods))
	for _, direction := range directions {
		err := simultaneously(len(pods), func(i int, flags ...string) error {
			rates, err := s.cluster.Measure(
				context.Background(), namespace+"/"+pods[i], address, direction, duration, flags...)
			measured[i] = sumOf([]clusterclient.Rates{measured[i], rates})
			return err
		})
		if err != nil {
			return measured, err
		}
	}
	return measured, nil
}

// simultaneously calls measure concurrently for each number below count. If there are several, it passes the flag of
// nettool that makes them start at the same time: rates from different times do not add up to the bandwidth that the
// pods share. It repeats the measurements if one of them started too late.
func simultaneously(count int, measure func(i int, flags ...string) error) error {
	const maxLead = 16 * time.Second
	for lead := time.Second; ; lead *= 2 {
		var flags []string
		if count > 1 {
			flags = []string{"--at=" + time.Now().Add(lead).Format(time.RFC3339Nano)}
		}
		errs := make([]error, count)
		var all sync.WaitGroup
		for i := range count {
			all.Go(func() { errs[i] = measure(i, flags...) })
		}
		all.Wait()
		err := errors.Join(errs...)
		if err == nil || lead >= maxLead || !strings.Contains(err.Error(), "too late to start") {
			return err
		}
	}
}

func sumOf(rates []clusterclient.Rates) (sum clusterclient.Rates) {
	for _, r := range rates {
		sum.Send, sum.Receive = sum.Send+r.Send, sum.Receive+r.Receive
	}
	return sum
}

// checkRates compares measured rates with the wanted ones, which are in Mbit/s. It
// returns an error about one that differs, and whether all that differ are too low.
func (s *suite) checkRates(
	ts *testscript.TestScript, pods []string, measured []clusterclient.Rates, wanted []float64, direction string,
) (tooLow bool, err error) {
	for i, r := range measured {
		ts.Logf("%s: send %.1f, receive %.1f Mbit/s", pods[i], r.Send/1e6, r.Receive/1e6)
		for name, rate := range map[string]float64{"send": r.Send, "receive": r.Receive} {
			got, want := rate/1e6, wanted[i]
			if direction != name && direction != "both" || s.isRate(got, want) {
				continue
			}
			differs := fmt.Errorf("measured rate of pod %s, direction %s: got %.1f Mbit/s, want %.0f Mbit/s within %.0f %%",
				pods[i], name, got, want, tolerance*100)
			if got > want {
				return false, differs
			}
			tooLow, err = true, differs
		}
	}
	return tooLow, err
}

// isRate reports whether a measured rate is the expected one, in Mbit/s.
func (s *suite) isRate(got, want float64) bool {
	atLeast := want
	if s.carries > 0 {
		atLeast = min(want, s.carries)
	}
	return got >= atLeast*(1-tolerance) && got <= want*(1+tolerance)
}

// together FILE... MBIT: measures the pods that all files name (POD[,POD...])
// concurrently, and checks that the rates of the pods of each file add up to MBIT.
func (s *suite) together(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 2 || neg {
		ts.Fatalf("usage: together FILE... MBIT")
	}
	want, err := strconv.ParseFloat(args[len(args)-1], 64)
	ts.Check(err)
	var last string
	for tries := (measure.Attempts{}); tries.Next(); {
		sums := s.sumsOfRates(ts, args[:len(args)-1])
		ts.Logf("together: %.1f Mbit/s", sums)
		last = ""
		for i, sum := range sums {
			if math.Abs(sum-want)/want <= tolerance {
				continue
			}
			last = fmt.Sprintf("sum of the rates at which the pods in %s send: got %.1f Mbit/s, want %.0f Mbit/s within %.0f %%",
				args[i], sum, want, tolerance*100)
			if sum > want {
				ts.Fatalf("%s", last)
			}
		}
		if last == "" {
			return
		}
		ts.Logf("measuring again: %s", last)
	}
	ts.Fatalf("%s", last)
}

// sumsOfRates measures the pods that all files name concurrently. It returns, for each file, the sum of its pods' send
// rates, in Mbit/s.
func (s *suite) sumsOfRates(ts *testscript.TestScript, files []string) []float64 {
	var pods []string
	var fileOf []int // by the index of the pod
	for i, file := range files {
		for pod := range strings.SplitSeq(strings.TrimSpace(ts.ReadFile(file)), ",") {
			pods, fileOf = append(pods, pod), append(fileOf, i)
		}
	}
	rates, err := s.measurePods(ts.Getenv("NS"), pods, s.server, "send", measureTogetherFor)
	ts.Check(err)
	sums := make([]float64, len(files))
	for i, r := range rates {
		sums[fileOf[i]] += r.Send / 1e6
	}
	return sums
}

// inControlPlane runs a command in the PID namespace of the cluster's control plane. A node that is a guest has another
// one.
func (s *suite) inControlPlane(command ...string) error {
	pid, err := os.ReadFile(filepath.Join(s.cluster.Dir, "init.pid"))
	if err != nil {
		return err
	}
	args := append([]string{"--target", strings.TrimSpace(string(pid)), "--mount", "--pid", "--"}, command...)
	if out, err := exec.Command("nsenter", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s in the control plane: %w: %s", strings.Join(command, " "), err, out)
	}
	return nil
}

// daemon kill|stop|continue kubelet|runtime|apiserver: kills a daemon, which is
// then restarted, or stops it until `continue` or the end of the story.
func (s *suite) daemon(ts *testscript.TestScript, neg bool, args []string) {
	signals := map[string]string{"kill": "-KILL", "stop": "-STOP", "continue": "-CONT"}
	patterns := map[string]string{
		"kubelet": "kube kubelet .*-override=n1", "runtime": "^[^ ]*/(containerd|crio) --config",
		"apiserver": "kube kube-apiserver ",
	}
	if len(args) != 2 || neg || signals[args[0]] == "" || patterns[args[1]] == "" {
		ts.Fatalf("usage: daemon kill|stop|continue kubelet|runtime|apiserver")
	}
	send := func(signal string) error {
		command := []string{"pkill", signal, "-f", patterns[args[1]]}
		if args[1] == "apiserver" {
			return s.inControlPlane(command...)
		}
		_, err := s.cluster.Node(context.Background(), "n1", command...)
		return err
	}
	ts.Check(send(signals[args[0]]))
	if args[0] == "stop" {
		ts.Defer(func() { _ = send("-CONT") })
	}
}

// share NAME KEY=VALUE...: creates the claim NAME for a share of a NIC and the pod
// NAME, which uses it. Keys, with defaults: network (backup), bandwidth (100M),
// address (none), node (n1), pod (NAME; none creates only the claim), parameters (the
// fields of a NetworkAttachment in JSON), and rights (none; NET_RAW, which CRI-O does not
// give to pods by default; NET_ADMIN in a user namespace of the pod).
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
	switch values["rights"] {
	case "":
	case "NET_RAW":
		values["security"] = ", securityContext: {capabilities: {add: [NET_RAW]}}"
	case "NET_ADMIN":
		values["hostUsers"] = "\n  hostUsers: false"
		values["security"] = ", securityContext: {capabilities: {add: [NET_ADMIN]}}"
	default:
		ts.Fatalf("share: rights=%s, want NET_RAW or NET_ADMIN", values["rights"])
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
spec:$hostUsers
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: $node}
  resourceClaims: [{name: nic, resourceClaimName: $name}]
  containers:
  - {name: work, image: registry.local/nettool:dev, imagePullPolicy: Never, resources: {claims: [{name: nic}]}$security}
`

// install VALUE...: upgrades the chart with values set, until the story ends. With
// `!`, the upgrade must fail; `stderr` checks its error.
func (s *suite) install(ts *testscript.TestScript, neg bool, args []string) {
	err := s.cluster.Install(context.Background(), args...)
	switch {
	case err == nil && neg:
		s.atEnd(ts, func() error { return s.cluster.Install(context.Background()) })
		ts.Fatalf("install %v: succeeded, want an error", args)
	case err == nil:
		s.atEnd(ts, func() error { return s.cluster.Install(context.Background()) })
	case neg:
		_, err := fmt.Fprintln(ts.Stderr(), err)
		ts.Check(err)
	default:
		ts.Fatalf("install %v: %v", args, err)
	}
}

// reporterKey is the key of the story's reporter in testscript.Env.Values.
type reporterKey struct{}

// atEnd calls restore when the story ends, which fails if restore fails.
func (s *suite) atEnd(ts *testscript.TestScript, restore func() error) {
	ts.Defer(func() {
		r := ts.Value(reporterKey{}).(story) //nolint:forcetypeassert // set in setup
		r.logState()
		if err := restore(); err != nil {
			r.Errorf("restore the cluster after the story: %v", err)
		}
	})
}

// finally SCRIPT ARGS...: runs the script when the story ends, even if it fails, and before the
// changes of earlier commands to the cluster are reverted.
func (s *suite) finally(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 2 || neg {
		ts.Fatalf("usage: finally kubectl|node|pod|network ARGS...")
	}
	command := s.cluster.Command(context.Background(), args[0], namespaced(ts, args[0], args[1:])...)
	s.atEnd(ts, func() error {
		if out, err := command.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
		}
		return nil
	})
}

// load FILE: loads an image archive into the nodes. Its path is relative to the root of the repository.
func (s *suite) load(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 1 || neg {
		ts.Fatalf("usage: load FILE")
	}
	ts.Check(s.cluster.Load(context.Background(), filepath.Join(s.cluster.Root, args[0])))
}

// example FILE NAME OUT: writes to OUT the YAML block of a document that defines the object NAME. The stories test the
// documentation's examples with it.
func (s *suite) example(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 3 || neg {
		ts.Fatalf("usage: example FILE NAME OUT")
	}
	raw, err := os.ReadFile(filepath.Join(s.cluster.Root, args[0]))
	ts.Check(err)
	for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(raw, -1) {
		if strings.Contains(string(block[1]), "metadata: {name: "+args[1]+"}") {
			// The test cluster cannot pull images.
			manifest := strings.ReplaceAll(string(block[1]), "image: busybox:1.37\n    command: [sleep, infinity]",
				"image: registry.local/nettool:dev\n    imagePullPolicy: Never")
			ts.Check(os.WriteFile(ts.MkAbs(args[2]), []byte(manifest), 0o644))
			return
		}
	}
	ts.Fatalf("%s does not contain a YAML block that defines the object %s", args[0], args[1])
}

// plugin stop|start: removes the plugin from all nodes, or starts it again. It is
// started again when the story ends.
func (s *suite) plugin(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 || args[0] != "stop" && args[0] != "start" {
		ts.Fatalf("usage: plugin stop|start")
	}
	ctx := context.Background()
	// No node has the label nowhere, so a selector for it removes all pods.
	selectNodes := func(value string) error {
		patch := `{"spec":{"template":{"spec":{"nodeSelector":{"nowhere":` + value + `}}}}}`
		_, err := s.cluster.Kubectl(ctx, "-n", system, "patch", "daemonset", "dra-shared-plugin", "-p", patch)
		return err
	}
	start := func() error {
		if err := selectNodes("null"); err != nil {
			return err
		}
		_, err := s.cluster.Kubectl(ctx, "-n", system, "rollout", "status", "daemonset", "--timeout=60s")
		return err
	}
	if args[0] == "start" {
		ts.Check(start())
		return
	}
	s.atEnd(ts, start)
	ts.Check(selectNodes(`"yes"`))
	s.until(ts, false, []string{"^$", "kubectl", "-n", system, "get", "pods",
		"-l", "app.kubernetes.io/component=plugin", "-o", "name"})
}

// gates default|all|capacity: restarts the cluster's components with these feature gates.
func (s *suite) gates(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: gates default|all|capacity")
	}
	ts.Check(s.cluster.SetGates(context.Background(), args[0]))
	s.until(ts, false, []string{"ok", "kubectl", "-n", "default", "get", "--raw", "/readyz"})
}

// without-webhook COMMAND ARGS...: runs a command while the validating webhook is not
// configured, to create claims as they exist from before the driver's installation.
func (s *suite) withoutWebhook(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: without-webhook share|kubectl ARGS...")
	}
	ctx := context.Background()
	const kind, name = "validatingwebhookconfiguration", "dra-shared-controller"
	raw, err := s.cluster.Kubectl(ctx, "get", kind, name, "-o", "json")
	ts.Check(err)
	file := ts.MkAbs("webhook.json")
	manifest := regexp.MustCompile(`(?m)^\s*"(resourceVersion|uid)": .*\n`).ReplaceAllString(raw, "")
	ts.Check(os.WriteFile(file, []byte(manifest), 0o644))
	_, err = s.cluster.Kubectl(ctx, "delete", kind, name)
	ts.Check(err)
	restore := sync.OnceValue(func() error {
		_, err := s.cluster.Kubectl(ctx, "create", "-f", file)
		return err
	})
	s.atEnd(ts, restore) // restores it if the command fails
	wrong := ts.MkAbs("wrong-claim.yaml")
	ts.Check(os.WriteFile(wrong, []byte(wrongClaim), 0o644))
	// The API server stops calling the webhook after a short delay.
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

// controller stop|start: scales the controller to zero, or starts it again. It is
// started again when the story ends.
func (s *suite) controller(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 || args[0] != "stop" && args[0] != "start" {
		ts.Fatalf("usage: controller stop|start")
	}
	ctx := context.Background()
	const deployment = "dra-shared-controller"
	scale := func(replicas string) error {
		_, err := s.cluster.Kubectl(ctx, "-n", system, "scale", "deployment", deployment, "--replicas="+replicas)
		return err
	}
	start := func() error {
		if err := scale("2"); err != nil {
			return err
		}
		_, err := s.cluster.Kubectl(ctx, "-n", system, "rollout", "status", "deployment", deployment, "--timeout=60s")
		return err
	}
	if args[0] == "start" {
		ts.Check(start())
		return
	}
	s.atEnd(ts, start)
	ts.Check(scale("0"))
	s.until(ts, false, []string{"^$", "kubectl", "-n", system, "get", "pods",
		"-l", "app.kubernetes.io/component=controller", "-o", "name"})
}

// clean: deletes the story's pods, PodGroups, and claims, and waits until no node
// has anything that the driver made for them.
func (s *suite) clean(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: clean")
	}
	ctx := context.Background()
	for _, kind := range []string{"pods", "podgroups.scheduling.dra-shared.dev", "resourceclaims"} {
		_, err := s.cluster.Kubectl(ctx, "-n", ts.Getenv("NS"),
			"delete", kind, "--all", "--grace-period=1", "--timeout=60s")
		ts.Check(err)
	}
	ts.Check(s.awaitNoLeftovers(ctx, waitTimeout))
}

// awaitNoLeftovers waits until no node has anything that the driver made for a
// claim.
func (s *suite) awaitNoLeftovers(ctx context.Context, timeout time.Duration) error {
	return eventually.Poll(ctx, timeout, func() error {
		for _, node := range s.nodes {
			out, err := s.cluster.Node(ctx, node, "sh", "-euc", listLeftovers)
			if err != nil {
				return fmt.Errorf("list what the driver left on node %s: %w", node, err)
			}
			if strings.TrimSpace(out) != "" {
				return fmt.Errorf("the driver left on node %s:\n%s", node, indent(out))
			}
		}
		return nil
	})
}

// listLeftovers prints claim records, attachment records, CDI specs, device metadata, the classes of
// shares on NICs, IFB devices, and hairpins, and links of trials. The minor numbers of the classes of
// shares start at 10. It fails if a query fails: only objects that do not exist count as absent.
const listLeftovers = `
files() { if [ -e "$1" ]; then find "$1" -type f; fi; }
plugin=/var/lib/kubelet/plugins/dra-shared.dev
[ -d "$plugin" ] || { echo "$plugin does not exist" >&2; exit 1; }
for dir in "$plugin/claims" "$plugin/dra-device-metadata" "$plugin/files" /run/dra-shared/attached /var/run/cdi; do
  files "$dir"
done
for nic in nic0 nic1 ifb-nic0 ifb-nic1 hpo-nic0 hpo-nic1; do
  case $nic in ifb-*|hpo-*) [ -e "/sys/class/net/$nic" ] || continue ;; esac
  classes=$(tc class show dev "$nic")
  printf '%s\n' "$classes" | sed -nE "/htb d5a:[0-9a-f]{2,} /s/^/$nic /p"
done
links=$(ip -brief link)
printf '%s\n' "$links" | sed -n '/^dra-trial/p'`

// indent indents the lines of a text for a failure message.
func indent(text string) string {
	return "    " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n    ")
}
