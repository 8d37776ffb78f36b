package e2e

import (
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
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
)

// What is done to a plugin on a real node. All of it happens on one cluster.
func TestFaults(t *testing.T) {
	if os.Getenv("E2E") == "" && os.Getenv("E2E_CLUSTER") == "" {
		t.Skip("needs a cluster: run `make e2e`")
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	b, err := clusterclient.New(".cluster-e2e-faults")
	if err != nil {
		t.Fatal(err)
	}
	f := &faults{suite: start(ctx, t, b, clusterclient.Options{Nodes: 1})}
	for _, tc := range []struct {
		name string
		run  func(context.Context, *testing.T)
	}{
		{"dies at any step", f.crash},
		{"ten rolling updates", f.roll},
		{"every privilege is needed", f.privileges},
		{"uninstall", f.uninstall},
	} {
		t.Run(strings.ReplaceAll(tc.name, " ", "-"), func(t *testing.T) { tc.run(ctx, t) })
	}
}

type faults struct{ *suite }

const system = "dra-shared-system"

// kubectl is for what must work.
func (f *faults) kubectl(ctx context.Context, t *testing.T, args ...string) string {
	t.Helper()
	out, err := f.bed.Kubectl(ctx, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (f *faults) apply(ctx context.Context, manifest string) error {
	cmd := f.bed.Command(ctx, "kubectl", "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(manifest)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apply: %w: %s", err, out)
	}
	return nil
}

func share(name string) string {
	return os.Expand(shareClaim+"---\n"+sharePod, func(key string) string {
		return map[string]string{"name": name, "pod": name, "network": "backup", "bandwidth": "20M", "node": "n1"}[key]
	})
}

// poke makes the kubelet try again at once: by itself it waits for up to a
// minute and a half once a driver was away.
func (f *faults) poke(ctx context.Context, pod string) {
	_, _ = f.bed.Kubectl(ctx, "annotate", "pod", pod, "--overwrite", fmt.Sprintf("poke=%d", time.Now().UnixNano()))
}

func (f *faults) ready(ctx context.Context, pod string, within time.Duration) error {
	return clusterclient.Eventually(ctx, within, func() error {
		out, err := f.bed.Kubectl(ctx, "get", "pod", pod, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out != "True" {
			f.poke(ctx, pod)
			err = fmt.Errorf("pod %s is not ready", pod)
		}
		return err
	})
}

// gone deletes pods and their claims, and waits until the node has nothing of
// them.
func (f *faults) gone(ctx context.Context, pods ...string) error {
	if _, err := f.bed.Kubectl(ctx, append([]string{"delete", "pod", "--wait=false"}, pods...)...); err != nil {
		return err
	}
	if err := clusterclient.Eventually(ctx, eventually, func() error {
		out, err := f.bed.Kubectl(ctx, append([]string{"get", "pod", "--ignore-not-found", "-o", "name"}, pods...)...)
		if err == nil && strings.TrimSpace(out) != "" {
			for _, pod := range strings.Fields(out) {
				f.poke(ctx, strings.TrimPrefix(pod, "pod/"))
			}
			err = fmt.Errorf("still there: %s", out)
		}
		return err
	}); err != nil {
		return err
	}
	if _, err := f.bed.Kubectl(ctx, append([]string{"delete", "resourceclaim"}, pods...)...); err != nil {
		return err
	}
	return f.nothingLeft(ctx)
}

func (f *faults) nothingLeft(ctx context.Context) error {
	return clusterclient.Eventually(ctx, 30*time.Second, func() error {
		out, err := f.bed.Node(ctx, "n1", "sh", "-c", leftovers)
		if err == nil && strings.TrimSpace(out) != "" {
			err = fmt.Errorf("left on n1:\n%s", out)
		}
		return err
	})
}

// crash kills the plugin before or after steps that it takes on the way of a
// claim, spread over all that there are.
func (f *faults) crash(ctx context.Context, t *testing.T) {
	const samples = 10
	if out, err := exec.CommandContext(ctx, filepath.Join(f.bed.Root, "bin/cluster"), "load", "--dir", f.bed.Dir, filepath.Join(f.bed.Root, "bin/images/crash.tar")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := f.bed.Install(ctx, "image.tag=crash"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.bed.Install(ctx); err != nil {
			t.Error(err)
		}
	})
	life := func(name string) {
		t.Helper()
		err := f.apply(ctx, share(name))
		if err == nil {
			err = f.ready(ctx, name, eventually)
		}
		if err == nil {
			_, err = f.bed.Node(ctx, "n1", "sh", "-c", "for p in $(pgrep -f -x /bin/nettool); do nsenter -t $p -n ip link show net1; done | grep -q 'state UP'")
		}
		if err == nil {
			err = clusterclient.Eventually(ctx, eventually, func() error {
				out, err := f.bed.Kubectl(ctx, "get", "resourceclaim", name, "-o", "jsonpath={.status.devices[0].conditions[*].status}")
				if err == nil && out != "True True" {
					err = fmt.Errorf("the conditions of claim %s are %q", name, out)
				}
				return err
			})
		}
		if err == nil {
			err = f.gone(ctx, name)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	node := func(script string) string {
		t.Helper()
		out, err := f.bed.Node(ctx, "n1", "sh", "-c", script)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	node("echo >/run/dra-shared/steps")
	life("recorded")
	steps := strings.Split(strings.TrimSpace(node("cat /run/dra-shared/steps; rm /run/dra-shared/steps")), "\n")
	t.Logf("%d steps: %s", len(steps), strings.Join(steps, ", "))
	for i := range samples {
		at := 1 + i*(len(steps)-1)/(samples-1)
		when := []string{"before", "after"}[i%2]
		node(fmt.Sprintf("printf '%s %d' >/run/dra-shared/die.new; mv /run/dra-shared/die.new /run/dra-shared/die", when, at))
		life(fmt.Sprintf("dies-%d", at))
		if out := node("cat /run/dra-shared/die 2>/dev/null; rm -f /run/dra-shared/die"); out != "" {
			t.Logf("the plugin did not come to step %d, %s: its way was shorter", at, steps[at-1])
			continue
		}
		t.Logf("died %s step %d, %s", when, at, steps[at-1])
	}
	restarts := strings.TrimSpace(f.kubectl(ctx, t, "-n", system, "get", "pods", "-l", "app.kubernetes.io/component=plugin", "-o", "jsonpath={.items[*].status.containerStatuses[*].restartCount}"))
	t.Logf("the plugin was started again %s times", restarts)
	if restarts == "0" {
		t.Error("the plugin never died")
	}
}

// roll replaces the plugin ten times while pods come all the time: none starts
// without its link, none fails.
func (f *faults) roll(ctx context.Context, t *testing.T) {
	const updates, alive = 10, 40
	rolling, done := context.WithCancel(ctx)
	var rolls sync.WaitGroup
	rolls.Go(func() {
		defer done()
		for range updates {
			if _, err := f.bed.Kubectl(ctx, "-n", system, "rollout", "restart", "daemonset/dra-shared-plugin"); err != nil {
				t.Error(err)
			}
			if _, err := f.bed.Kubectl(ctx, "-n", system, "rollout", "status", "daemonset/dra-shared-plugin", "--timeout=60s"); err != nil {
				t.Error(err)
			}
		}
	})
	var (
		pods []string
		took []time.Duration
	)
	for i := 0; rolling.Err() == nil; i++ {
		name := fmt.Sprintf("rolling-%d", i)
		manifest := strings.ReplaceAll(share(name), "  containers:\n", "  restartPolicy: Never\n  containers:\n")
		manifest = strings.ReplaceAll(manifest, `imagePullPolicy: Never,`, `imagePullPolicy: Never, args: [show, --wait],`)
		start := time.Now()
		if err := f.apply(ctx, manifest); err != nil {
			t.Fatal(err)
		}
		pods = append(pods, name)
		if err := f.started(ctx, name); err != nil {
			t.Fatal(err)
		}
		took = append(took, time.Since(start))
		if len(pods) > alive {
			f.kubectl(ctx, t, "delete", "pod", pods[0], "--wait=false", "--grace-period=1")
			pods = pods[1:]
		}
	}
	rolls.Wait()
	slices.Sort(took)
	t.Logf("%d pods during %d updates, each with its link; from apply to running p50 %s, p99 %s, longest %s",
		len(took), updates, took[len(took)/2], took[len(took)*99/100], took[len(took)-1])
	if len(took) < updates {
		t.Errorf("only %d pods: that says nothing about %d updates", len(took), updates)
	}
	f.kubectl(ctx, t, "delete", "pod", "--all", "--grace-period=1", "--timeout=60s")
	f.kubectl(ctx, t, "delete", "resourceclaim", "--all", "--timeout=60s")
	if err := f.nothingLeft(ctx); err != nil {
		t.Error(err)
	}
}

// started waits until the pod's container runs, and checks that it saw its
// link. A container that fails is never started again.
func (f *faults) started(ctx context.Context, pod string) error {
	var failed error
	err := clusterclient.Eventually(ctx, 20*time.Second, func() error {
		out, err := f.bed.Kubectl(ctx, "get", "pod", pod, "-o", "jsonpath={.status.phase}")
		switch {
		case err != nil:
			return err
		case out == "Failed":
			failed = fmt.Errorf("pod %s failed", pod)
			return nil
		case out != "Running":
			return fmt.Errorf("pod %s is %s", pod, out)
		}
		return nil
	})
	if err = errors.Join(err, failed); err != nil {
		return err
	}
	return clusterclient.Eventually(ctx, 5*time.Second, func() error {
		out, err := f.bed.Kubectl(ctx, "logs", pod)
		if err == nil && !strings.Contains(out, "net1") {
			err = fmt.Errorf("pod %s started bare: %s", pod, out)
		}
		return err
	})
}

// privileges takes each capability, mount and permission away, one at a time,
// and sees something fail that works with it.
func (f *faults) privileges(ctx context.Context, t *testing.T) {
	if err := f.works(ctx); err != nil {
		t.Fatalf("with every privilege: %v", err)
	}
	for _, p := range f.listPrivileges(ctx, t) {
		f.kubectl(ctx, t, append([]string{"-n", system, "patch", "--type=json"}, p.patch...)...)
		if p.restart {
			f.kubectl(ctx, t, "-n", system, "rollout", "restart", "daemonset/dra-shared-plugin")
		}
		err := f.works(ctx)
		if why, known := neededElsewhere[p.name]; known {
			t.Logf("without %s: %v; %s", p.name, err, why)
		} else if err == nil {
			t.Errorf("without %s all works: take it away", p.name)
		} else {
			t.Logf("without %s: %s", p.name, strings.SplitN(err.Error(), "\n", 2)[0])
		}
		f.undo(ctx, t, p)
	}
	if err := f.works(ctx); err != nil {
		t.Errorf("with every privilege given back: %v", err)
	}
}

// neededElsewhere are privileges that this cluster cannot show to be needed.
var neededElsewhere = map[string]string{
	"permission to list resourceslices": "an API server that streams lists (WatchList, on by default since Kubernetes 1.34) is not asked for one; older ones are",
}

type privilege struct {
	name    string
	patch   []string
	back    []string
	restart bool
}

func (f *faults) undo(ctx context.Context, t *testing.T, p privilege) {
	t.Helper()
	f.kubectl(ctx, t, append([]string{"-n", system, "patch", "--type=json"}, p.back...)...)
	if p.restart {
		f.kubectl(ctx, t, "-n", system, "rollout", "restart", "daemonset/dra-shared-plugin")
	}
	// A plugin that never became ready keeps the update from going on.
	f.kubectl(ctx, t, "-n", system, "delete", "pod", "--all", "--grace-period=1", "--wait=false")
	if err := f.settled(ctx, 60*time.Second); err != nil {
		t.Fatal(err)
	}
}

// listPrivileges reads from the cluster what the chart asked for.
func (f *faults) listPrivileges(ctx context.Context, t *testing.T) (all []privilege) {
	t.Helper()
	var set struct {
		Spec struct {
			Template struct {
				Spec struct {
					Containers []struct {
						SecurityContext struct{ Capabilities struct{ Add []string } }
						VolumeMounts    []struct{ Name, MountPath string }
					}
				}
			}
		}
	}
	if err := json.Unmarshal([]byte(f.kubectl(ctx, t, "-n", system, "get", "daemonset", "dra-shared-plugin", "-o", "json")), &set); err != nil {
		t.Fatal(err)
	}
	remove := func(kind, path string, value any, restart bool, name string) {
		raw, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, privilege{name: name, restart: restart,
			patch: append(strings.Fields(kind), "-p", fmt.Sprintf(`[{"op": "remove", "path": %q}]`, path)),
			back:  append(strings.Fields(kind), "-p", fmt.Sprintf(`[{"op": "add", "path": %q, "value": %s}]`, path, raw))})
	}
	container := set.Spec.Template.Spec.Containers[0]
	for i, c := range container.SecurityContext.Capabilities.Add {
		remove("daemonset dra-shared-plugin", fmt.Sprintf("/spec/template/spec/containers/0/securityContext/capabilities/add/%d", i), c, false, "capability "+c)
	}
	for i, m := range container.VolumeMounts {
		remove("daemonset dra-shared-plugin", fmt.Sprintf("/spec/template/spec/containers/0/volumeMounts/%d", i),
			map[string]string{"name": m.Name, "mountPath": m.MountPath}, false, "mount "+m.MountPath)
	}
	var role struct {
		Rules []struct{ Resources, Verbs []string }
	}
	if err := json.Unmarshal([]byte(f.kubectl(ctx, t, "get", "clusterrole", "dra-shared-plugin", "-o", "json")), &role); err != nil {
		t.Fatal(err)
	}
	for i, rule := range role.Rules {
		for j, verb := range rule.Verbs {
			path, value := fmt.Sprintf("/rules/%d/verbs/%d", i, j), any(verb)
			if len(rule.Verbs) == 1 { // a rule without verbs is refused
				path, value = fmt.Sprintf("/rules/%d", i), nil
			}
			if value == nil {
				value = rawRule(ctx, t, f, i)
			}
			remove("clusterrole dra-shared-plugin", path, value, true, fmt.Sprintf("permission to %s %s", verb, strings.Join(rule.Resources, ",")))
		}
	}
	return all
}

func rawRule(ctx context.Context, t *testing.T, f *faults, i int) (rule any) {
	t.Helper()
	if err := json.Unmarshal([]byte(f.kubectl(ctx, t, "get", "clusterrole", "dra-shared-plugin", "-o", fmt.Sprintf("jsonpath={.rules[%d]}", i))), &rule); err != nil {
		t.Fatal(err)
	}
	return rule
}

// settled waits until one plugin runs, is ready and up to date.
func (f *faults) settled(ctx context.Context, within time.Duration) error {
	_, err := f.bed.Kubectl(ctx, "-n", system, "rollout", "status", "daemonset/dra-shared-plugin", "--timeout="+within.String())
	return err
}

// works tries all that the plugin's privileges are for, and that nothing was
// denied to it.
func (f *faults) works(ctx context.Context) (err error) {
	if err := f.settled(ctx, 6*time.Second); err != nil {
		return errors.New("the plugin does not become ready")
	}
	name := "works-" + fmt.Sprint(time.Now().UnixNano())
	forgot := strings.ReplaceAll(share("forgot-"+name), ", resources: {claims: [{name: nic}]}", "")
	forgot = strings.Replace(forgot, "kind: Pod\nmetadata: {name: forgot-"+name+"}", "kind: Pod\nmetadata: {name: forgot-"+name+", annotations: {dra-shared.dev/claim-references: Explicit}}", 1)
	if err := f.apply(ctx, share(name)+"---\n"+forgot); err != nil {
		return err
	}
	defer func() {
		_, _ = f.bed.Kubectl(ctx, "delete", "pod", "--all", "--force", "--grace-period=0")
		_, _ = f.bed.Kubectl(ctx, "delete", "resourceclaim", "--all", "--wait=false")
		_, _ = f.bed.Kubectl(ctx, "delete", "resourceslice", "surplus", "--ignore-not-found")
	}()
	for _, check := range []struct{ want, what string }{
		{"True", "get pod " + name + ` -o jsonpath={.status.conditions[?(@.type=="Ready")].status}`},
		{"Attached NetnsCookie", "get resourceclaim " + name + " -o jsonpath={.status.devices[0].conditions[*].reason}"},
		{"NotReferenced", "get resourceclaim forgot-" + name + " -o jsonpath={.status.devices[0].conditions[0].reason}"},
		{"NotReferenced", "get events -o jsonpath={.items[?(@.reason==\"NotReferenced\")].reason} --field-selector involvedObject.name=forgot-" + name},
	} {
		if err := f.prints(ctx, check.want, check.what); err != nil {
			return err
		}
	}
	if err := f.publishes(ctx); err != nil {
		return err
	}
	if err := f.flap(ctx, name); err != nil {
		return err
	}
	log, err := f.bed.Kubectl(ctx, "-n", system, "logs", "daemonset/dra-shared-plugin")
	for _, line := range strings.Split(log, "\n") {
		if strings.Contains(strings.ToLower(line), "forbidden") {
			return errors.New(line)
		}
	}
	return err
}

// publishes has ResourceSlices created, deleted and updated.
func (f *faults) publishes(ctx context.Context) error {
	const devices = "get resourceslices -o jsonpath={.items[*].spec.devices[*].name}"
	if _, err := f.bed.Kubectl(ctx, "delete", "resourceslices", "--all"); err != nil {
		return err
	}
	if err := f.apply(ctx, surplusSlice); err != nil {
		return err
	}
	// What is published is compared with what there is when a NIC comes or goes,
	// and else every half minute.
	if _, err := f.bed.Node(ctx, "n1", "ip", "link", "add", "nic9", "type", "veth", "peer", "name", "far9"); err != nil {
		return err
	}
	gone := false
	defer func() {
		if !gone {
			_, _ = f.bed.Node(ctx, "n1", "ip", "link", "delete", "nic9")
		}
	}()
	for _, check := range []struct{ want, what string }{
		{"nic0 nic1 nic9", devices}, {"", "get resourceslice surplus --ignore-not-found -o name"},
	} {
		if err := f.prints(ctx, check.want, check.what); err != nil {
			return err
		}
	}
	if _, err := f.bed.Node(ctx, "n1", "ip", "link", "delete", "nic9"); err != nil {
		return err
	}
	gone = true
	return f.prints(ctx, "nic0 nic1", devices)
}

// prints waits until kubectl prints that.
func (f *faults) prints(ctx context.Context, want, args string) error {
	return clusterclient.Eventually(ctx, 6*time.Second, func() error {
		out, err := f.bed.Kubectl(ctx, strings.Fields(args)...)
		if err == nil && out != want {
			err = fmt.Errorf("%s: got %q, want %q", args, out, want)
		}
		return err
	})
}

// flap makes events that are alike: they become a series.
func (f *faults) flap(ctx context.Context, pod string) error {
	for range 2 {
		for _, state := range []string{"down", "up"} {
			if _, err := f.bed.Node(ctx, "n1", "sh", "-c", "for p in $(pgrep -f -x /bin/nettool); do nsenter -t $p -n ip link set net1 "+state+" 2>/dev/null && exit; done; exit 1"); err != nil {
				return err
			}
			want := map[string]string{"down": "False", "up": "True"}[state]
			if err := clusterclient.Eventually(ctx, 10*time.Second, func() error {
				out, err := f.bed.Kubectl(ctx, "get", "resourceclaim", pod, "-o", `jsonpath={.status.devices[0].conditions[?(@.type=="Ready")].status}`)
				if err == nil && out != want {
					err = fmt.Errorf("condition Ready of claim %s is %s with its link %s", pod, out, state)
				}
				return err
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// surplusSlice is one that the plugin has not made: it removes it.
const surplusSlice = `apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: surplus}
spec: {driver: dra-shared.dev, nodeName: n1, pool: {name: n1, generation: 0, resourceSliceCount: 1}}
`

const idleGroup = `apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: idle}
spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic.dra-shared.dev}}]}}}
---
apiVersion: scheduling.dra-shared.dev/v1beta1
kind: PodGroup
metadata: {name: idle}
spec:
  schedulingPolicy: {basic: {}}
  resourceClaims: [{name: net, resourceClaimTemplateName: idle}]
`

// uninstall removes the chart with live shares and without.
func (f *faults) uninstall(ctx context.Context, t *testing.T) {
	if err := f.apply(ctx, share("held")); err != nil {
		t.Fatal(err)
	}
	if err := f.ready(ctx, "held", eventually); err != nil {
		t.Fatal(err)
	}
	uninstall := func(more ...string) error {
		out, err := f.bed.Helm(ctx, append([]string{"uninstall", "dra-shared", "-n", system, "--wait", "--timeout=60s"}, more...)...)
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	if err := uninstall(); err == nil || !strings.Contains(err.Error(), "claims hold shares: default/held (1 in all): delete their pods first") {
		t.Fatalf("with a live share: %v", err)
	}
	// Against that advice the pod runs on, held to its grant, and groups stay.
	if err := f.apply(ctx, idleGroup); err != nil {
		t.Fatal(err)
	}
	const groups = "podgroups.scheduling.dra-shared.dev"
	group := f.kubectl(ctx, t, "get", groups, "idle", "-o", "jsonpath={.metadata.uid}")
	if err := uninstall("--no-hooks"); err != nil {
		t.Fatal(err)
	}
	if out, err := f.bed.Node(ctx, "n1", "tc", "class", "show", "dev", "nic1"); err != nil || !strings.Contains(out, "rate 20Mbit") {
		t.Errorf("with a live share and no plugin: %v\n%s", err, out)
	}
	if err := f.bed.Install(ctx); err != nil {
		t.Fatal(err)
	}
	if now := f.kubectl(ctx, t, "get", groups, "idle", "-o", "jsonpath={.metadata.uid}{.metadata.deletionTimestamp}"); now != group {
		t.Errorf("PodGroup %s is %s after the driver went and came back", group, now)
	}
	f.kubectl(ctx, t, "delete", groups, "idle", "--timeout=30s")
	if err := f.gone(ctx, "held"); err != nil {
		t.Fatal(err)
	}
	if err := uninstall(); err != nil {
		t.Fatal(err)
	}
	if err := clusterclient.Eventually(ctx, 60*time.Second, func() error {
		out, err := f.bed.Node(ctx, "n1", "sh", "-c", anythingOfOurs)
		slices, sliceErr := f.bed.Kubectl(ctx, "get", "resourceslices,deviceclasses,clusterroles,validatingadmissionpolicies,jobs", "-A", "-o", "name")
		for _, line := range strings.Fields(slices) {
			if strings.Contains(line, "dra-shared") {
				out += line + "\n"
			}
		}
		if err = errors.Join(err, sliceErr); err == nil && strings.TrimSpace(out) != "" {
			err = fmt.Errorf("left:\n%s", out)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	if err := f.bed.Install(ctx); err != nil {
		t.Error(err)
	}
}

// anythingOfOurs prints files, queues, programs and maps.
const anythingOfOurs = `
find /var/lib/kubelet/plugins/dra-shared.dev /run/dra-shared /var/lib/kubelet/plugins_registry -type f -not -path '*/locks/*' -o -type s
find /var/run/cdi/ -name 'dra-shared*'
ls -d /sys/fs/bpf/dra-shared 2>/dev/null
ip -brief link | grep ifb-
for nic in nic0 nic1; do tc qdisc show dev $nic | grep -E 'htb|d5a'; tc filter show dev $nic egress 2>/dev/null; tc filter show dev $nic ingress 2>/dev/null; done
true`
