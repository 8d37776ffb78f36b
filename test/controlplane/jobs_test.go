// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// inlineFabric is an entry of the annotation job-claims with a claim to the fabric of all simulated nodes.
const inlineFabric = `{name: fabric, spec: {devices: {requests: [
	{name: fabric, exactly: {deviceClassName: fabric.dra-shared.dev}}]}}}`

// reformattedFabric is the annotation job-claims with inlineFabric in another format and order of keys.
const reformattedFabric = `- spec:
    devices:
      requests:
      - exactly: {deviceClassName: "fabric.dra-shared.dev"}
        name: fabric
  name: fabric
`

// sharingJob returns a Job with pods that share the claims in the annotation. Its pods have the containers worker and
// helper.
func sharingJob(ns, name, annotation string, pods int32) *batchv1.Job {
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: batchv1.JobSpec{
			Parallelism: &pods, Completions: &pods, BackoffLimit: ptr.To[int32](0),
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{scheduling.JobClaimsAnnotation: annotation}},
				Spec: corev1.PodSpec{
					RestartPolicy: corev1.RestartPolicyNever, TerminationGracePeriodSeconds: ptr.To[int64](1),
					Containers: []corev1.Container{{Name: "worker", Image: "none"}, {Name: "helper", Image: "none"}},
				},
			},
		},
	}
}

// jobPods returns the pods of a Job.
func (e *testEnv) jobPods(t *testing.T, job *batchv1.Job) []corev1.Pod {
	t.Helper()
	var pods corev1.PodList
	err := e.client.List(t.Context(), &pods, client.InNamespace(job.Namespace),
		client.MatchingLabels{batchv1.JobNameLabel: job.Name})
	if err != nil {
		t.Fatal(err)
	}
	return pods.Items
}

// endPods makes the pods of a Job terminal, as kubelets do.
func (e *testEnv) endPods(t *testing.T, job *batchv1.Job, phase corev1.PodPhase) {
	t.Helper()
	for _, pod := range e.jobPods(t, job) {
		e.setPhase(t, &pod, phase)
	}
}

func (e *testEnv) setPhase(t *testing.T, pod *corev1.Pod, phase corev1.PodPhase) {
	t.Helper()
	patch := client.RawPatch(types.StrategicMergePatchType, fmt.Appendf(nil, `{"status":{"phase":%q}}`, phase))
	if err := e.client.Status().Patch(t.Context(), pod, patch); err != nil {
		t.Fatal(err)
	}
}

// awaitClaims waits until the claims of a namespace meet the condition.
func (e *testEnv) awaitClaims(
	t *testing.T, ns, condition string, check func([]resourceapi.ResourceClaim) error,
) (claims []resourceapi.ResourceClaim) {
	t.Helper()
	eventually.Eventually(t, timeout, condition, func() (err error) {
		if claims, err = e.claims(t.Context(), ns); err != nil {
			return err
		}
		return check(claims)
	})
	return claims
}

// held returns a check that a namespace has want claims, all of them held for a Job.
func held(want int) func([]resourceapi.ResourceClaim) error {
	return func(claims []resourceapi.ResourceClaim) error {
		if len(claims) != want {
			return fmt.Errorf("got %d claims, want %d", len(claims), want)
		}
		for _, c := range claims {
			isJob := func(r resourceapi.ResourceClaimConsumerReference) bool { return r.Resource == "jobs" }
			if c.Status.Allocation == nil || !slices.ContainsFunc(c.Status.ReservedFor, isJob) {
				return fmt.Errorf("claim %s is allocated: %t, reserved for %v, want its Job among them",
					c.Name, c.Status.Allocation != nil, c.Status.ReservedFor)
			}
		}
		return nil
	}
}

func noClaims(claims []resourceapi.ResourceClaim) error {
	if len(claims) > 0 {
		return fmt.Errorf("got %d claims, the first is %s, reserved for %v",
			len(claims), claims[0].Name, claims[0].Status.ReservedFor)
	}
	return nil
}

