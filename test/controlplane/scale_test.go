package controlplane

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/test/simnode"
)

// TestScale measures, and fails only if something does not come to be: how many
// writes a pod costs, how long it takes to be reserved, and what the controller
// needs. What it prints is docs/dev/scale.md (make bench-controlplane).
func TestScale(t *testing.T) {
	if os.Getenv(envBench) == "" {
		t.Skip("it measures, and takes a while: run `make bench-controlplane`")
	}
	e := requireTestEnv(t)
	pods, err := strconv.Atoi(cmp.Or(os.Getenv("CONTROLPLANE_PODS"), "10000"))
	if err != nil {
		t.Fatal(err)
	}
	controller := e.controllerProcess(t)
	name := string(mode.Bridge)
	if e.native {
		name = string(mode.Native)
	}
	fmt.Printf("\n## %s mode\n\n", strings.ToUpper(name[:1])+name[1:])
	e.measure(t, controller, fmt.Sprintf("one group of %d pods", pods), []int{pods}, true)
	e.measure(t, controller, "100 groups of 100 pods", slices.Repeat([]int{100}, 100), false)
	if e.native {
		e.measure(t, controller, fmt.Sprintf("the same %d pods, a claim for each, by Kubernetes alone", pods), []int{-pods}, false)
	}
	e.churn(t, controller, 1000)
}

// controllerProcess starts the controller as a process of its own, with the rights
// that the chart gives it.
func (e *testEnv) controllerProcess(t *testing.T) *os.Process {
	t.Helper()
	kubeconfig, err := clientcmd.LoadFromFile(filepath.Join(e.bed.Dir, "kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	as := e.asController().Impersonate
	for _, user := range kubeconfig.AuthInfos {
		user.Impersonate, user.ImpersonateGroups = as.UserName, as.Groups
	}
	dir := t.TempDir()
	raw, err := yaml.Marshal(driverConfig())
	if err != nil {
		t.Fatal(err)
	}
	header := "apiVersion: config.dra-shared.dev/v1alpha1\nkind: DriverConfig\n"
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), append([]byte(header), withoutType(raw)...), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := clientcmd.WriteToFile(clientcmdapi.Config(*kubeconfig), filepath.Join(dir, "kubeconfig")); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(e.bed.Dir, "logs", "controller.log"))
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(filepath.Join(e.bed.Root, "bin/dra-shared-controller"), "--kubeconfig="+filepath.Join(dir, "kubeconfig"), "--config="+filepath.Join(dir, "config.yaml"),
		"--namespace="+system, "--slices-owner=dra-shared-controller", "--health-address=127.0.0.1:18081", "--v=1")
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	ns := e.namespace(t, "ready")
	e.eventually(t.Context(), t, "admission works", func() error {
		_, err := e.group(context.Background(), ns, "ready")
		if err != nil {
			return err
		}
		return client.IgnoreAlreadyExists(e.client.Create(context.Background(), e.pod(ns, "ready", 0)))
	})
	return c.Process
}

// withoutType drops the type's fields, which are there and empty.
func withoutType(raw []byte) []byte {
	var kept []string
	for line := range strings.SplitSeq(string(raw), "\n") {
		if !strings.HasPrefix(line, "apiVersion:") && !strings.HasPrefix(line, "kind:") {
			kept = append(kept, line)
		}
	}
	return []byte(strings.Join(kept, "\n"))
}

