// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admission/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
	"sigs.k8s.io/yaml"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/controlplane/podgroups"
)

const (
	byTemplate = `{name: net, resourceClaimTemplateName: share}`
	inline     = `{name: net, spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic.dra-shared.dev}}]}}}`
)

// inOtherFormat lists the claim inline in another format and order of keys.
const inOtherFormat = `
- spec:
    devices: {requests: [{exactly: {deviceClassName: "nic.dra-shared.dev"}, name: nic}]}
  deletionPolicy: OnCompletion # the default
  name: net
`

// jobYAML returns a Job with the annotation and more fields of its pods' metadata and spec.
func jobYAML(annotation, podMetadata, podSpec string) string {
	return fmt.Sprintf(`{kind: Job, metadata: {name: train, namespace: ns}, spec: {template: {
		metadata: {annotations: {scheduling.dra-shared.dev/job-claims: %q%s}},
		spec: {containers: [{name: worker}, {name: helper}]%s}}}}`, annotation, podMetadata, podSpec)
}

// jobSetYAML returns a JobSet with one replicated job, or a Job of it.
func jobSetYAML(annotation string) string {
	return fmt.Sprintf(`{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet,
		metadata: {name: set, namespace: ns, uid: "7"},
		spec: {replicatedJobs: [{name: a, template: {spec: {template: {spec: {containers: [{name: x}]}}}}},
		{name: b, template: {spec: {template: {
		metadata: {annotations: {scheduling.dra-shared.dev/job-claims: %q}}, spec: {containers: [{name: worker}]}}}}}]}}`,
		annotation)
}

// ownedBy makes a controller with that UID the owner of a Job.
func ownedBy(job, apiVersion, kind, uid string) string {
	return strings.Replace(job, "metadata: {name: train", fmt.Sprintf(
		"metadata: {ownerReferences: [{apiVersion: %s, kind: %s, name: set, uid: %q, controller: true}], name: train",
		apiVersion, kind, uid), 1)
}

// newJobs returns a webhook for an API server that has a JobSet with the inline annotation. User admin may create
// ResourceClaims there, and user jobset-controller objects of the JobSet.
func newJobs(t *testing.T) *ListedClaims {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := clientscheme.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	owner := toUnstructured(t, jobSetYAML("["+inline+"]"))
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(owner).WithInterceptorFuncs(interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, options ...client.CreateOption) error {
			review, ok := o.(*authorizationv1.SubjectAccessReview)
			if !ok {
				return c.Create(ctx, o, options...)
			}
			a := review.Spec.ResourceAttributes
			right := strings.Join([]string{a.Verb, a.Resource, a.Group, a.Namespace}, " ")
			const ofController = "update jobsets jobset.x-k8s.io ns"
			review.Status.Allowed = review.Spec.User == "admin" && right == "create resourceclaims resource.k8s.io ns" ||
				review.Spec.User == "jobset-controller" && right == ofController && a.Subresource == "finalizers" && a.Name == "set"
			return nil
		},
	}).Build()
	return &ListedClaims{Client: c, APIReader: c, Driver: driver}
}

// jobRequest returns the request of a user to create or, if old is not empty, update an object.
func jobRequest(t *testing.T, user, old, now string) admission.Request {
	t.Helper()
	toJSON := func(text string) []byte {
		raw, err := yaml.YAMLToJSON([]byte(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		return raw
	}
	kind := toUnstructured(t, now).GetKind()
	r := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		Namespace: "ns", Operation: admissionv1.Create, UserInfo: authenticationv1.UserInfo{Username: user},
		Kind: metav1.GroupVersionKind{Kind: kind}, Object: runtime.RawExtension{Raw: toJSON(now)},
	}}
	if old != "" {
		r.Operation, r.OldObject.Raw = admissionv1.Update, toJSON(old)
	}
	return r
}

func toUnstructured(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return o
}