// All pods of a Job share its claims, which are deleted when the Job is complete or has failed. The containers that an
// entry lists, and no others, reference its claim.
func TestJobClaims_sharedAndDeletedAtCompletion(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	for phase, condition := range map[corev1.PodPhase]batchv1.JobConditionType{
		corev1.PodSucceeded: batchv1.JobComplete, corev1.PodFailed: batchv1.JobFailed,
	} {
		ns := e.createNamespace(t, "job")
		template := &resourceapi.ResourceClaimTemplate{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "targeted"},
			Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: fabricSpec()},
		}
		job := sharingJob(ns, "train", "["+inlineFabric+`,
			{name: targeted, resourceClaimTemplateName: targeted, containers: [worker]},
			{name: kept, resourceClaimTemplateName: targeted, deletionPolicy: OnDeletion}]`, 3)
		e.create(t, template, job)
		e.awaitRunning(t, ns, 3)
		claims := e.awaitClaims(t, ns, "the Job holds three claims", held(3))
		for _, c := range claims {
			owner := metav1.GetControllerOf(&c)
			prefix := "train-" + c.Annotations[scheduling.ClaimAnnotation] + "-"
			if owner == nil || owner.UID != job.UID || !strings.HasPrefix(c.Name, prefix) {
				t.Errorf("claim %s has owner %v, want Job %s and prefix %s", c.Name, owner, job.UID, prefix)
			}
		}
		for _, pod := range e.jobPods(t, job) {
			got := map[string][]corev1.ResourceClaim{}
			for _, c := range pod.Spec.Containers {
				got[c.Name] = c.Resources.Claims
			}
			names := func(claims []corev1.ResourceClaim) (all []string) {
				for _, c := range claims {
					all = append(all, c.Name)
				}
				slices.Sort(all)
				return all
			}
			worker, helper := names(got["worker"]), names(got["helper"])
			want := []string{"fabric", "kept", "targeted"}
			if !slices.Equal(worker, want) || !slices.Equal(helper, want[:2]) {
				t.Errorf("container worker references %v, and helper %v", worker, helper)
			}
		}
		e.endPods(t, job, phase)
		e.awaitClaims(t, ns, fmt.Sprintf("only the claim with OnDeletion is left when the Job is %s", condition), held(1))
		e.delete(t, job)
		e.awaitEmpty(t, ns)
	}
}

