// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"fmt"
	"maps"
	"math"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// jobSetController is the real JobSet controller with its webhooks and its own rights.
var jobSetController = otherController{
	name: "jobset", account: "jobset-controller-manager",
	service: "jobset-webhook-service", port: 9444, secret: "jobset-webhook-server-cert",
	certificates: "/tmp/k8s-webhook-server/serving-certs",
}

// startJobSet installs JobSet, and runs its controller until the test ends.
func (e *testEnv) startJobSet(t *testing.T) {
	t.Helper()
	e.startOther(t, jobSetController, func(ctx context.Context) error {
		return e.client.Create(ctx, jobSet(t, "default", "probe", 1, "", ""), client.DryRunAll)
	})
}

// jobSet returns a JobSet. Its replicated job "workers" has Jobs of 2 pods, each Job with a claim to the fabric. spec
// has more fields of the JobSet, and jobSpec of its Jobs, by default that a failed pod fails its Job.
func jobSet(t *testing.T, ns, name string, replicas int, spec, jobSpec string) *unstructured.Unstructured {
	t.Helper()
	return jobSetOf(t, ns, name, replicas, 2, spec, jobSpec)
}

func jobSetOf(t *testing.T, ns, name string, replicas, pods int, spec, jobSpec string) *unstructured.Unstructured {
	t.Helper()
	if jobSpec == "" {
		jobSpec = "backoffLimit: 0"
	}
	text := fmt.Sprintf(`
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {namespace: %q, name: %q}
spec:
  replicatedJobs:
  - name: workers
    replicas: %d
    template:
      spec:
        parallelism: %d
        completions: %d
        %s
        template:
          metadata:
            annotations: {scheduling.dra-shared.dev/job-claims: %q}
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 1
            containers: [{name: worker, image: none, resources: {requests: {cpu: 500m}}}]
  %s
`, ns, name, replicas, pods, pods, jobSpec, "["+inlineFabric+"]", spec)
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return o
}