func TestListedClaims_Handle_denies(t *testing.T) {
	const path = `spec.template.metadata.annotations[scheduling.dra-shared.dev/job-claims]`
	const setPath = `spec.replicatedJobs[1].template.` + path
	job := func(annotation string) string { return jobYAML(annotation, "", "") }
	for _, tc := range []struct{ name, user, old, now, want string }{
		{"an invalid annotation", "admin", "", job("[{}]"), path + `[0].name: Invalid value: ""`},
		{"an empty annotation", "admin", "", job(""), path},
		{"two entries of one name", "admin", "", jobSetYAML("[" + byTemplate + "," + inline + "]"),
			setPath + `[1].name: Duplicate value: "net"`},
		{"a container that does not exist", "admin", "",
			job("[{name: net, resourceClaimTemplateName: share, containers: [worker, wroker]}]"),
			path + `[0].containers[1]: Not found: "wroker"`},
		{"a PodGroup as well", "admin", "",
			jobYAML("["+byTemplate+"]", ", scheduling.dra-shared.dev/pod-group: team", ""), "the pods are in a PodGroup"},
		{"administrative access", "admin", "",
			job("[" + strings.Replace(inline, "deviceClassName", "adminAccess: true, deviceClassName", 1) + "]"),
			path + "[0].spec.devices.requests[0].exactly.adminAccess: Forbidden"},
		{"parameters that the plugin would reject", "admin", "", job("[" + strings.Replace(inline, "{devices: {",
			"{devices: {config: [{opaque: {driver: dra-shared.dev, parameters: {kind: X}}}], ", 1) + "]"),
			path + "[0].spec.devices.config[0].opaque.parameters"},
		{"a spec of a user without the right", "guest", "", job("[" + inline + "]"),
			`user "guest" may not create ResourceClaims in namespace "ns"`},
		{"a Job of a JobSet by a user other than its controller", "guest", "",
			ownedBy(job("["+inline+"]"), "jobset.x-k8s.io/v1alpha2", "JobSet", "7"),
			`user "guest" may not create ResourceClaims`},
		{"a Job of a JobSet that has another annotation", "jobset-controller", "",
			ownedBy(job("["+strings.Replace(inline, "net", "other", 1)+"]"), "jobset.x-k8s.io/v1alpha2", "JobSet", "7"),
			`user "jobset-controller" may not create ResourceClaims`},
		{"a Job of a former JobSet", "jobset-controller", "",
			ownedBy(job("["+inline+"]"), "jobset.x-k8s.io/v1alpha2", "JobSet", "6"),
			`user "jobset-controller" may not create ResourceClaims`},
		{"a Job of a JobSet in another API", "jobset-controller", "",
			ownedBy(job("["+inline+"]"), "example.com/v1", "JobSet", "7"),
			`user "jobset-controller" may not create ResourceClaims`},
		{"a change", "admin", job("[" + inline + "]"), job("[" + byTemplate + "]"),
			path + ": cannot be changed, because pods may use the claims: delete the Job, and create another"},
		{"a removal", "admin", jobSetYAML("[" + inline + "]"),
			strings.Replace(jobSetYAML("["+inline+"]"), "job-claims", "x", 1), setPath + ": cannot be changed"},
		{"a change of a CronJob by a user without the right", "guest", cronJobYAML("[" + byTemplate + "]"),
			cronJobYAML("[" + inline + "]"), `user "guest" may not create ResourceClaims`},
		{"the annotation release", "admin", "", annotated(job("[" + byTemplate + "]")),
			`metadata.annotations[scheduling.dra-shared.dev/release]: Forbidden: "Unused=10m" has no effect`},
		{"the annotation release of pods", "admin", "",
			jobYAML("["+byTemplate+"]", `, scheduling.dra-shared.dev/release: OnCompletion`, ""),
			`spec.template.metadata.annotations[scheduling.dra-shared.dev/release]: Forbidden: "OnCompletion"`},
		{"the annotation release of a replicated job", "admin", "",
			strings.Replace(jobSetYAML("["+byTemplate+"]"), "name: b, template: {", "name: b, template: {"+unused+", ", 1),
			`spec.replicatedJobs[1].template.metadata.annotations[scheduling.dra-shared.dev/release]: Forbidden`},
		{"the annotation release of the Jobs of a CronJob", "admin", cronJobYAML("[" + byTemplate + "]"),
			strings.Replace(cronJobYAML("["+byTemplate+"]"), "jobTemplate: {", "jobTemplate: {"+unused+", ", 1),
			`spec.jobTemplate.metadata.annotations[scheduling.dra-shared.dev/release]: Forbidden`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newJobs(t).Handle(t.Context(), jobRequest(t, tc.user, tc.old, tc.now))
			if r.Allowed || r.Result.Code != 403 || !strings.Contains(r.Result.Message, tc.want) {
				t.Errorf("allowed: %t, result %+v, want message %q", r.Allowed, r.Result, tc.want)
			}
		})
	}
}

