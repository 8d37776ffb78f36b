// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// kueueController is the real Kueue with its webhooks and its own rights.
var kueueController = otherController{
	name: "kueue", account: "kueue-controller-manager",
	service: "kueue-webhook-service", port: 9446, secret: "kueue-webhook-server-cert",
	certificates: "/tmp/kueue-webhook-server/serving-certs",
}

const (
	queueLabel = "kueue.x-k8s.io/queue-name"
	// bandwidthQuota is the quota of the queue: two claims of 100 Mbit/s.
	bandwidthQuota = "200M"
)

// startKueue runs Kueue, and creates a NIC of 1 Gbit/s of a node, a queue with 2 CPUs and 200 Mbit/s in the
// namespace, and the template "share" for claims of 100 Mbit/s.
func (e *testEnv) startKueue(t *testing.T, ns string) {
	t.Helper()
	e.createNIC(t, "sim-000")
	e.startOther(t, kueueController, func(ctx context.Context) error {
		return e.client.Create(ctx, object(t, `
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: probe}
`), client.DryRunAll)
	})
	share := &resourceapi.ResourceClaimTemplate{ObjectMeta: objectMeta(ns, "share")}
	share.Spec.Spec = nicSpec()
	high := &schedulingapi.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: ns + "-high"}, Value: 1000}
	e.create(t, share, high, object(t, `
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: `+ns+`}
`), object(t, `
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: `+ns+`}
spec:
  namespaceSelector: {}
  preemption: {withinClusterQueue: LowerPriority}
  resourceGroups:
  - coveredResources: [cpu, nic.dra-shared.dev/bandwidth]
    flavors:
    - name: `+ns+`
      resources:
      - {name: cpu, nominalQuota: 2}
      - {name: nic.dra-shared.dev/bandwidth, nominalQuota: `+bandwidthQuota+`}
`), object(t, `
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {namespace: `+ns+`, name: queue}
spec: {clusterQueue: `+ns+`}
`))
}

func object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return o
}

// nicSpec returns a claim spec that requests 100 Mbit/s of a NIC.
func nicSpec() (spec resourceapi.ResourceClaimSpec) {
	spec.Devices.Requests = []resourceapi.DeviceRequest{{
		Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: "nic." + driverName,
			Capacity: &resourceapi.CapacityRequirements{
				Requests: map[resourceapi.QualifiedName]resource.Quantity{"bandwidth": resource.MustParse("100M")},
			},
		},
	}}
	return spec
}

// createNIC publishes a node's NIC of 1 Gbit/s until the test ends. The controller deletes the driver's slices that are
// not for a single node, except fabrics' slices.
func (e *testEnv) createNIC(t *testing.T, node string) {
	t.Helper()
	line := resource.MustParse("1G")
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "nic-of-" + node},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driverName, NodeName: &node,
			Pool: resourceapi.ResourcePool{Name: node, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{
				Name: "nic", AllowMultipleAllocations: ptr.To(true),
				Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"kind": {StringValue: ptr.To("nic")}},
				Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"bandwidth": {
					Value: line, RequestPolicy: &resourceapi.CapacityRequestPolicy{
						Default:    ptr.To(resource.MustParse("10M")),
						ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(resource.MustParse("1M"))},
					},
				}},
			}},
		},
	}
	e.create(t, slice)
	t.Cleanup(func() { _ = e.client.Delete(context.Background(), slice) })
}

// queuedJob returns a Job in the queue. Its pods need a tenth of a CPU each.
func queuedJob(ns, name string, pods int32, template corev1.PodTemplateSpec) *batchv1.Job {
	template.Spec.RestartPolicy = corev1.RestartPolicyNever
	template.Spec.TerminationGracePeriodSeconds = ptr.To[int64](1)
	template.Spec.Containers = []corev1.Container{{
		Name: "work", Image: "none",
		Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m")}},
	}}
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{queueLabel: "queue"}},
		Spec: batchv1.JobSpec{
			Parallelism: &pods, Completions: &pods, Suspend: ptr.To(true), BackoffLimit: ptr.To[int32](0), Template: template,
		},
	}
}

