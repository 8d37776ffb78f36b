// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/measure"
	"github.com/dra-shared/dra-driver-shared/test/simnode"
)

// TestController_measuresManyPods measures the writes and the controller's requests for each pod, the time
// until a pod runs, and the controller's memory. It fails only if the pods do not run. Its output becomes
// docs/dev/scale.md (make bench-controlplane).
func TestController_measuresManyPods(t *testing.T) {
	if os.Getenv(envBench) == "" {
		t.Skip("takes several minutes: run `make bench-controlplane`")
	}
	e := requireTestEnv(t)
	pods, err := strconv.Atoi(cmp.Or(os.Getenv("CONTROLPLANE_PODS"), "10000"))
	if err != nil {
		t.Fatalf("environment variable CONTROLPLANE_PODS: %v", err)
	}
	controller := e.startControllerProcess(t)
	name := string(mode.Bridge)
	if e.native {
		name = string(mode.Native)
	}
	fmt.Printf("\n## %s mode\n\n", strings.ToUpper(name[:1])+name[1:])
	oneGroup := workload{title: fmt.Sprintf("one group of %d pods", pods), groups: 1, podsEach: pods, plot: true}
	e.measure(t, controller, oneGroup)
	const podsEach = 100
	title := fmt.Sprintf("%d groups of %d pods", pods/podsEach, podsEach)
	e.measure(t, controller, workload{title: title, groups: pods / podsEach, podsEach: podsEach})
	if e.native {
		title = fmt.Sprintf("the same %d pods, a claim for each, by Kubernetes alone", pods)
		e.measure(t, controller, workload{title: title, groups: 1, podsEach: pods, withoutGroup: true})
	}
	e.measureChurn(t, controller, 1000)
}

// startControllerProcess starts the controller in a separate process, with the
// rights that the chart grants it, and waits until admission works.
func (e *testEnv) startControllerProcess(t *testing.T) *os.Process {
	t.Helper()
	dir := t.TempDir()
	e.writeControllerFiles(t, dir)
	log, err := os.Create(filepath.Join(e.cluster.Dir, "logs", "controller.log"))
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(filepath.Join(e.cluster.Root, "bin/dra-shared-controller"),
		"--kubeconfig="+filepath.Join(dir, "kubeconfig"), "--config="+filepath.Join(dir, "config.yaml"),
		"--namespace="+system, "--slices-owner=dra-shared-controller", "--health-address=127.0.0.1:18081", "--v=1")
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		t.Fatalf("start the controller: %v", err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait() // it was killed
	})
	ns := e.createNamespace(t, "ready")
	// In a cluster with many claims, the caches are filled only after a while.
	eventually.Eventually(t, 5*time.Minute, "admission works", func() error {
		if _, err := e.createGroup(t.Context(), ns, "ready"); err != nil {
			return err
		}
		return client.IgnoreAlreadyExists(e.client.Create(t.Context(), newPod(ns, "ready", 0)))
	})
	return c.Process
}

// writeControllerFiles writes the controller's kubeconfig and config.yaml into dir.
func (e *testEnv) writeControllerFiles(t *testing.T, dir string) {
	t.Helper()
	kubeconfig, err := clientcmd.LoadFromFile(filepath.Join(e.cluster.Dir, "kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	// The audit log has the requests of service accounts, but not of users that impersonate them.
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: ptr.To(int64((10 * time.Hour).Seconds())),
	}}
	request, err = e.kube.CoreV1().ServiceAccounts(system).CreateToken(
		t.Context(), controllerAccount, request, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("create a token of the controller: %v", err)
	}
	for name := range kubeconfig.AuthInfos {
		kubeconfig.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: request.Status.Token}
	}
	if err := clientcmd.WriteToFile(clientcmdapi.Config(*kubeconfig), filepath.Join(dir, "kubeconfig")); err != nil {
		t.Fatal(err)
	}
	raw, err := yaml.Marshal(driverConfig())
	if err != nil {
		t.Fatal(err)
	}
	header := "apiVersion: config.dra-shared.dev/v1alpha1\nkind: DriverConfig\n"
	content := append([]byte(header), withoutTypeMeta(raw)...)
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), content, 0o600); err != nil {
		t.Fatal(err)
	}
}