// jobsOf returns the Jobs of a namespace.
func (e *testEnv) jobsOf(t *testing.T, ns string) []batchv1.Job {
	t.Helper()
	var jobs batchv1.JobList
	if err := e.client.List(t.Context(), &jobs, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	return jobs.Items
}

// awaitClaimsOfJobs waits until want Jobs hold one claim each, and there are no other claims.
func (e *testEnv) awaitClaimsOfJobs(t *testing.T, ns string, want int) map[types.UID]string {
	t.Helper()
	owners := map[types.UID]string{}
	e.awaitClaims(t, ns, fmt.Sprintf("%d Jobs hold a claim each", want), func(claims []resourceapi.ResourceClaim) error {
		if err := held(want)(claims); err != nil {
			return err
		}
		clear(owners)
		for _, c := range claims {
			owners[metav1.GetControllerOf(&c).UID] = c.Name
		}
		for _, job := range e.jobsOf(t, ns) {
			if owners[job.UID] == "" {
				return fmt.Errorf("Job %s has no claim", job.Name)
			}
		}
		if len(owners) != want {
			return fmt.Errorf("%d Jobs have claims", len(owners))
		}
		return nil
	})
	return owners
}

func (e *testEnv) patchJobSet(t *testing.T, o *unstructured.Unstructured, merge string) {
	t.Helper()
	if err := e.client.Patch(t.Context(), o, client.RawPatch(types.MergePatchType, []byte(merge))); err != nil {
		t.Fatal(err)
	}
}

// Each Job of a JobSet has its own claim. A restart after a failure makes new ones, and the deletion of the JobSet with
// running pods leaves none.
func TestJobSet_claimsOfEachJob(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	e.startJobSet(t)
	ns := e.createNamespace(t, "jobset")
	set := jobSet(t, ns, "train", 3, "failurePolicy: {maxRestarts: 1}", "")
	e.create(t, set)
	e.awaitRunning(t, ns, 6)
	before := e.awaitClaimsOfJobs(t, ns, 3)
	jobs := e.jobsOf(t, ns)
	e.endPods(t, &jobs[0], corev1.PodFailed)
	eventually.Eventually(t, timeout, "JobSet has created the Jobs again", func() error {
		jobs := e.jobsOf(t, ns)
		for _, job := range jobs {
			if before[job.UID] != "" {
				return fmt.Errorf("Job %s belongs to the first attempt", job.Name)
			}
		}
		if len(jobs) != 3 {
			return fmt.Errorf("%d Jobs exist", len(jobs))
		}
		return nil
	})
	e.awaitRunning(t, ns, 6)
	e.awaitClaimsOfJobs(t, ns, 3)
	foreground := client.PropagationPolicy(metav1.DeletePropagationForeground)
	if err := e.client.Delete(t.Context(), set, foreground); err != nil {
		t.Fatal(err)
	}
	e.awaitDeleted(t, set)
	e.awaitEmpty(t, ns)
	if !e.used.has(ofJobSets) {
		t.Errorf("the controller has not used the right to %s", ofJobSets)
	}
}

// requireJobSetTests skips a test that is too long for every run.
func requireJobSetTests(t *testing.T) *testEnv {
	t.Helper()
	return requireOther(t, jobSetController.name)
}

func TestJobSet_suspendAndResume(t *testing.T) {
	e := requireJobSetTests(t)
	e.startController(t, nil)
	e.startJobSet(t)
	ns := e.createNamespace(t, "jobset-suspend")
	set := jobSet(t, ns, "train", 2, "suspend: true", "")
	e.create(t, set)
	eventually.Eventually(t, timeout, "JobSet has created its Jobs", func() error {
		if n := len(e.jobsOf(t, ns)); n != 2 {
			return fmt.Errorf("%d Jobs exist", n)
		}
		return nil
	})
	for range 2 {
		if claims, err := e.claims(t.Context(), ns); err != nil || len(claims) > 0 && claims[0].Status.Allocation != nil {
			t.Errorf("suspended: got %d claims, the first allocated, and error %v", len(claims), err)
		}
		e.patchJobSet(t, set, `{"spec":{"suspend":false}}`)
		e.awaitRunning(t, ns, 4)
		e.awaitClaimsOfJobs(t, ns, 2)
		e.patchJobSet(t, set, `{"spec":{"suspend":true}}`)
		e.awaitClaims(t, ns, "the claims are deallocated", func(claims []resourceapi.ResourceClaim) error {
			for _, c := range claims {
				if c.Status.Allocation != nil || len(c.Status.ReservedFor) > 0 {
					return fmt.Errorf("claim %s is allocated, and reserved for %v", c.Name, c.Status.ReservedFor)
				}
			}
			return nil
		})
	}
	e.delete(t, set)
	e.awaitEmpty(t, ns)
}

// A suspended JobSet that is applied again with its annotation in another format resumes, and its Jobs have their
// claims.
func TestJobSet_annotationInAnotherFormat(t *testing.T) {
	e := requireJobSetTests(t)
	e.startController(t, nil)
	e.startJobSet(t)
	ns := e.createNamespace(t, "jobset-format")
	set := jobSet(t, ns, "train", 2, "", "")
	e.create(t, set)
	e.awaitRunning(t, ns, 4)
	before := e.awaitClaimsOfJobs(t, ns, 2)
	e.patchJobSet(t, set, `{"spec":{"suspend":true}}`)
	e.awaitNoPods(t, ns)
	const path = "/spec/replicatedJobs/0/template/spec/template/metadata/annotations"
	err := e.client.Patch(t.Context(), set, client.RawPatch(types.JSONPatchType, fmt.Appendf(nil,
		`[{"op":"replace","path":%q,"value":{%q:%q}}]`, path, scheduling.JobClaimsAnnotation, reformattedFabric)))
	if err != nil {
		t.Fatalf("apply the same claims in another format: %v", err)
	}
	e.patchJobSet(t, set, `{"spec":{"suspend":false}}`)
	e.awaitRunning(t, ns, 4)
	if after := e.awaitClaimsOfJobs(t, ns, 2); !maps.Equal(before, after) {
		t.Errorf("claims of the resumed Jobs: got %v, want %v", after, before)
	}
	e.delete(t, set)
	e.awaitEmpty(t, ns)
}

// restartPods does what the agents of JobSet do in running pods: it reports that they are in a restart attempt.
func (e *testEnv) restartPods(t *testing.T, pods []corev1.Pod, attempt int) {
	t.Helper()
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil,
		`{"metadata":{"annotations":{"jobset.sigs.k8s.io/in-place-restart-attempt":"%d"}}}`, attempt))
	for i := range pods {
		if err := e.client.Patch(t.Context(), &pods[i], patch); err != nil {
			t.Fatal(err)
		}
	}
}