// sharePods returns a pod template for pods that reference the template "share".
func sharePods(annotations map[string]string) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Annotations: annotations},
		Spec: corev1.PodSpec{ResourceClaims: []corev1.PodResourceClaim{
			{Name: "net", ResourceClaimTemplateName: ptr.To("share")},
		}},
	}
}

// awaitJobPods waits until a Job has want pods that run, and no others.
func (e *testEnv) awaitJobPods(t *testing.T, job *batchv1.Job, want int) {
	t.Helper()
	eventually.Eventually(t, timeout, fmt.Sprintf("%d pods of Job %s run", want, job.Name), func() error {
		running, all := 0, e.jobPods(t, job)
		for i := range all {
			if all[i].Status.Phase == corev1.PodRunning && all[i].DeletionTimestamp == nil {
				running++
			}
		}
		if running != want || len(all) != want {
			return fmt.Errorf("%d of %d pods run; %w", running, len(all), e.workloadState(t, job.Namespace))
		}
		return nil
	})
}

// workloadState returns the conditions of Kueue's Workloads as an error.
func (e *testEnv) workloadState(t *testing.T, ns string) error {
	t.Helper()
	var text []string
	for _, w := range e.workloads(t, ns) {
		conditions, _, _ := unstructured.NestedSlice(w.Object, "status", "conditions")
		text = append(text, fmt.Sprint(w.GetName(), ": ", conditions))
	}
	return errors.New(strings.Join(text, "; "))
}