// unused is metadata with the annotation release.
const unused = "metadata: {annotations: {scheduling.dra-shared.dev/release: Unused=10m}}"

// annotated adds the annotation release to a Job of jobYAML.
func annotated(job string) string {
	return strings.Replace(job, "metadata: {name", strings.TrimSuffix(unused, "}")+", name", 1)
}

func cronJobYAML(annotation string) string {
	return fmt.Sprintf(`{kind: CronJob, metadata: {name: nightly, namespace: ns}, spec: {jobTemplate: {spec: {template: {
		metadata: {annotations: {scheduling.dra-shared.dev/job-claims: %q}}, spec: {containers: [{name: worker}]}}}}}}`,
		annotation)
}

// The replicated jobs of a JobSet often list the same claims. The API server is asked once about them: a hundred
// requests would take longer than the timeout of the webhook.
func TestListedClaims_Handle_reviewsEqualClaimsOnce(t *testing.T) {
	jobs := newJobs(t)
	requests := 0
	c, ok := jobs.Client.(client.WithWatch)
	if !ok {
		t.Fatalf("%T does not watch", jobs.Client)
	}
	jobs.Client = interceptor.NewClient(c, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, options ...client.CreateOption) error {
			requests++
			return c.Create(ctx, o, options...)
		},
	})
	const set = `{kind: JobSet, metadata: {name: many, namespace: ns}, spec: {replicatedJobs: [%s]}}`
	replicated := fmt.Sprintf(`{template: {spec: {template: {metadata: {annotations: {
		scheduling.dra-shared.dev/job-claims: %q}}, spec: {containers: [{name: worker}]}}}}}`, "["+inline+"]")
	now := fmt.Sprintf(set, strings.Repeat(replicated+",", 99)+replicated)
	if response := jobs.Handle(t.Context(), jobRequest(t, "admin", "", now)); !response.Allowed {
		t.Errorf("it is denied: %v", response.Result)
	}
	if requests != 2 {
		t.Errorf("the API server was asked %d times, want 2: about the spec, and about the author", requests)
	}
}