// withoutTypeMeta removes the lines apiVersion and kind.
func withoutTypeMeta(raw []byte) []byte {
	var kept []string
	for line := range strings.SplitSeq(string(raw), "\n") {
		if !strings.HasPrefix(line, "apiVersion:") && !strings.HasPrefix(line, "kind:") {
			kept = append(kept, line)
		}
	}
	return []byte(strings.Join(kept, "\n"))
}

// workload is a number of groups of pods to create and to delete.
type workload struct {
	title            string
	groups, podsEach int
	withoutGroup     bool // the pods do not have a PodGroup, and each has its own claim
	plot             bool // print a chart of the running pods over time
}

// measure creates the pods of a workload, waits until they run, deletes them, and
// prints the measurements.
func (e *testEnv) measure(t *testing.T, controller *os.Process, w workload) {
	t.Helper()
	ctx := t.Context()
	ns := e.createNamespace(t, "scale")
	before, requestsBefore := e.writes(t), e.controllerRequests(t)
	pods := e.newPods(t, ns, w)
	start := time.Now()
	created, repeated := e.createPods(t, pods)
	creation := time.Since(start)
	eventually.Eventually(t, 15*time.Minute, "all pods run: "+w.title, func() error { return e.checkStarted(created) })
	all := time.Since(start)
	latencies, starts := e.startTimes(created, start)
	claims, err := e.claims(ctx, ns)
	if err != nil {
		t.Fatal(err)
	}
	largest := 0
	for _, c := range claims {
		largest = max(largest, len(c.Status.ReservedFor))
	}
	writes := difference(before, e.writes(t))
	fmt.Printf("### %s\n\n", w.title)
	fmt.Printf("All pods ran after %s; their creation took %s. From creation to start: p50 %s, p99 %s.\n"+
		"%d claims, at most %d entries in reservedFor. Controller: %s.\n\n",
		round(all), round(creation), round(latencies[len(latencies)/2]), round(latencies[len(latencies)*99/100]),
		len(claims), largest, memory(t, controller))
	if repeated > 0 {
		fmt.Printf("%d creations were repeated, because the webhook had not answered within its timeout.\n\n", repeated)
	}
	table("writes", withoutKubelets(writes, len(pods)), len(pods))
	table("requests of the controller", difference(requestsBefore, e.controllerRequests(t)), len(pods))
	if w.plot {
		chart(starts, len(pods))
	}
	e.measureRest(t, controller)
	e.measureDeletion(t, ns, pods)
}

// newPods creates the PodGroups of a workload and returns its pods, which do not
// exist yet.
func (e *testEnv) newPods(t *testing.T, ns string, w workload) (pods []*corev1.Pod) {
	t.Helper()
	for i := range w.groups {
		name := fmt.Sprintf("g%03d", i)
		e.mustCreateGroup(t, ns, name)
		for j := range w.podsEach {
			pod := newPod(ns, name, j)
			if w.withoutGroup {
				pod.Annotations = nil
			}
			pods = append(pods, pod)
		}
	}
	return pods
}

// createPods creates pods and returns the time of the first attempt to create each, by namespace/name. It repeats a
// creation if the webhook did not answer in time, as Kubernetes' controllers do, and returns the number of repetitions.
func (e *testEnv) createPods(t *testing.T, pods []*corev1.Pod) (created map[string]time.Time, repeated int) {
	t.Helper()
	var mu sync.Mutex
	var repetitions atomic.Int32
	created = map[string]time.Time{}
	err := simnode.Parallel(len(pods), func(i int) error {
		at := time.Now()
		err := e.client.Create(t.Context(), pods[i])
		for apierrors.IsInternalError(err) && time.Since(at) < time.Minute {
			repetitions.Add(1)
			err = e.client.Create(t.Context(), pods[i])
		}
		mu.Lock()
		defer mu.Unlock()
		created[pods[i].Namespace+"/"+pods[i].Name] = at
		return err
	})
	if err != nil {
		t.Fatalf("create %d pods: %v", len(pods), err)
	}
	return created, int(repetitions.Load())
}

