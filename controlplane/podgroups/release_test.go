// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
)

// releasedGroup returns the PodGroup "group" with that annotation release, and the Job
// "train" as its workload if the annotation depends on one.
func releasedGroup(release string) *scheduling.PodGroup {
	pg := testPodGroup("template", "")
	pg.Annotations = map[string]string{scheduling.ReleaseAnnotation: release}
	if policy, err := scheduling.ParseRelease(release); err == nil && policy.DependsOnWorkload() {
		pg.Annotations[scheduling.WorkloadAnnotation] = "batch/jobs/train"
	}
	return pg
}

func trainJob() *batchv1.Job {
	return &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: testNamespace, Name: "train", UID: "train-uid"}}
}

// holdForPod makes the group hold its claim for the pod "p", which is bound.
func (e *testEnv) holdForPod() {
	e.Helper()
	e.reconcile()
	pod := testPod("p", generatedName())
	pod.Spec.NodeName = "node"
	e.create(pod)
	e.allocate(generatedName(), "p")
	e.reconcile()
	e.expectReservedFor("the pod is bound", generatedName(), "p", "group-uid")
}

// removePod deletes the pod "p" and its entry, as Kubernetes does.
func (e *testEnv) removePod() {
	e.Helper()
	e.delete(testPod("p", ""))
	claim := e.claim(generatedName())
	claim.Status.ReservedFor = slices.DeleteFunc(claim.Status.ReservedFor,
		func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == "p" })
	if err := e.client.Status().Update(e.Context(), claim); err != nil {
		e.Fatal(err)
	}
}

func (e *testEnv) expectAllocated(condition string, want bool) {
	e.Helper()
	if got := e.claim(generatedName()).Status.Allocation != nil; got != want {
		e.Errorf("the claim is allocated when %s: got %t, want %t", condition, got, want)
	}
}

// expectReserved checks the reason and the message of the condition Reserved.
func (e *testEnv) expectReserved(condition, reason, message string) {
	e.Helper()
	for _, c := range e.podGroup().Status.Conditions {
		if c.Type == scheduling.ConditionReserved && (c.Reason != reason || !strings.Contains(c.Message, message)) {
			e.Errorf("condition Reserved when %s: got reason %s, %q, want %s, %q",
				condition, c.Reason, c.Message, reason, message)
		}
	}
}

func TestReconciler_releasesClaimsOfUnusedGroup(t *testing.T) {
	complete, suspended := trainJob(), trainJob()
	complete.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobFailed, Status: corev1.ConditionTrue}}
	suspended.Spec.Suspend = ptr.To(true)
	jobs := map[string]*batchv1.Job{"running": trainJob(), "complete": complete, "suspended": suspended}
	for _, tc := range []struct {
		release, job string
		want         bool // whether the claim stays allocated
	}{
		{"OnDeletion", "complete", true},
		{"OnCompletion", "complete", false},
		{"OnCompletion", "missing", false},
		{"OnCompletion", "suspended", true},
		{"OnCompletion", "running", true},
		{"OnSuspension", "suspended", false},
		{"OnSuspension", "complete", true},
		{"OnSuspension", "missing", true},
		{"OnCompletion,OnSuspension", "suspended", false},
	} {
		t.Run(tc.release+", Job is "+tc.job, func(t *testing.T) {
			e := newTestEnv(t, releasedGroup(tc.release), testTemplate("nic.dra-shared.dev"))
			if job := jobs[tc.job]; job != nil {
				e.create(job.DeepCopy())
			}
			e.holdForPod()
			e.reconcile()
			e.expectAllocated("a pod runs", true)
			e.removePod()
			e.reconcile()
			e.expectAllocated("no pod runs", tc.want)
			e.reconcile()
			if tc.want {
				e.expectReserved("no pod runs", scheduling.ReasonHeld, "")
				return
			}
			e.expectReserved("no pod runs", scheduling.ReasonReleased, "no pod uses the claims, and batch/jobs/train is ")
			// The workload is resumed: the scheduler allocates the same claim again.
			pod := testPod("p", generatedName())
			pod.Spec.NodeName = "node"
			e.create(pod)
			e.allocate(generatedName(), "p")
			e.reconcile()
			e.expectReservedFor("the next pod is bound", generatedName(), "p", "group-uid")
			e.reconcile()
			e.expectReserved("the next pod is bound", scheduling.ReasonHeld, "")
		})
	}
}

func TestReconciler_releasesClaimsAfterTimeWithoutPods(t *testing.T) {
	e := newTestEnv(t, releasedGroup("Unused=10m"), testTemplate("nic.dra-shared.dev"))
	e.holdForPod()
	e.removePod()
	if result := e.reconcile(); result.RequeueAfter != 10*time.Minute {
		t.Errorf("requeue: got %v, want 10m", result.RequeueAfter)
	}
	e.clock.SetTime(e.clock.Now().Add(9 * time.Minute))
	if result := e.reconcile(); result.RequeueAfter != time.Minute {
		t.Errorf("requeue after nine minutes: got %v, want 1m", result.RequeueAfter)
	}
	e.expectAllocated("the group has had no pods for nine minutes", true)
	e.clock.SetTime(e.clock.Now().Add(time.Minute))
	e.reconcile()
	e.expectAllocated("the group has had no pods for ten minutes", false)
	e.expectReserved("the group has had no pods for ten minutes", scheduling.ReasonReleased, "10m0s have passed")
}

func TestReconciler_reportsReleaseWithoutEffect(t *testing.T) {
	e := newTestEnv(t, releasedGroup("Unused=10m"), testTemplate("nic.dra-shared.dev"))
	e.holdForPod()
	e.removePod()
	e.reconciler.Mode = mode.Native
	e.reconcile()
	e.expectReserved("in native mode", scheduling.ReasonHeld, "the annotation scheduling.dra-shared.dev/release has no "+
		"effect: in native mode, Kubernetes releases the claims when the PodGroup is deleted")

	pg := releasedGroup("OnCompletion")
	pg.Annotations[scheduling.WorkloadAnnotation] = "example.com/trains/train"
	e = newTestEnv(t, pg, testTemplate("nic.dra-shared.dev"))
	e.holdForPod()
	if result := e.reconcile(); result.RequeueAfter != workload.RetryInterval {
		t.Errorf("requeue: got %v, want %v", result.RequeueAfter, workload.RetryInterval)
	}
	e.expectReserved("the resource is unknown", scheduling.ReasonHeld,
		"the cluster does not serve resource trains.example.com")
}