func (e *testEnv) workloads(t *testing.T, ns string) []unstructured.Unstructured {
	t.Helper()
	list := &unstructured.UnstructuredList{}
	list.SetAPIVersion("kueue.x-k8s.io/v1beta2")
	list.SetKind("WorkloadList")
	if err := e.client.List(t.Context(), list, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// charged returns what Kueue charges for the Job, of a resource.
func (e *testEnv) charged(t *testing.T, job *batchv1.Job, name string) string {
	t.Helper()
	for _, w := range e.workloads(t, job.Namespace) {
		if len(w.GetOwnerReferences()) == 0 || w.GetOwnerReferences()[0].Name != job.Name {
			continue
		}
		sets, _, _ := unstructured.NestedSlice(w.Object, "status", "admission", "podSetAssignments")
		for _, s := range sets {
			set, ok := s.(map[string]any)
			if !ok {
				continue
			}
			if usage, ok, _ := unstructured.NestedString(set, "resourceUsage", name); ok {
				return usage
			}
		}
	}
	return "0"
}

const bandwidthResource = "nic.dra-shared.dev/bandwidth"

// Kueue charges each claim of the pods of a Job by its bandwidth.
func TestKueue_quotaOfBandwidth(t *testing.T) {
	e := requireOther(t, "kueue")
	e.startController(t, nil)
	ns := e.createNamespace(t, "kueue")
	e.startKueue(t, ns)
	first := queuedJob(ns, "first", 1, sharePods(nil))
	e.create(t, first)
	e.awaitJobPods(t, first, 1)
	if got := e.charged(t, first, bandwidthResource); got != "100M" {
		t.Errorf("charge of a pod with a claim of 100 Mbit/s: got %s", got)
	}
	// 200 Mbit/s more than are left wait for the quota.
	second, third := queuedJob(ns, "second", 2, sharePods(nil)), queuedJob(ns, "third", 1, sharePods(nil))
	e.create(t, second, third)
	e.awaitJobPods(t, third, 1)
	if pods := e.jobPods(t, second); len(pods) > 0 {
		t.Errorf("the Job that exceeds the quota has %d pods", len(pods))
	}
	e.endPods(t, first, corev1.PodSucceeded)
	e.endPods(t, third, corev1.PodSucceeded)
	e.awaitJobPods(t, second, 2)
	if got := e.charged(t, second, bandwidthResource); got != "200M" {
		t.Errorf("charge of two pods with claims of 100 Mbit/s: got %s", got)
	}
}

// Kueue charges the claim of a PodGroup once if one pod references its template.
func TestKueue_chargeOfPodGroup(t *testing.T) {
	e := requireOther(t, "kueue")
	if e.native {
		t.Skip("Kubernetes creates a PodGroup for the Job (WorkloadWithJob), and refuses pods in two PodGroups")
	}
	e.startController(t, nil)
	ns := e.createNamespace(t, "kueue-group")
	e.startKueue(t, ns)
	group := &scheduling.PodGroup{ObjectMeta: objectMeta(ns, "team"), Spec: scheduling.PodGroupSpec{
		SchedulingPolicy: scheduling.SchedulingPolicy{Basic: &scheduling.BasicSchedulingPolicy{}},
		ResourceClaims: []scheduling.PodGroupResourceClaim{
			{Name: "net", ResourceClaimTemplateName: ptr.To("share")},
		},
	}}
	e.create(t, group)
	inGroup := queuedJob(ns, "in-group", 1, sharePods(map[string]string{scheduling.GroupAnnotation: group.Name}))
	e.create(t, inGroup)
	e.awaitJobPods(t, inGroup, 1)
	if got := e.charged(t, inGroup, bandwidthResource); got != "100M" {
		t.Errorf("charge of the claim of a PodGroup of 100 Mbit/s: got %s", got)
	}
}

// Kueue would charge the claim of a group for each pod, or not at all. The driver refuses both.
func TestKueue_wrongChargesAreRefused(t *testing.T) {
	e := requireOther(t, "kueue")
	e.startController(t, nil)
	ns := e.createNamespace(t, "kueue-refused")
	e.startKueue(t, ns)
	group := e.mustCreateGroup(t, ns, "team", scheduling.PodGroupResourceClaim{
		Name: "net", ResourceClaimTemplateName: ptr.To("share"),
	})
	const entry = "[{name: net, resourceClaimTemplateName: share}]"
	for want, job := range map[string]*batchv1.Job{
		`Kueue would charge ResourceClaimTemplate "share" 2 times`: queuedJob(ns, "group", 2,
			sharePods(map[string]string{scheduling.GroupAnnotation: group.Name})),
		`entry "net" requests DeviceClass "nic.dra-shared.dev", which Kueue charges`: queuedJob(ns, "job-claims", 2,
			corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{
				Annotations: map[string]string{scheduling.JobClaimsAnnotation: entry},
			}}),
	} {
		if err := e.client.Create(t.Context(), job); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Job %s: got error %v, want %q", job.Name, err, want)
		}
	}
	set := statefulSet(ns, 1)
	set.Labels = map[string]string{queueLabel: "queue"}
	set.Spec.Template.Annotations = map[string]string{scheduling.ReplicaClaimsAnnotation: "[" + inlineFabric + "]"}
	if err := e.client.Create(t.Context(), set); err == nil ||
		!strings.Contains(err.Error(), "Kueue admits each pod of a StatefulSet separately") {
		t.Errorf("StatefulSet: got error %v", err)
	}
	pod := newPod(ns, group.Name, 0)
	pod.Labels = map[string]string{queueLabel: "queue"}
	if err := e.client.Create(t.Context(), pod); err == nil ||
		!strings.Contains(err.Error(), "Kueue never admits a pod that references a claim by name") {
		t.Errorf("pod in a queue: got error %v", err)
	}
	// Kueue ignores the label of the pods of a Job in a queue. Without the label on the Job, it admits its pods.
	both := queuedJob(ns, "both", 2, corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{
		Labels:      map[string]string{queueLabel: "queue"},
		Annotations: map[string]string{scheduling.JobClaimsAnnotation: "[" + inlineFabric + "]"},
	}})
	onlyPods := both.DeepCopy()
	// Without any labels, the Job would get its template's labels from the API server.
	onlyPods.Name, onlyPods.Labels = "only-pods", map[string]string{"app": "train"}
	e.create(t, both)
	e.awaitJobPods(t, both, 2)
	if err := e.client.Create(t.Context(), onlyPods); err == nil ||
		!strings.Contains(err.Error(), "without the label on the Job, Kueue admits its pods themselves") {
		t.Errorf("Job with the label in the template only: got error %v", err)
	}
	// Without Kueue, these are possible.
	job := queuedJob(ns, "without-queue", 2, sharePods(map[string]string{scheduling.GroupAnnotation: group.Name}))
	job.Labels = nil
	e.create(t, job)

	// Kueue itself refuses references by name: it never admits the Job and the pod.
	template := sharePods(nil)
	template.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: ptr.To("team")}}
	byName := queuedJob(ns, "by-name", 1, template)
	podByName := newPodWithClaim(ns, "by-name", 0, "team")
	podByName.Labels = map[string]string{queueLabel: "queue"}
	e.create(t, byName, podByName)
	eventually.Eventually(t, timeout, "Kueue refuses references by name", func() error {
		state := e.workloadState(t, ns)
		if strings.Count(state.Error(), "does not support use of resource claims") != 2 {
			return state
		}
		return nil
	})
}