// checkStarted returns an error unless all pods have started.
func (e *testEnv) checkStarted(created map[string]time.Time) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for key := range created {
		if _, ok := e.started[key]; ok {
			n++
		}
	}
	if n < len(created) {
		return fmt.Errorf("%d of %d pods run", n, len(created))
	}
	return nil
}

// startTimes returns, sorted, the durations from a pod's creation and from begin
// until the pod started.
func (e *testEnv) startTimes(created map[string]time.Time, begin time.Time) (latencies, starts []time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for key, at := range created {
		latencies = append(latencies, e.started[key].Sub(at))
		starts = append(starts, e.started[key].Sub(begin))
	}
	slices.Sort(latencies)
	slices.Sort(starts)
	return latencies, starts
}

// measureRest prints what the controller does while nothing changes, and fails the test if that is more than 0.5 % of
// a core.
func (e *testEnv) measureRest(t *testing.T, controller *os.Process) {
	t.Helper()
	const period = 40 * time.Second
	requests := func() (leases, others float64) {
		all := e.controllerRequests(t)
		leases = all["update leases"]
		return leases, sum(all) - leases
	}
	processorTime := func() time.Duration {
		used, err := measure.ProcessTime(controller.Pid)
		if err != nil {
			t.Fatalf("read the processor time of the controller: %v: has it ended?", err)
		}
		return used
	}
	eventually.Eventually(t, 2*time.Minute, "the controller only asks for the mode", func() error {
		_, before := requests()
		<-time.After(5 * time.Second)
		if _, after := requests(); after > before+2 {
			return fmt.Errorf("it sent %.0f in 5 s", after-before)
		}
		return nil
	})
	leasesBefore, othersBefore := requests()
	used := processorTime()
	<-time.After(period)
	used = processorTime() - used
	leases, others := requests()
	percent := 100 * used.Seconds() / period.Seconds()
	fmt.Printf("While the pods run and nothing changes, the controller uses %.1f %% of a core, and sends\n%.0f requests "+
		"in %s, besides %.0f that renew its Lease.\n\n", percent, others-othersBefore, period, leases-leasesBefore)
	const most = 0.5
	if percent > most {
		t.Errorf("the controller uses %.1f %% of a core while nothing changes, want at most %.1f %%", percent, most)
	}
}

// measureDeletion deletes the pods and PodGroups of a namespace and prints the
// writes for each pod, and the requests of the controller.
func (e *testEnv) measureDeletion(t *testing.T, ns string, pods []*corev1.Pod) {
	t.Helper()
	ctx := t.Context()
	before, requestsBefore := e.writes(t), e.controllerRequests(t)
	start := time.Now()
	err := simnode.Parallel(len(pods), func(i int) error { return client.IgnoreNotFound(e.client.Delete(ctx, pods[i])) })
	if err != nil {
		t.Fatalf("delete %d pods: %v", len(pods), err)
	}
	if err := e.client.DeleteAllOf(ctx, &scheduling.PodGroup{}, client.InNamespace(ns)); err != nil {
		t.Fatalf("delete all PodGroups: %v", err)
	}
	eventually.Eventually(t, 10*time.Minute, "namespace "+ns+" has no claims", func() error {
		claims, err := e.claims(ctx, ns)
		if err == nil && len(claims) > 0 {
			err = fmt.Errorf("it has %d", len(claims))
		}
		return err
	})
	// There are two deletions of each pod: by the test and by the simulated kubelet.
	writes := withoutKubelets(difference(before, e.writes(t)), len(pods))
	requests := difference(requestsBefore, e.controllerRequests(t))
	fmt.Printf("The deletion of all objects took %s, with %.2f writes and %.2f requests of the controller per pod.\n\n",
		round(time.Since(start)), sum(writes)/float64(len(pods)), sum(requests)/float64(len(pods)))
}