// awaitAttempt waits until JobSet has reported a restart attempt in a field of its status.
func (e *testEnv) awaitAttempt(t *testing.T, set *unstructured.Unstructured, field string, want int64) {
	t.Helper()
	eventually.Eventually(t, timeout, fmt.Sprintf("%s of the JobSet is %d", field, want), func() error {
		if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(set), set); err != nil {
			return err
		}
		got, ok, err := unstructured.NestedInt64(set.Object, "status", field)
		if err == nil && (!ok || got != want) {
			err = fmt.Errorf("got %d, and that it exists: %t", got, ok)
		}
		return err
	})
}

// runningPods returns the pods of a namespace that run.
func (e *testEnv) runningPods(t *testing.T, ns string) (running []corev1.Pod) {
	t.Helper()
	var pods corev1.PodList
	if err := e.client.List(t.Context(), &pods, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	for _, pod := range pods.Items {
		if pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil {
			running = append(running, pod)
		}
	}
	return running
}

// A JobSet that is restarted in place keeps its Jobs, and their claims stay allocated: only the failed pod is replaced,
// and uses the claim of the others.
func TestJobSet_inPlaceRestart(t *testing.T) {
	e := requireJobSetTests(t)
	e.startController(t, nil)
	e.startJobSet(t)
	ns := e.createNamespace(t, "jobset-in-place")
	set := jobSet(t, ns, "train", 2, "failurePolicy: {maxRestarts: 3, restartStrategy: InPlaceRestart}",
		fmt.Sprintf("backoffLimit: %d\n        podReplacementPolicy: Failed", math.MaxInt32))
	e.create(t, set)
	e.awaitRunning(t, ns, 4)
	e.restartPods(t, e.runningPods(t, ns), 0)
	e.awaitAttempt(t, set, "currentInPlaceRestartAttempt", 0)
	before := e.awaitClaimsOfJobs(t, ns, 2)
	failed := e.runningPods(t, ns)[0]
	e.setPhase(t, &failed, corev1.PodFailed)
	e.awaitRunning(t, ns, 4)
	for _, pod := range e.runningPods(t, ns) {
		if _, old := pod.Annotations["jobset.sigs.k8s.io/in-place-restart-attempt"]; !old {
			e.restartPods(t, []corev1.Pod{pod}, 1)
		}
	}
	e.awaitAttempt(t, set, "previousInPlaceRestartAttempt", 0)
	e.restartPods(t, e.runningPods(t, ns), 1)
	e.awaitAttempt(t, set, "currentInPlaceRestartAttempt", 1)
	e.awaitRunning(t, ns, 4)
	if after := e.awaitClaimsOfJobs(t, ns, 2); !maps.Equal(before, after) {
		t.Errorf("claims after the restart: got %v, want %v", after, before)
	}
	e.delete(t, set)
	e.awaitEmpty(t, ns)
}

// The claims of Jobs that have completed are deleted while others run, and the rest when the success policy ends the
// JobSet; its TTL deletes everything.
func TestJobSet_successPolicyAndTTL(t *testing.T) {
	e := requireJobSetTests(t)
	e.startController(t, nil)
	e.startJobSet(t)
	ns := e.createNamespace(t, "jobset-success")
	set := jobSet(t, ns, "train", 3, "successPolicy: {operator: All}\n  ttlSecondsAfterFinished: 2", "")
	e.create(t, set)
	e.awaitRunning(t, ns, 6)
	e.awaitClaimsOfJobs(t, ns, 3)
	jobs := e.jobsOf(t, ns)
	e.endPods(t, &jobs[0], corev1.PodSucceeded)
	e.awaitClaims(t, ns, "the claim of the first Job is deleted", held(2))
	e.endPods(t, &jobs[1], corev1.PodSucceeded)
	e.endPods(t, &jobs[2], corev1.PodSucceeded)
	e.awaitClaims(t, ns, "the claims of all Jobs are deleted", noClaims)
	e.awaitDeleted(t, set)
	e.awaitEmpty(t, ns)

	ns = e.createNamespace(t, "jobset-any")
	set = jobSet(t, ns, "train", 2, "successPolicy: {operator: Any}", "")
	e.create(t, set)
	e.awaitRunning(t, ns, 4)
	jobs = e.jobsOf(t, ns)
	e.endPods(t, &jobs[0], corev1.PodSucceeded)
	e.awaitClaims(t, ns, "the claims of the completed and of the ended Job are deleted", noClaims)
	e.delete(t, set)
	e.awaitEmpty(t, ns)
}

func TestJobSet_300Pods(t *testing.T) {
	e := requireJobSetTests(t)
	e.startController(t, nil)
	e.startJobSet(t)
	ns := e.createNamespace(t, "jobset-large")
	set := jobSetOf(t, ns, "train", 1, 300, "", "")
	start := time.Now()
	e.create(t, set)
	e.awaitRunning(t, ns, 300)
	t.Logf("300 pods run after %s", time.Since(start).Round(time.Millisecond))
	e.awaitClaims(t, ns, "the Job holds two claims", held(2))
	e.delete(t, set)
	e.awaitDeleted(t, set)
	e.awaitEmpty(t, ns)
}

// The controller is killed before and after each kind of write in the life of a JobSet. Its successor finishes it.
func TestJobSet_controllerKilledBetweenAnyTwoWrites(t *testing.T) {
	e := requireJobSetTests(t)
	stop := e.startController(t, nil) // it answers the webhook for JobSets
	e.startJobSet(t)
	stop()
	e.killAtEachWrite(t, e.runJobSet, "create *v1.ResourceClaim", "delete *v1.ResourceClaim", "patch *v1.Pod")
}

// runJobSet takes a JobSet from its creation, over a restart, to its deletion. When the controller is killed, another
// one continues.
func (e *testEnv) runJobSet(t *testing.T, f *failingClient) {
	t.Helper()
	ns := e.createNamespace(t, "jobset-crash")
	finish := e.startSucceededController(t, f)
	set := jobSet(t, ns, "train", 1, "failurePolicy: {maxRestarts: 1}", "")
	eventually.Eventually(t, timeout, "the JobSet is created", func() error {
		return client.IgnoreAlreadyExists(e.client.Create(t.Context(), set))
	})
	e.awaitRunning(t, ns, 2)
	before := e.awaitClaimsOfJobs(t, ns, 1)
	jobs := e.jobsOf(t, ns)
	e.endPods(t, &jobs[0], corev1.PodFailed)
	eventually.Eventually(t, 2*time.Minute, "the new Job holds a new claim, and the former one has none", func() error {
		claims, err := e.claims(t.Context(), ns)
		if err != nil {
			return err
		}
		if err := held(1)(claims); err != nil {
			return err
		}
		for _, name := range before {
			if claims[0].Name == name {
				return fmt.Errorf("claim %s belongs to the former Job", name)
			}
		}
		return nil
	})
	e.delete(t, set)
	e.awaitDeleted(t, set)
	e.awaitEmpty(t, ns)
	finish()
}

// A user without the right to create claims does not get it from JobSet's controller.
func TestJobSet_authorNeedsPermissionToCreateClaims(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	e.startJobSet(t)
	account := jobSetController.user()
	author := e.clientOf(t, account)
	err := author.Create(t.Context(), jobSet(t, "default", "refused", 1, "", ""), client.DryRunAll)
	if want := `user "` + account + `" may not create ResourceClaims`; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got error %v, want %q", err, want)
	}
	ns := e.createNamespace(t, "jobset-change")
	set := jobSet(t, ns, "train", 1, "suspend: true", "")
	e.create(t, set)
	err = e.client.Patch(t.Context(), set, client.RawPatch(types.JSONPatchType, []byte(
		`[{"op":"remove","path":"/spec/replicatedJobs/0/template/spec/template/metadata/annotations"}]`)))
	if want := "cannot be changed, because pods may use the claims: delete the JobSet"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("got error %v, want %q", err, want)
	}
}