// A suspended Job releases the devices, and gets them again when it is resumed.
func TestJobClaims_suspension(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "suspend")
	job := sharingJob(ns, "train", "["+inlineFabric+"]", 2)
	job.Spec.Suspend = ptr.To(true)
	e.create(t, job)
	setSuspended := func(suspended bool) {
		patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"suspend":%t}}`, suspended))
		if err := e.client.Patch(t.Context(), job, patch); err != nil {
			t.Fatal(err)
		}
	}
	eventually.Eventually(t, timeout, "the Job is suspended", func() error {
		if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(job), job); err != nil {
			return err
		}
		if len(job.Status.Conditions) == 0 {
			return errors.New("it has no condition")
		}
		return nil
	})
	if claims, err := e.claims(t.Context(), ns); err != nil || len(claims) > 0 {
		t.Errorf("got %d claims and error %v before the Job starts, want none", len(claims), err)
	}
	for range 2 {
		setSuspended(false)
		e.awaitRunning(t, ns, 2)
		e.awaitClaims(t, ns, "the Job holds its claim", held(1))
		setSuspended(true)
		e.awaitClaims(t, ns, "the claim of the suspended Job is deallocated", func(claims []resourceapi.ResourceClaim) error {
			for _, c := range claims {
				if c.Status.Allocation != nil || len(c.Status.ReservedFor) > 0 {
					return fmt.Errorf("claim %s is allocated, and reserved for %v", c.Name, c.Status.ReservedFor)
				}
			}
			return nil
		})
	}
	e.delete(t, job)
	e.awaitEmpty(t, ns)
}

// A Job that is deleted does not leave claims, however it is deleted, and even while the controller does not run. The
// next Job of that name has claims of its own.
func TestJobClaims_deletion(t *testing.T) {
	e := requireTestEnv(t)
	stop := e.startController(t, nil)
	ns := e.createNamespace(t, "delete")
	used := map[string]bool{}
	for _, propagation := range []metav1.DeletionPropagation{
		metav1.DeletePropagationForeground, metav1.DeletePropagationBackground, metav1.DeletePropagationOrphan,
		"controller stopped",
	} {
		job := sharingJob(ns, "train", "["+inlineFabric+"]", 2)
		e.create(t, job)
		e.awaitRunning(t, ns, 2)
		claim := e.awaitClaims(t, ns, "the Job holds its claim", held(1))[0]
		if used[claim.Name] {
			t.Errorf("%s: claim %s belongs to an earlier Job", propagation, claim.Name)
		}
		used[claim.Name] = true
		stopped := propagation == "controller stopped"
		if stopped {
			stop()
			propagation = metav1.DeletePropagationBackground
		}
		if err := e.client.Delete(t.Context(), job, client.PropagationPolicy(propagation)); err != nil {
			t.Fatal(err)
		}
		e.awaitDeleted(t, job)
		if stopped {
			e.startController(t, nil)
		}
		if propagation == metav1.DeletePropagationOrphan {
			e.deletePods(t, ns)
		}
		e.awaitClaims(t, ns, "no claim is left", noClaims)
		e.awaitEmpty(t, ns)
	}
}

// The controller recognizes the claim that it generated for a Job, even if the metadata of the template has the
// annotations of generated claims. Users cannot change the annotations and the owner that identify the claim.
// Otherwise the claim would keep the Job's entry, and with it its device and its namespace, forever.
func TestJobClaims_identityOfClaim(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "identity")
	template := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: objectMeta(ns, "confusing"), Spec: resourceapi.ResourceClaimTemplateSpec{Spec: fabricSpec()},
	}
	template.Spec.Annotations = map[string]string{
		scheduling.ReplicaAnnotation: "3", scheduling.ShardAnnotation: "1", scheduling.PrimaryAnnotation: "true",
		"example.com/kept": "yes",
	}
	job := sharingJob(ns, "train", `[{name: fabric, resourceClaimTemplateName: confusing}]`, 2)
	e.create(t, template, job)
	e.awaitRunning(t, ns, 2)
	claim := &e.awaitClaims(t, ns, "the Job holds its claim", held(1))[0]
	if claim.Annotations["example.com/kept"] != "yes" {
		t.Errorf("the claim has the annotations %v, want those of the template among them", claim.Annotations)
	}
	editor := e.userWith(t, ns, rbacv1.PolicyRule{
		APIGroups: []string{resourceapi.GroupName}, Resources: []string{"resourceclaims"}, Verbs: []string{"patch"},
	})
	edit := func(change string) error {
		return editor.Patch(t.Context(), claim.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(change)))
	}
	eventually.Eventually(t, timeout, "the editor may change other metadata", func() error {
		return edit(`{"metadata":{"annotations":{"example.com/kept":"no"},"labels":{"a":"b"}}}`)
	})
	for change, want := range map[string]string{
		`{"metadata":{"annotations":{"` + scheduling.ClaimAnnotation + `":null}}}`:    "identify a generated claim",
		`{"metadata":{"annotations":{"` + scheduling.ClaimAnnotation + `":"other"}}}`: "identify a generated claim",
		`{"metadata":{"annotations":{"` + scheduling.ReplicaAnnotation + `":"3"}}}`:   "identify a generated claim",
		`{"metadata":{"ownerReferences":null}}`:                                       "is the owner of a generated claim",
	} {
		if err := edit(change); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("change %s of the claim: got error %v, want %q", change, err, want)
		}
	}
	background := client.PropagationPolicy(metav1.DeletePropagationBackground)
	if err := e.client.Delete(t.Context(), job, background); err != nil {
		t.Fatal(err)
	}
	e.awaitClaims(t, ns, "no claim is left", noClaims)
	e.awaitEmpty(t, ns)
}

// The node of a Job's device fails. The next pods get a device of another node, without help.
func TestJobClaims_leaveFailedNode(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	for i := range 2 {
		e.createNIC(t, fmt.Sprintf("sim-%03d", i))
	}
	ns := e.createNamespace(t, "job-failed-node")
	job := sharingJob(ns, "train", `[{name: net, resourceClaimTemplateName: share}]`, 2)
	job.Spec.Completions, job.Spec.BackoffLimit = ptr.To[int32](100), ptr.To[int32](100)
	share := &resourceapi.ResourceClaimTemplate{ObjectMeta: objectMeta(ns, "share")}
	share.Spec.Spec = nicSpec()
	e.create(t, share, job)
	e.awaitRunning(t, ns, 2)
	e.awaitClaims(t, ns, "the Job holds its claim", held(1))
	var failed int
	former := e.jobPods(t, job)
	if _, err := fmt.Sscanf(former[0].Spec.NodeName, "sim-%03d", &failed); err != nil {
		t.Fatalf("node %q of the pod: %v", former[0].Spec.NodeName, err)
	}
	e.cordon(t, failed, failed+1)
	for i := range former {
		if err := e.client.Delete(t.Context(), &former[i], client.GracePeriodSeconds(0)); err != nil {
			t.Fatal(err)
		}
	}
	want := fmt.Sprintf("sim-%03d", 1-failed)
	eventually.Eventually(t, 2*time.Minute, "two pods run on node "+want, func() error {
		running := 0
		for _, pod := range e.jobPods(t, job) {
			if pod.Status.Phase == corev1.PodRunning && pod.Spec.NodeName == want {
				running++
			}
		}
		if running != 2 {
			return fmt.Errorf("%d pods run there", running)
		}
		return nil
	})
	e.awaitClaims(t, ns, "the Job holds its claim again", held(1))
	e.delete(t, job)
	e.awaitEmpty(t, ns)
}

// A namespace with claims of all kinds of holders is deleted while the controller does not run. It is gone when the
// controller has started.
func TestController_namespaceWithClaimsOfAllHolders(t *testing.T) {
	e := requireTestEnv(t)
	stop := e.startController(t, nil)
	ns := e.createNamespace(t, "all-holders")
	running := sharingJob(ns, "running", "["+inlineFabric+"]", 2)
	suspended := sharingJob(ns, "suspended", "["+inlineFabric+"]", 1)
	kept := sharingJob(ns, "kept", "["+strings.Replace(inlineFabric, "{", "{deletionPolicy: OnDeletion, ", 1)+"]", 1)
	team := fabricClaim(ns, "team")
	team.Annotations = map[string]string{
		scheduling.ReservedForAnnotation: "batch/jobs/running", scheduling.ReleaseAnnotation: "OnDeletion",
	}
	e.create(t, running, suspended, kept, annotatedSet(ns, 1), team, newPodWithClaim(ns, "user", 0, team.Name))
	e.mustCreateGroup(t, ns, "group")
	e.create(t, newPod(ns, "group", 0))
	e.awaitRunning(t, ns, 7)
	e.endPods(t, kept, corev1.PodSucceeded)
	e.setSuspended(t, suspended, true)
	e.awaitClaims(t, ns, "the claims exist, and that of the suspended Job is released",
		func(claims []resourceapi.ResourceClaim) error {
			allocated := 0
			for _, c := range claims {
				if c.Status.Allocation != nil {
					allocated++
				}
			}
			if len(claims) != 6 || allocated != 5 {
				return fmt.Errorf("%d claims, %d of them allocated", len(claims), allocated)
			}
			return nil
		})
	stop()
	object := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}
	e.delete(t, object)
	e.startController(t, nil)
	e.awaitDeleted(t, object)
}

// If another controller creates a Job's pods, such as MultiKueue in another cluster, the Job does not have a claim in
// this cluster until it has a pod there.
func TestJobClaims_jobManagedByAnotherController(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "managed-by")
	remote := sharingJob(ns, "remote", "["+inlineFabric+"]", 1)
	remote.Spec.ManagedBy = ptr.To("kueue.x-k8s.io/multikueue")
	local := sharingJob(ns, "local", "["+inlineFabric+"]", 1)
	local.Spec.ManagedBy = ptr.To(batchv1.JobControllerName)
	e.create(t, remote, local)
	e.awaitRunning(t, ns, 1)
	for _, c := range e.awaitClaims(t, ns, "the Job whose pod is here holds its claim", held(1)) {
		if owner := metav1.GetControllerOf(&c); owner.UID != local.UID {
			t.Errorf("claim %s belongs to Job %s", c.Name, owner.Name)
		}
	}
	pod := &corev1.Pod{ObjectMeta: remote.Spec.Template.ObjectMeta, Spec: remote.Spec.Template.Spec}
	pod.Namespace, pod.Name = ns, "remote-0"
	pod.OwnerReferences = []metav1.OwnerReference{
		*metav1.NewControllerRef(remote, batchv1.SchemeGroupVersion.WithKind("Job")),
	}
	e.create(t, pod)
	e.awaitRunning(t, ns, 2)
	e.awaitClaims(t, ns, "both Jobs hold their claims", held(2))
	e.delete(t, remote, local)
	e.awaitEmpty(t, ns)
}

// The same claims in another format are not a change: a suspended Job and a StatefulSet can be applied again.
func TestListedClaims_annotationInAnotherFormat(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "format")
	job := sharingJob(ns, "train", "["+inlineFabric+"]", 1)
	job.Spec.Suspend = ptr.To(true)
	set := annotatedSet(ns, 2)
	e.create(t, job, set)
	e.awaitRunning(t, ns, 2)
	before := e.awaitClaimsOfReplicas(t, ns, "0", "1")
	for o, annotation := range map[client.Object]string{
		job: scheduling.JobClaimsAnnotation, set: scheduling.ReplicaClaimsAnnotation,
	} {
		patch := func(value string) error {
			return e.client.Patch(t.Context(), o, client.RawPatch(types.MergePatchType, fmt.Appendf(nil,
				`{"spec":{"template":{"metadata":{"annotations":{%q:%q}}}}}`, annotation, value)))
		}
		other := strings.Replace(reformattedFabric, "name: fabric", "name: other", 1)
		const want = "cannot be changed, because pods may use the claims"
		if err := patch(other); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("apply %T with another claim: got error %v, want %q", o, err, want)
		}
		if err := patch(reformattedFabric); err != nil {
			t.Errorf("apply %T with the same claim in another format: %v", o, err)
		}
	}
	// Kubernetes replaces the last pod first. Until it replaces the first one, that has the former format.
	e.delete(t, &corev1.Pod{ObjectMeta: objectMeta(ns, "web-0")})
	eventually.Eventually(t, timeout, "the pods have the new format", func() error {
		var pods corev1.PodList
		if err := e.client.List(t.Context(), &pods, client.InNamespace(ns)); err != nil {
			return err
		}
		for _, pod := range pods.Items {
			if pod.Annotations[scheduling.ReplicaClaimsAnnotation] != reformattedFabric {
				return fmt.Errorf("pod %s does not", pod.Name)
			}
		}
		return nil
	})
	e.awaitRunning(t, ns, 2)
	if after := e.awaitClaimsOfReplicas(t, ns, "0", "1"); !maps.Equal(before, after) {
		t.Errorf("claims of the replicas: got %v, want %v", after, before)
	}
	e.setSuspended(t, job, false)
	e.awaitRunning(t, ns, 3)
	e.delete(t, job, set)
	e.awaitEmpty(t, ns)
}

// The annotation release does not have an effect on listed claims. It is refused on each object where its author may
// expect one.
func TestListedClaims_releaseIsRefused(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "release-refused")
	release := map[string]string{scheduling.ReleaseAnnotation: "Unused=10m"}
	const want = `annotations[scheduling.dra-shared.dev/release]: Forbidden: "Unused=10m" has no effect on the claims`
	refused := func(what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want %q", what, err, want)
		}
	}
	job, set := sharingJob(ns, "train", "["+inlineFabric+"]", 1), annotatedSet(ns, 1)
	annotatedJob, annotatedPods, annotatedStatefulSet := job.DeepCopy(), set.DeepCopy(), set.DeepCopy()
	annotatedJob.Annotations, annotatedStatefulSet.Annotations = release, release
	maps.Copy(annotatedPods.Spec.Template.Annotations, release)
	for _, o := range []client.Object{annotatedJob, annotatedPods, annotatedStatefulSet} {
		refused(fmt.Sprintf("create %T", o), e.client.Create(t.Context(), o))
	}
	e.create(t, job, set)
	refused("annotate the Job", e.tryAnnotate(t, job, release))
	refused("annotate the StatefulSet", e.tryAnnotate(t, set, release))
	e.delete(t, job, set)
	e.awaitEmpty(t, ns)
}

// A Job of 300 pods needs more than one claim, because a claim can be reserved for 256 consumers.
func TestJobClaims_moreThan256Pods(t *testing.T) {
	e := requireOther(t, jobSetController.name)
	e.startController(t, nil)
	ns := e.createNamespace(t, "large")
	job := sharingJob(ns, "train", "["+inlineFabric+"]", 300)
	e.create(t, job)
	start := time.Now()
	e.awaitRunning(t, ns, 300)
	t.Logf("300 pods run after %s", time.Since(start).Round(time.Millisecond))
	e.awaitClaims(t, ns, "the Job holds two claims", held(2))
	e.delete(t, job)
	e.awaitEmpty(t, ns)
}

// userWith returns a client of a user who has certain rights in a namespace.
func (e *testEnv) userWith(t *testing.T, ns string, rights ...rbacv1.PolicyRule) client.Client {
	t.Helper()
	const user = "author"
	role := &rbacv1.Role{ObjectMeta: objectMeta(ns, user), Rules: rights}
	e.create(t, role, &rbacv1.RoleBinding{
		ObjectMeta: role.ObjectMeta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}},
	})
	return e.clientOf(t, user)
}

// Admission denies a Job if the controller could not generate its claims, or if its author is not permitted to create
// them.
func TestJobClaims_deniedAtCreation(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "denied")
	createJobs := rbacv1.PolicyRule{APIGroups: []string{"batch"}, Resources: []string{"jobs"}, Verbs: []string{"create"}}
	author := e.userWith(t, ns, createJobs)
	create := func(c client.Client, annotation string) error {
		return c.Create(t.Context(), sharingJob(ns, "denied", annotation, 1), client.DryRunAll)
	}
	eventually.Eventually(t, timeout, "the author may create a Job by template", func() error {
		return create(author, "[{name: net, resourceClaimTemplateName: any}]")
	})
	cronJob := &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "nightly"}}
	cronJob.Spec.Schedule = "0 3 * * *"
	cronJob.Spec.JobTemplate.Spec = sharingJob(ns, "", "["+inlineFabric+"]", 1).Spec
	e.create(t, cronJob)
	ofCronJob := sharingJob(ns, "nightly-1", "["+inlineFabric+"]", 1)
	ofCronJob.OwnerReferences = []metav1.OwnerReference{
		*metav1.NewControllerRef(cronJob, batchv1.SchemeGroupVersion.WithKind("CronJob")),
	}
	if err := author.Create(t.Context(), ofCronJob, client.DryRunAll); !apierrors.IsForbidden(err) {
		t.Errorf("a Job that names a CronJob with the same spec as its owner: got error %v, want that it is forbidden", err)
	}
	cronJobController := e.clientOf(t, "system:serviceaccount:kube-system:cronjob-controller")
	if err := cronJobController.Create(t.Context(), ofCronJob, client.DryRunAll); err != nil {
		t.Errorf("a Job of a CronJob by its controller: %v", err)
	}
	for annotation, want := range map[string]string{
		"[" + inlineFabric + "]": `user "author" may not create ResourceClaims in namespace`,
		"[{}]":                   "name: Invalid value",
	} {
		if err := create(author, annotation); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want %q", annotation, err, want)
		}
	}
	const bad = `[{name: x, spec: {devices: {requests: [
		{name: r, exactly: {deviceClassName: c, allocationMode: Some}}]}}}]`
	if err := create(e.client, bad); err == nil || !strings.Contains(err.Error(), `Unsupported value: "Some"`) {
		t.Errorf("a spec that the API server finds invalid: got error %v", err)
	}
}

// A user who may create pods cannot join a pod to a Job that the pod does not belong to, or skip admission.
func TestJobClaims_refusesPodsWithoutJob(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "stray")
	pod := newPod(ns, "stray", 0)
	pod.Annotations = map[string]string{scheduling.JobClaimsAnnotation: "[" + inlineFabric + "]"}
	pod.Spec.ResourceClaims = nil
	create := func(want string) {
		t.Helper()
		if err := e.client.Create(context.Background(), pod.DeepCopy()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want %q", err, want)
		}
	}
	create("only pods of Jobs share claims of a Job")
	pod.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: "batch/v1", Kind: "Job", Name: "none", UID: "1", Controller: ptr.To(true),
	}}
	create(`Job "none", which owns the pod, no longer exists`)
}