func sum(counts map[string]float64) (all float64) {
	for _, n := range counts {
		all += n
	}
	return all
}

// measureChurn creates n PodGroups, deletes each immediately, and prints the writes.
func (e *testEnv) measureChurn(t *testing.T, controller *os.Process, n int) {
	t.Helper()
	ctx := t.Context()
	ns := e.createNamespace(t, "churn")
	before, requestsBefore := e.writes(t), e.controllerRequests(t)
	start := time.Now()
	err := simnode.Parallel(n, func(i int) error {
		pg, err := e.createGroup(ctx, ns, fmt.Sprintf("g%04d", i))
		if err != nil {
			return err
		}
		return e.client.Delete(ctx, pg)
	})
	if err != nil {
		t.Fatalf("create and delete %d PodGroups: %v", n, err)
	}
	eventually.Eventually(t, 5*time.Minute, "namespace "+ns+" has no PodGroups and claims", func() error {
		var groups scheduling.PodGroupList
		claims, err := e.claims(ctx, ns)
		if err == nil {
			err = e.client.List(ctx, &groups, client.InNamespace(ns))
		}
		if err == nil && len(claims)+len(groups.Items) > 0 {
			err = fmt.Errorf("it has %d PodGroups and %d claims", len(groups.Items), len(claims))
		}
		return err
	})
	fmt.Printf("### %d groups created and deleted\n\n", n)
	fmt.Printf("The creation and deletion of all objects took %s. Controller: %s. Per group:\n\n",
		round(time.Since(start)), memory(t, controller))
	table("writes", difference(before, e.writes(t)), n)
	table("requests of the controller", difference(requestsBefore, e.controllerRequests(t)), n)
}

// controllerAccount is the name of the controller's service account.
const controllerAccount = "dra-shared-controller"

// controllerRequests returns the number of requests that the process of startControllerProcess has sent, by verb,
// resource, and status code if the API server refused them. They are in the API server's audit log.
func (e *testEnv) controllerRequests(t *testing.T) map[string]float64 {
	t.Helper()
	log, err := os.Open(filepath.Join(e.cluster.Dir, "logs", "audit.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	counts := map[string]float64{}
	for events := json.NewDecoder(bufio.NewReader(log)); ; {
		var event auditEvent
		switch err := events.Decode(&event); {
		// The API server may be writing the last event.
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			if len(counts) == 0 {
				t.Fatal("the audit log has no request of the controller: has the audit policy changed?")
			}
			return counts
		case err != nil:
			t.Fatalf("audit log: %v", err)
		case event.counts():
			counts[event.name()]++
		}
	}
}

// auditEvent is an event of the API server's audit log.
type auditEvent struct {
	Stage, Verb, RequestURI string
	User                    struct{ Username string }
	ObjectRef               struct{ Resource, Subresource string }
	ResponseStatus          struct{ Code int }
}

// counts reports whether the event counts as a request of the controller. A watch has two events, but only one counts.
func (a auditEvent) counts() bool {
	stage := "ResponseComplete"
	if a.Verb == "watch" {
		stage = "ResponseStarted"
	}
	return a.Stage == stage && a.User.Username == "system:serviceaccount:"+system+":"+controllerAccount
}

// name returns, for example, "patch resourceclaims/status, refused (409)".
func (a auditEvent) name() string {
	name := a.Verb + " " + path.Join(a.ObjectRef.Resource, a.ObjectRef.Subresource)
	if a.ObjectRef.Resource == "" {
		uri, _, _ := strings.Cut(a.RequestURI, "?")
		name = a.Verb + " " + uri
	}
	if a.ResponseStatus.Code >= 300 {
		name += fmt.Sprintf(", refused (%d)", a.ResponseStatus.Code)
	}
	return name
}

// Verbs that count as writes, and resources with writes that do not count: they occur without pods, or do not carry
// state.
var (
	writeVerbs       = []string{"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"}
	ignoredResources = []string{"leases", "tokenreviews", "subjectaccessreviews", "events", "nodes"}
)

// writes returns the number of write requests that the API server has served, by
// verb, resource, and status code if it refused them.
func (e *testEnv) writes(t *testing.T) map[string]float64 {
	t.Helper()
	raw, err := e.kube.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil {
		t.Fatalf("read the API server's metrics: %v", err)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(string(raw)))
	if err != nil {
		t.Fatalf("parse the API server's metrics: %v", err)
	}
	counts := map[string]float64{}
	for _, m := range families["apiserver_request_total"].GetMetric() {
		labels := map[string]string{}
		for _, l := range m.GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		isWrite := slices.Contains(writeVerbs, labels["verb"]) && labels["dry_run"] == ""
		if isWrite && !slices.Contains(ignoredResources, labels["resource"]) {
			counts[writeName(labels)] += m.GetCounter().GetValue()
		}
	}
	if len(counts) == 0 {
		t.Fatal("the API server's metrics have no write requests: has apiserver_request_total changed?")
	}
	return counts
}

// writeName returns, for example, "PUT resourceclaims/status, refused (409)".
func writeName(labels map[string]string) string {
	name := labels["verb"] + " " + labels["resource"]
	if labels["subresource"] != "" {
		name += "/" + labels["subresource"]
	}
	if !strings.HasPrefix(labels["code"], "2") {
		name += ", refused (" + labels["code"] + ")"
	}
	return name
}

// difference returns the increase of each count.
func difference(before, after map[string]float64) map[string]float64 {
	d := map[string]float64{}
	for key, n := range after {
		if n > before[key] {
			d[key] = n - before[key]
		}
	}
	return d
}

// table prints counts, the largest first, as a Markdown table. It omits those that round to
// 0.00 for each of the objects.
func table(title string, counts map[string]float64, objects int) {
	fmt.Printf("| %s | number | each |\n| --- | --- | --- |\n", title)
	byNumber := func(a, b string) int { return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b)) }
	for _, key := range slices.SortedFunc(maps.Keys(counts), byNumber) {
		if each := counts[key] / float64(objects); each >= 0.005 {
			fmt.Printf("| %s | %.0f | %.2f |\n", key, counts[key], each)
		}
	}
	fmt.Printf("| **all** | | **%.2f** |\n\n", sum(counts)/float64(objects))
}