// Jobs with pods that wait behind the driver's gate are admitted, suspended by preemption, and resumed. Kueue does not
// charge the fabric, which is not in its deviceClassMappings, and the driver does not refuse it.
func TestKueue_preemptionOfJobBehindGates(t *testing.T) {
	e := requireOther(t, "kueue")
	e.startController(t, nil)
	ns := e.createNamespace(t, "kueue-gates")
	e.startKueue(t, ns)
	onFabric := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{
		Annotations: map[string]string{scheduling.JobClaimsAnnotation: "[" + inlineFabric + "]"},
	}}
	low := queuedJob(ns, "low", 15, onFabric)
	e.create(t, low)
	e.awaitJobPods(t, low, 15)
	e.awaitClaims(t, ns, "the Job holds its claim", held(1))

	onFabric.Spec.PriorityClassName = ns + "-high"
	high := queuedJob(ns, "high", 15, onFabric)
	e.create(t, high)
	e.awaitJobPods(t, high, 15)
	e.awaitJobPods(t, low, 0)
	e.awaitClaims(t, ns, "the suspended Job holds no device", func(claims []resourceapi.ResourceClaim) error {
		for _, c := range claims {
			isLow := metav1.GetControllerOf(&c).Name == low.Name
			if isLow == (c.Status.Allocation != nil) {
				return fmt.Errorf("claim %s is allocated: %t", c.Name, c.Status.Allocation != nil)
			}
		}
		return nil
	})

	e.endPods(t, high, corev1.PodSucceeded)
	e.awaitJobPods(t, low, 15)
	e.awaitClaims(t, ns, "the resumed Job holds its claim", held(1))
	e.delete(t, low, high)
	e.awaitEmpty(t, ns)
}

// The Jobs of a JobSet in a queue release their devices when Kueue suspends the JobSet, and get them again when it
// resumes the JobSet.
func TestKueue_preemptionOfJobSet(t *testing.T) {
	e := requireOther(t, "kueue")
	e.startController(t, nil)
	ns := e.createNamespace(t, "kueue-jobset")
	e.startKueue(t, ns)
	e.startJobSet(t)
	set := jobSet(t, ns, "train", 2, "", "")
	set.SetLabels(map[string]string{queueLabel: "queue"})
	e.create(t, set)
	e.awaitRunning(t, ns, 4)
	before := e.awaitClaimsOfJobs(t, ns, 2)

	high := queuedJob(ns, "high", 15, corev1.PodTemplateSpec{
		Spec: corev1.PodSpec{PriorityClassName: ns + "-high"},
	})
	e.create(t, high)
	e.awaitJobPods(t, high, 15)
	e.awaitClaims(t, ns, "the suspended Jobs hold no device", func(claims []resourceapi.ResourceClaim) error {
		for _, c := range claims {
			if c.Status.Allocation != nil || len(c.Status.ReservedFor) > 0 {
				return fmt.Errorf("claim %s is allocated, and reserved for %v", c.Name, c.Status.ReservedFor)
			}
		}
		if len(claims) != 2 {
			return fmt.Errorf("got %d claims, want those of both Jobs", len(claims))
		}
		return nil
	})

	e.endPods(t, high, corev1.PodSucceeded)
	e.delete(t, high)
	e.awaitDeleted(t, high)
	e.awaitRunning(t, ns, 4)
	if after := e.awaitClaimsOfJobs(t, ns, 2); !maps.Equal(before, after) {
		t.Errorf("claims of the resumed Jobs: got %v, want %v", after, before)
	}
	e.delete(t, set)
	e.awaitEmpty(t, ns)
}