func TestListedClaims_Handle_allows(t *testing.T) {
	job := func(annotation string) string { return jobYAML(annotation, "", "") }
	suspend := func(job string) string { return strings.Replace(job, "spec: {", "spec: {suspend: true, ", 1) }
	for _, tc := range []struct{ name, user, old, now, warning string }{
		{"a template of a user without rights", "guest", "", job("[" + byTemplate + "]"), ""},
		{"a spec of a user with the right", "admin", "", job("[" + inline + "]"), ""},
		{"a Job of the JobSet with that spec", "jobset-controller", "",
			ownedBy(job("["+inline+"]"), "jobset.x-k8s.io/v1alpha2", "JobSet", "7"), ""},
		{"an update that keeps the annotation", "guest", job("[" + inline + "]"), suspend(job("[" + inline + "]")), ""},
		{"another format of the annotation", "guest", job("[" + inline + "]"), job(inOtherFormat), ""},
		{"a Job of the JobSet with that spec in another format", "jobset-controller", "",
			ownedBy(job(inOtherFormat), "jobset.x-k8s.io/v1alpha2", "JobSet", "7"), ""},
		{"an update that keeps the annotation release", "guest", annotated(job("[" + inline + "]")),
			annotated(suspend(job("[" + inline + "]"))), ""},
		{"the annotation release without claims", "guest", "", annotated(strings.Replace(job(""), "job-claims", "x", 1)), ""},
		{"a change of a CronJob", "admin", cronJobYAML("[" + byTemplate + "]"), cronJobYAML("[" + inline + "]"), ""},
		{"a claim of the pods with the name of an entry", "guest", "",
			jobYAML("["+byTemplate+"]", "", ", resourceClaims: [{name: net, resourceClaimName: own}]"),
			`spec.template.spec.resourceClaims[0] "net" overrides the claim of that name in the annotation ` +
				`scheduling.dra-shared.dev/job-claims: the pods use ResourceClaim "own"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newJobs(t).Handle(t.Context(), jobRequest(t, tc.user, tc.old, tc.now))
			warnings := strings.Join(r.Warnings, "\n")
			if !r.Allowed || !strings.HasPrefix(warnings, tc.warning) || (warnings == "") != (tc.warning == "") {
				t.Errorf("allowed: %t, result %+v, warnings %q, want %q", r.Allowed, r.Result, warnings, tc.warning)
			}
		})
	}
}

// sharingJob has an entry for a NIC without containers, one for a fabric, and one for a device of another driver.
const sharingJob = `
apiVersion: batch/v1
kind: Job
metadata: {namespace: ns, name: train, uid: "9"}
spec:
  template:
    metadata:
      annotations:
        scheduling.dra-shared.dev/job-claims: |
          - {name: net, resourceClaimTemplateName: share}
          - {name: gpu, resourceClaimTemplateName: theirs, containers: [a]}
          - {name: own, resourceClaimTemplateName: share}
          - {name: rack, spec: {devices: {requests: [{name: f, exactly: {deviceClassName: fabric.dra-shared.dev}}]}},
             containers: [b]}
`

// podOfJob returns a pod of sharingJob with its own claim "own", and more fields of its spec.
func podOfJob(t *testing.T, annotations, spec string) string {
	t.Helper()
	var job batchv1.Job
	if err := yaml.UnmarshalStrict([]byte(sharingJob), &job); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf(`{metadata: {name: p, annotations: {scheduling.dra-shared.dev/job-claims: %q%s},
		ownerReferences: [{apiVersion: batch/v1, kind: Job, name: train, uid: "9", controller: true}]},
		spec: {containers: [{name: a, resources: {}}, {name: b, resources: {}}],
		resourceClaims: [{name: own, resourceClaimName: team}]%s}}`,
		job.Spec.Template.Annotations["scheduling.dra-shared.dev/job-claims"], annotations, spec)
}

// newJobPods returns a webhook for an API server that has sharingJob.
func newJobPods(t *testing.T) *Pods {
	t.Helper()
	p := newPods(t, mode.Native)
	p.JobClaims = true
	var job batchv1.Job
	if err := yaml.UnmarshalStrict([]byte(sharingJob), &job); err != nil {
		t.Fatal(err)
	}
	c, ok := p.Client.(client.Client)
	if !ok {
		t.Fatalf("%T is not a client.Client", p.Client)
	}
	if err := c.Create(t.Context(), &job); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPods_addsClaimsOfJob(t *testing.T) {
	p := newJobPods(t)
	var pod corev1.Pod
	response := admit(t, p, review(t, "", podOfJob(t, "", "")), &pod)
	if !response.Allowed || len(response.Warnings) != 1 ||
		!strings.Contains(response.Warnings[0], `spec.resourceClaims "own" overrides the claim of that name of Job "train"`) {
		t.Errorf("allowed: %t, warnings %q", response.Allowed, response.Warnings)
	}
	owner := podgroups.JobOwner("ns", "train", "9")
	wantClaims := []corev1.PodResourceClaim{{Name: "own", ResourceClaimName: ptr.To("team")}}
	for _, entry := range []string{"net", "gpu", "rack"} {
		wantClaims = append(wantClaims, corev1.PodResourceClaim{
			Name: entry, ResourceClaimName: ptr.To(claims.Name(owner, entry, 0)),
		})
	}
	if diff := cmp.Diff(wantClaims, pod.Spec.ResourceClaims); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
	// Entry gpu lists container a, and rack b. The others are NICs, which all containers share.
	for i, want := range []string{"[gpu net own]", "[net own rack]"} {
		var names []string
		for _, c := range pod.Spec.Containers[i].Resources.Claims {
			names = append(names, c.Name)
		}
		slices.Sort(names)
		if got := fmt.Sprint(names); got != want {
			t.Errorf("container %s references %s, want %s", pod.Spec.Containers[i].Name, got, want)
		}
	}
	if uid := pod.Labels[scheduling.GroupUIDLabel]; uid != "9" || !hasGate(&pod) {
		t.Errorf("label %q, gate: %t, want that of the Job, and the gate", uid, hasGate(&pod))
	}
	again := pod.DeepCopy()
	raw, err := json.Marshal(&pod)
	if err != nil {
		t.Fatal(err)
	}
	if response := admit(t, p, review(t, "", string(raw)), again); !response.Allowed || len(response.Patches) > 0 {
		t.Errorf("the second call changes the pod: %v", response.Patches)
	}
}

// A pod that replaces another gets the claims that exist, even if their template was deleted.
func TestPods_addsClaimsOfJobWithoutTemplate(t *testing.T) {
	p := newJobPods(t)
	c, ok := p.Client.(client.Client)
	if !ok {
		t.Fatalf("%T is not a client.Client", p.Client)
	}
	template := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "share"}}
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(template), template); err != nil {
		t.Fatal(err)
	}
	if err := c.Delete(t.Context(), template); err != nil {
		t.Fatal(err)
	}
	pod := review(t, "", podOfJob(t, "", ""))
	if r := p.Handle(t.Context(), pod); r.Allowed || !strings.Contains(r.Result.Message, "does not exist in namespace") {
		t.Errorf("without claims: allowed: %t, result %+v, want that the template does not exist", r.Allowed, r.Result)
	}
	for _, entry := range []string{"net", "own"} {
		claim := claims.Generate(podgroups.JobOwner("ns", "train", "9"), entry, 0, template)
		if err := c.Create(t.Context(), claim); err != nil {
			t.Fatal(err)
		}
	}
	if r := p.Handle(t.Context(), pod); !r.Allowed {
		t.Errorf("with claims: result %+v, want the pod allowed", r.Result)
	}
}

func hasGate(pod *corev1.Pod) bool {
	return slices.Contains(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: scheduling.ReservedGate})
}

// A scheduler that waits for all pods of a group would wait for ever.
func TestPods_addsNoGateForOtherSchedulers(t *testing.T) {
	for _, pod := range []string{
		podOfJob(t, "", ", schedulerName: volcano"),
		podOfJob(t, "", ", schedulingGroup: {podGroupName: of-kubernetes}"),
		podOfJob(t, ", scheduling.dra-shared.dev/gates: Disabled", ""),
	} {
		var admitted corev1.Pod
		response := admit(t, newJobPods(t), review(t, "", pod), &admitted)
		if !response.Allowed || hasGate(&admitted) || admitted.Labels[scheduling.GroupUIDLabel] != "9" {
			t.Errorf("%s: allowed: %t, gate: %t, labels %v", pod, response.Allowed, hasGate(&admitted), admitted.Labels)
		}
	}
}

func TestPods_deniesPodsOfOtherOwners(t *testing.T) {
	valid := podOfJob(t, "", "")
	inGroup := podOfJob(t, ", scheduling.dra-shared.dev/pod-group: group", "")
	for name, tc := range map[string]struct{ pod, want string }{
		"no Job":          {strings.Replace(valid, "kind: Job", "kind: ReplicaSet", 1), "only pods of Jobs share claims"},
		"a former Job":    {strings.Replace(valid, `uid: "9"`, `uid: "8"`, 1), "no longer exists"},
		"another value":   {strings.Replace(valid, "name: net", "name: ten", 1), `differs from the one of Job "train"`},
		"in a PodGroup":   {inGroup, "the pod is in a PodGroup as well"},
		"in a PodGroup 2": {podOfJob(t, "", ", schedulingGroup: {podGroupName: group}"), "the pod is in a PodGroup as well"},
	} {
		r := newJobPods(t).Handle(t.Context(), review(t, "", tc.pod))
		if r.Allowed || !strings.Contains(r.Result.Message, tc.want) {
			t.Errorf("%s: allowed: %t, result %+v, want %q", name, r.Allowed, r.Result, tc.want)
		}
	}
}

// Without the feature, the annotation does not have an effect.
func TestPods_withoutJobClaims(t *testing.T) {
	p := newJobPods(t)
	p.JobClaims = false
	var pod corev1.Pod
	response := admit(t, p, review(t, "", podOfJob(t, "", "")), &pod)
	if !response.Allowed || len(pod.Spec.ResourceClaims) != 1 || pod.Labels[scheduling.GroupUIDLabel] != "" {
		t.Errorf("allowed: %t, claims %v, labels %v", response.Allowed, pod.Spec.ResourceClaims, pod.Labels)
	}
	want := `metadata.annotations["scheduling.dra-shared.dev/job-claims"] has no effect`
	if len(response.Warnings) != 1 || !strings.Contains(response.Warnings[0], want) {
		t.Errorf("got warnings %q, want %q", response.Warnings, want)
	}
}