// withoutKubelets subtracts the status of each pod that the simulated kubelets
// have written: that it runs or, before its deletion, that it has ended.
func withoutKubelets(writes map[string]float64, pods int) map[string]float64 {
	writes = maps.Clone(writes)
	writes["PATCH pods/status"] = max(0, writes["PATCH pods/status"]-float64(pods))
	return writes
}

// chart prints a chart of the number of running pods over time. starts are the sorted start times of the pods.
func chart(starts []time.Duration, pods int) {
	const points = 20
	last := starts[len(starts)-1]
	var x, y []string
	for i := range points + 1 {
		at := last * time.Duration(i) / points
		n, _ := slices.BinarySearch(starts, at+1)
		x, y = append(x, fmt.Sprintf("%.0f", at.Seconds())), append(y, strconv.Itoa(n))
	}
	fmt.Printf("```mermaid\nxychart-beta\n  title \"running pods, by seconds\"\n"+
		"  x-axis [%s]\n  y-axis 0 --> %d\n  line [%s]\n```\n\n", strings.Join(x, ", "), pods, strings.Join(y, ", "))
}

func round(d time.Duration) time.Duration { return d.Round(100 * time.Millisecond) }

// memory returns the current and the largest resident memory of the controller.
func memory(t *testing.T, p *os.Process) string {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", p.Pid))
	if err != nil {
		t.Fatalf("read the memory of the controller: %v: has it ended?", err)
	}
	defer f.Close()
	var parts []string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), ":")
		kib, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
		if (name == "VmRSS" || name == "VmHWM") && err == nil {
			label := map[string]string{"VmRSS": "now", "VmHWM": "at most"}[name]
			parts = append(parts, fmt.Sprintf("%d MiB %s", kib/1024, label))
		}
	}
	return strings.Join(parts, ", ")
}