// measure creates groups of so many pods each, and tells what it took. A negative
// number is of pods without a group.
func (e *testEnv) measure(t *testing.T, controller *os.Process, what string, groups []int, plot bool) {
	t.Helper()
	ctx := context.Background()
	ns := e.namespace(t, "scale")
	before := e.writes(t)
	var pods []*corev1.Pod
	for i, n := range groups {
		name := fmt.Sprintf("g%03d", i)
		if _, err := e.group(ctx, ns, name); err != nil {
			t.Fatal(err)
		}
		for j := range max(n, -n) {
			pod := e.pod(ns, name, j)
			if n < 0 {
				pod.Annotations = nil
			}
			pods = append(pods, pod)
		}
	}
	var mu sync.Mutex
	created := map[string]time.Time{}
	start := time.Now()
	if err := simnode.Parallel(len(pods), func(i int) error {
		at := time.Now()
		err := e.client.Create(ctx, pods[i])
		mu.Lock()
		defer mu.Unlock()
		created[ns+"/"+pods[i].Name] = at
		return err
	}); err != nil {
		t.Fatal(err)
	}
	creation := time.Since(start)
	e.within(ctx, t, 15*time.Minute, what, func() error {
		e.mu.Lock()
		defer e.mu.Unlock()
		n := 0
		for key := range created {
			if _, ok := e.started[key]; ok {
				n++
			}
		}
		if n < len(pods) {
			return fmt.Errorf("%d of %d pods run", n, len(pods))
		}
		return nil
	})
	all := time.Since(start)
	var latencies []time.Duration
	var runs []time.Duration
	e.mu.Lock()
	for key, at := range created {
		latencies = append(latencies, e.started[key].Sub(at))
		runs = append(runs, e.started[key].Sub(start))
	}
	e.mu.Unlock()
	slices.Sort(latencies)
	slices.Sort(runs)
	claims, err := e.claims(ctx, ns)
	if err != nil {
		t.Fatal(err)
	}
	largest := 0
	for _, c := range claims {
		largest = max(largest, len(c.Status.ReservedFor))
	}
	took := e.difference(before, e.writes(t))
	fmt.Printf("### %s\n\n", what)
	fmt.Printf("All run after %s (created in %s); from created to started p50 %s, p99 %s. %d claims, at most %d entries in reservedFor. Controller: %s.\n\n",
		round(all), round(creation), round(latencies[len(latencies)/2]), round(latencies[len(latencies)*99/100]), len(claims), largest, memory(t, controller))
	table(withoutKubelets(took, len(pods)), len(pods))
	if plot {
		chart(runs, len(pods))
	}
	before = e.writes(t)
	end := time.Now()
	if err := simnode.Parallel(len(pods), func(i int) error { return client.IgnoreNotFound(e.client.Delete(ctx, pods[i])) }); err != nil {
		t.Fatal(err)
	}
	if err := e.client.DeleteAllOf(ctx, &scheduling.PodGroup{}, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	e.within(ctx, t, 10*time.Minute, "all go", func() error {
		claims, err := e.claims(ctx, ns)
		if err == nil && len(claims) > 0 {
			err = fmt.Errorf("%d claims are left", len(claims))
		}
		return err
	})
	sum := 0.0
	for _, n := range withoutKubelets(e.difference(before, e.writes(t)), len(pods)) {
		sum += n // two of them are deletions: the test's, and the simulated kubelet's
	}
	fmt.Printf("Deleted, with nothing left, in %s: %.2f writes per pod.\n\n", round(time.Since(end)), sum/float64(len(pods)))
}

// churn creates and deletes groups.
func (e *testEnv) churn(t *testing.T, controller *os.Process, n int) {
	t.Helper()
	ctx := context.Background()
	ns := e.namespace(t, "churn")
	before := e.writes(t)
	start := time.Now()
	if err := simnode.Parallel(n, func(i int) error {
		pg, err := e.group(ctx, ns, fmt.Sprintf("g%04d", i))
		if err != nil {
			return err
		}
		return e.client.Delete(ctx, pg)
	}); err != nil {
		t.Fatal(err)
	}
	e.within(ctx, t, 5*time.Minute, "all groups go", func() error {
		claims, err := e.claims(ctx, ns)
		var groups scheduling.PodGroupList
		if err == nil {
			err = e.client.List(ctx, &groups, client.InNamespace(ns))
		}
		if err == nil && len(claims)+len(groups.Items) > 0 {
			err = fmt.Errorf("%d claims and %d groups are left", len(claims), len(groups.Items))
		}
		return err
	})
	fmt.Printf("### %d groups come and go\n\nCreated and deleted, with nothing left, in %s. Controller: %s. Per group:\n\n", n, round(time.Since(start)), memory(t, controller))
	table(e.difference(before, e.writes(t)), n)
}

// writes are the requests that the API server has served, and that wrote.
func (e *testEnv) writes(t *testing.T) map[string]float64 {
	t.Helper()
	raw, err := e.cluster.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(string(raw)))
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]float64{}
	for _, m := range families["apiserver_request_total"].GetMetric() {
		labels := map[string]string{}
		for _, l := range m.GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		if !slices.Contains([]string{"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"}, labels["verb"]) || labels["dry_run"] != "" ||
			slices.Contains([]string{"leases", "tokenreviews", "subjectaccessreviews", "events", "nodes"}, labels["resource"]) {
			continue
		}
		key := labels["verb"] + " " + labels["resource"]
		if labels["subresource"] != "" {
			key += "/" + labels["subresource"]
		}
		if !strings.HasPrefix(labels["code"], "2") {
			key += ", refused (" + labels["code"] + ")"
		}
		counts[key] += m.GetCounter().GetValue()
	}
	return counts
}

func (e *testEnv) difference(before, after map[string]float64) map[string]float64 {
	d := map[string]float64{}
	for key, n := range after {
		if n > before[key] {
			d[key] = n - before[key]
		}
	}
	return d
}

func table(writes map[string]float64, per int) {
	fmt.Println("| writes | number | each |\n| --- | --- | --- |")
	sum := 0.0
	for _, key := range slices.SortedFunc(maps.Keys(writes), func(a, b string) int { return cmp.Compare(writes[b], writes[a]) }) {
		each := writes[key] / float64(per)
		sum += each
		if each >= 0.005 {
			fmt.Printf("| %s | %.0f | %.2f |\n", key, writes[key], each)
		}
	}
	fmt.Printf("| **all** | | **%.2f** |\n\n", sum)
}

// withoutKubelets leaves out what the simulated kubelets have written: that each
// pod runs, or has ended.
func withoutKubelets(writes map[string]float64, pods int) map[string]float64 {
	writes = maps.Clone(writes)
	writes["PATCH pods/status"] = max(0, writes["PATCH pods/status"]-float64(pods))
	return writes
}

// chart draws how many pods run over time.
func chart(runs []time.Duration, pods int) {
	const points = 20
	last := runs[len(runs)-1]
	var x, y []string
	for i := range points + 1 {
		at := last * time.Duration(i) / points
		n, _ := slices.BinarySearch(runs, at+1)
		x, y = append(x, fmt.Sprintf("%.0f", at.Seconds())), append(y, strconv.Itoa(n))
	}
	fmt.Printf("```mermaid\nxychart-beta\n  title \"pods that run, by seconds\"\n  x-axis [%s]\n  y-axis 0 --> %d\n  line [%s]\n```\n\n", strings.Join(x, ", "), pods, strings.Join(y, ", "))
}

func round(d time.Duration) time.Duration { return d.Round(100 * time.Millisecond) }

// memory is what a process needs, and needed at most.
func memory(t *testing.T, p *os.Process) string {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", p.Pid))
	if err != nil {
		t.Fatalf("the controller has ended: %v", err)
	}
	defer f.Close()
	var parts []string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), ":")
		kib, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
		if (name == "VmRSS" || name == "VmHWM") && err == nil {
			parts = append(parts, fmt.Sprintf("%d MiB %s", kib/1024, map[string]string{"VmRSS": "now", "VmHWM": "at most"}[name]))
		}
	}
	return strings.Join(parts, ", ")
}
